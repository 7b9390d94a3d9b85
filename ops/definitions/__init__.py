# SPDX-License-Identifier: Apache-2.0
"""Adds the definitions of FlowNPU's operators to models, as model-local functions.

With them, ONNX Runtime checks and infers the operators, and runs the model with no FlowNPU installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.ops.definitions import (
    dense_matmul,
    flow_kv_attention,
    flow_qkv_attention,
    fused_dqp,
    paged_attention,
    q4nx_gather,
    q4nx_matmul,
    q4nx_moe,
)
from flownpu.ops.definitions.onnx_function import DOMAIN, IR_VERSION, OPSET, VERSION

if TYPE_CHECKING:
    import onnx_ir as ir

OPERATORS = {
    operator.NAME: operator
    for operator in (
        q4nx_matmul,
        fused_dqp,
        q4nx_gather,
        q4nx_moe,
        dense_matmul,
        flow_qkv_attention,
        flow_kv_attention,
        paged_attention,
    )
}


def add_functions(model: ir.Model) -> None:
    """Gives a model the functions that its FlowNPU nodes need, and no others.

    Also sets the `overload` of every such node to its variant, the model's opset imports, and an IR version of at least
    10. Existing functions of the domain are replaced, so this may be called again after a graph has changed.

    Raises:
        ValueError: A node of the domain has an unknown operator, or attributes or inputs that do not fit it; or the
            model's ONNX opset is older than the functions' bodies.
    """
    # ONNX Runtime inlines a function's body under the model's opset and ignores the function's imports.
    if model.opset_imports.get("", OPSET) < OPSET:
        raise ValueError(
            f"[{DOMAIN}] expected a model of ONNX opset {OPSET} or newer, got {model.opset_imports['']}; "
            "convert it with onnx.version_converter"
        )
    for identifier in [i for i in model.functions if i[0] == DOMAIN]:
        del model.functions[identifier]
    for node in model.graph.all_nodes():
        if node.domain != DOMAIN:
            continue
        if node.op_type not in OPERATORS:
            raise ValueError(
                f"[{DOMAIN}] expected one of {', '.join(OPERATORS)}, got {node.op_type} at node {node.name!r}"
            )
        operator = OPERATORS[node.op_type]
        node.overload = "_".join(operator.features(node))
        if (DOMAIN, node.op_type, node.overload) not in model.functions:
            for function in (operator.function(node.overload), *operator.helpers(node.overload)):
                model.functions[function.identifier()] = function
    model.opset_imports.setdefault(DOMAIN, VERSION)
    model.opset_imports.setdefault("com.microsoft", 1)
    model.ir_version = max(model.ir_version, IR_VERSION)

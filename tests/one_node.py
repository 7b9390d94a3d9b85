# SPDX-License-Identifier: Apache-2.0
"""Models of one node, for onnx's reference implementation and ONNX Runtime."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper
from onnx.reference import ReferenceEvaluator

Array = NDArray[Any]
Arrays = Sequence[Array | None]


def one_node(
    op_type: str,
    inputs: Arrays,
    outputs: Sequence[Any],
    *,
    domain: str = "",
    opset: int = 21,
    attributes: dict[str, Any] | None = None,
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model of one node, and its feeds.

    Args:
        op_type: the operator.
        inputs: in the schema's order, None for an absent one.
        outputs: the outputs' NumPy types; None for one that is not known, "" for an absent one.
        domain: the operator's domain.
        opset: the version of ONNX's operators.
        attributes: the node's.
    """
    feeds = {f"x{i}": array for i, array in enumerate(inputs) if array is not None}
    results = {f"y{i}": dtype for i, dtype in enumerate(outputs) if not isinstance(dtype, str)}
    node = helper.make_node(
        op_type,
        [f"x{i}" if f"x{i}" in feeds else "" for i in range(len(inputs))],
        [f"y{i}" if f"y{i}" in results else "" for i in range(len(outputs))],
        domain=domain,
        **(attributes or {}),
    )
    types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    types |= {
        n: 0 if dtype is None else helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for n, dtype in results.items()
    }
    values = {name: helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()}
    graph = helper.make_graph([node], "one", [values[name] for name in feeds], [values[name] for name in results])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), feeds


def by_reference(op_type: str, inputs: Arrays, outputs: int = 1, *, opset: int = 21, **attributes: Any) -> list[Array]:
    """The outputs by onnx's reference implementation, the specification's Python."""
    model, feeds = one_node(op_type, inputs, [None] * outputs, opset=opset, attributes=attributes)
    return [np.asarray(array) for array in ReferenceEvaluator(model).run(None, feeds)]


def by_onnxruntime(
    op_type: str, inputs: Arrays, outputs: Sequence[Any], *, domain: str = "", opset: int = 21, **attributes: Any
) -> list[Array]:
    """The outputs by ONNX Runtime's CPU provider; `outputs` as for `one_node`."""
    model, feeds = one_node(op_type, inputs, outputs, domain=domain, opset=opset, attributes=attributes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(array) for array in session.run(None, feeds)]

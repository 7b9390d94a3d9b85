# SPDX-License-Identifier: Apache-2.0
"""What the rules ask of a node: attributes with defaults, inputs that may be absent, constant shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import onnx_ir as ir

from flownpu.ops import flow_qkv_attention, q4nx_matmul
from flownpu.ops.onnx_function import DOMAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.graph_rewrites.rule import Builder

# Inputs of Q4NXMatMul, by the position that its definition gives them.
BIAS, RESIDUAL = (q4nx_matmul.INPUTS.index(name) for name in ("bias", "residual"))
# Inputs of FlowQKVAttention, the same.
PAST_KEY, PAST_VALUE, SEQLENS_K, Q_NORM_WEIGHT, K_NORM_WEIGHT = (
    flow_qkv_attention.INPUTS.index(name)
    for name in ("past_key", "past_value", "seqlens_k", "q_norm_weight", "k_norm_weight")
)


def attribute_int(node: ir.Node, name: str, otherwise: int | None = None) -> int:
    """An integer attribute, or `otherwise` if the node lacks it.

    Raises:
        ValueError: the node lacks it and there is no `otherwise`, or it is no integer.
    """
    value = _attribute(node, name, otherwise)
    if not isinstance(value, int):
        raise ValueError(f"{node.op_type} {node.name!r}: expected an integer attribute {name}, got {value!r}")  # noqa: TRY004
    return value


def attribute_float(node: ir.Node, name: str, otherwise: float) -> float:
    """A floating-point attribute, or `otherwise` if the node lacks it.

    Raises:
        ValueError: it is no such number.
    """
    value = _attribute(node, name, otherwise)
    if not isinstance(value, float):
        raise ValueError(f"{node.op_type} {node.name!r}: expected a number as attribute {name}, got {value!r}")  # noqa: TRY004
    return value


def attribute_text(node: ir.Node, name: str, otherwise: str) -> str:
    """A string attribute, or `otherwise` if the node lacks it.

    Raises:
        ValueError: it is no string.
    """
    value = _attribute(node, name, otherwise)
    if not isinstance(value, str):
        raise ValueError(f"{node.op_type} {node.name!r}: expected a string as attribute {name}, got {value!r}")  # noqa: TRY004
    return value


# The ValueErrors above are about a damaged model, not about an argument of the wrong type.
def _attribute(node: ir.Node, name: str, otherwise: object) -> object:
    return node.attributes[name].value if name in node.attributes else otherwise


def optional_input(node: ir.Node, position: int) -> ir.Value | None:
    """The input at `position`, or None where the node ends before it or leaves it empty."""
    return node.inputs[position] if position < len(node.inputs) else None


def is_constant(value: ir.Value | None) -> TypeGuard[ir.Value]:
    """True for an initializer that cannot be fed, and for a Constant node's output."""
    return value is not None and value.const_value is not None and not value.is_graph_input()


def constant_integers(value: ir.Value | None) -> list[int] | None:
    """A constant's elements, such as the shape of a Reshape; None if the value is absent or computed."""
    if not is_constant(value) or value.const_value is None:
        return None
    return [int(element) for element in value.const_value.numpy().reshape(-1)]


def last_dimension(value: ir.Value) -> int | None:
    """The size of the last axis, or None if it is not known before the model runs."""
    if value.shape is None or value.shape.rank() == 0:
        return None
    size = value.shape[-1]
    return size if isinstance(size, int) else None


def projection_obstacle(projection: ir.Node, *, bias: bool = False) -> str | None:
    """Why a Q4NXMatMul cannot be joined with another of the same input, or None if it can.

    Args:
        projection: the node.
        bias: whether it may have a bias.
    """
    epilogue = (RESIDUAL,) if bias else (BIAS, RESIDUAL)
    if any(optional_input(projection, i) is not None for i in epilogue) or "gating" in projection.attributes:
        return f"{projection.name} has an epilogue (bias, residual or gating)"
    if not is_constant(projection.inputs[1]):
        return f"the weight of {projection.name} is not a constant of the model"
    return None


def with_last_dimension(like: ir.Value, value: ir.Value, size: int) -> ir.Value:
    """Gives `value` the type and shape of `like`, but for the last axis; returns `value`."""
    value.type = like.type
    if like.shape is not None:
        value.shape = ir.Shape([*like.shape[:-1], size])
    return value


def attention(op: Builder, like: ir.Node, inputs: Sequence[ir.Value | None], **attributes: Any) -> Sequence[ir.Value]:
    """A FlowQKVAttention with the name and attributes of `like`, of which `attributes` are changed.

    Returns:
        output, present_key, present_value.
    """
    inputs = list(inputs)
    while inputs[-1] is None:
        inputs.pop()
    outputs: Sequence[ir.Value] = op.FlowQKVAttention(
        *inputs, _domain=DOMAIN, _version=1, _outputs=3, _name=like.name, **{**like.attributes, **attributes}
    )
    return outputs


def attention_inputs(node: ir.Node) -> list[ir.Value | None]:
    """All inputs that a FlowQKVAttention can have, with None for the absent ones."""
    return [optional_input(node, position) for position in range(len(flow_qkv_attention.INPUTS))]


def unique_name(graph: ir.Graph, name: str) -> str:
    """`name`, or with a number behind it if the graph has such an initializer."""
    taken, number = name, 1
    while taken in graph.initializers:
        taken, number = f"{name}_{number}", number + 1
    return taken

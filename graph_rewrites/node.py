# SPDX-License-Identifier: Apache-2.0
"""Helpers of the rules: attributes with defaults, inputs that may be absent, constants, sizes, names."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from flownpu.ops.contracts import input_position

if TYPE_CHECKING:
    import onnx_ir as ir

PAST_KEY, PAST_VALUE, SEQLENS_K = (
    input_position("FlowQKVAttention", name) for name in ("past_key", "past_value", "seqlens_k")
)


def attribute_int(node: ir.Node, name: str, otherwise: int | None = None) -> int:
    """An integer attribute, or `otherwise` if the node lacks it.

    Raises:
        ValueError: the node lacks it and there is no `otherwise`, or it is not an integer.
    """
    value = _attribute(node, name, otherwise)
    if not isinstance(value, int):
        raise ValueError(f"{node.op_type} {node.name!r}: expected an integer attribute {name}, got {value!r}")  # noqa: TRY004
    return value


def attribute_float(node: ir.Node, name: str, otherwise: float) -> float:
    """A floating-point attribute, or `otherwise` if the node lacks it.

    Raises:
        ValueError: it is not a floating-point number.
    """
    value = _attribute(node, name, otherwise)
    if not isinstance(value, float):
        raise ValueError(f"{node.op_type} {node.name!r}: expected a number as attribute {name}, got {value!r}")  # noqa: TRY004
    return value


# The ValueErrors above report a damaged model, not an argument of the wrong type.
def _attribute(node: ir.Node, name: str, otherwise: object) -> object:
    return node.attributes[name].value if name in node.attributes else otherwise


def optional_input(node: ir.Node, position: int) -> ir.Value | None:
    """The input at `position`, or None if the node has fewer inputs or leaves it empty."""
    return node.inputs[position] if position < len(node.inputs) else None


def is_constant(value: ir.Value | None) -> TypeGuard[ir.Value]:
    """Whether a value is an initializer that is not also an input of the graph, or a Constant node's output."""
    return value is not None and value.const_value is not None and not value.is_graph_input()


def last_dimension(value: ir.Value) -> int | None:
    """The size of the last axis, or None if it is not known before the model runs."""
    if value.shape is None or value.shape.rank() == 0:
        return None
    size = value.shape[-1]
    return size if isinstance(size, int) else None


def unique_name(graph: ir.Graph, name: str) -> str:
    """`name`, or if the graph has an initializer of that name, `name` with a number appended."""
    taken, number = name, 1
    while taken in graph.initializers:
        taken, number = f"{name}_{number}", number + 1
    return taken

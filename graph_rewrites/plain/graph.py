# SPDX-License-Identifier: Apache-2.0
"""Helpers of the rules for plain graphs: constants, shapes, operands.

A plain graph has standard operators only, as torch's exporter writes it. It computes sizes with nodes (Shape, Gather,
Concat) even if they are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnx_ir import tape

from flownpu.graph_rewrites.node import is_constant, last_dimension
from flownpu.graph_rewrites.report import Miss
from flownpu.graph_rewrites.signature import unknown_part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray


class NoMatchError(Exception):
    """A rule leaves a node that it nearly matched; the message is the reason."""


def fold_each(model: ir.Model, rule: str, fold: Callable[[ir.Node], bool]) -> tuple[int, list[Miss]]:
    """Applies a rule to each node of a graph.

    Args:
        model: changed in place.
        rule: the rule's name.
        fold: applies the rule at a node, and returns whether it did; raises NoMatchError if it nearly did.

    Returns:
        How many were folded, and the near misses.
    """
    count, misses = 0, []
    for node in list(model.graph):
        try:
            count += fold(node)
        except NoMatchError as reason:
            misses.append(Miss(rule, node.name or node.op_type, str(reason)))
    return count, misses


def constant(value: ir.Value | None) -> NDArray[np.generic] | None:
    """The elements of an initializer that is not also a graph input, or of a Constant node; None if it is neither."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def scalar(value: ir.Value | None) -> float | None:
    """The number in a constant of one element, whatever its shape; None if the value is not such a constant."""
    if value is None or (value.const_value is not None and value.const_value.size != 1):
        return None
    array = constant(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def integers(value: ir.Value | None) -> list[int] | None:
    """A constant's elements as integers; None if the value is absent or not a constant."""
    array = constant(value)
    return None if array is None else [int(element) for element in array.reshape(-1)]


def last_axis_bounds(cut: ir.Node) -> tuple[int, int] | None:
    """The first element, and the one after the last, of the last axis that a Slice keeps.

    None if it cuts along another axis, or the graph does not say its bounds or that axis' size.
    """
    sizes = (None if cut.inputs[0] is None else dimensions(cut.inputs[0])) or [None]
    start, end, axes, steps = (integers(value) for value in (*cut.inputs[1:], *[None] * (5 - len(cut.inputs))))
    if start is None or end is None or axes not in ([-1], [len(sizes) - 1]) or steps not in (None, [1]):
        return None
    return (start[0], min(end[0], sizes[-1])) if isinstance(sizes[-1], int) else None


def made_by(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """The node that makes a value, if it is one of these standard operators without unknown parts; else None."""
    node = None if value is None else value.producer()
    return node if node is not None and is_operator(node, *operators) else None


def is_operator(node: ir.Node, *operators: str) -> bool:
    """Whether a node is one of these standard operators, and has no unknown input, output or attribute."""
    return node.domain == "" and node.op_type in operators and not unknown_part(node)


def with_constant(node: ir.Node | None) -> tuple[ir.Value, float] | None:
    """The computed input of an operator with two inputs, and the number in its other input; None without both.

    For Div, Sub and Pow the number must be the second input.
    """
    if node is None or len(node.inputs) != 2:
        return None
    pairs = [node.inputs] if node.op_type in {"Div", "Sub", "Pow"} else [node.inputs, node.inputs[::-1]]
    for computed, number in pairs:
        if computed is not None and (found := scalar(number)) is not None:
            return computed, found
    return None


def check_mean(mean: ir.Node, x: ir.Value, name: str) -> None:
    """Raises NoMatchError unless a ReduceMean is over the last axis, and keeps it; its input has the axes of `x`."""
    sizes = dimensions(x)
    axes = integers(mean.inputs[1]) if len(mean.inputs) > 1 else None
    if axes != [-1] and (sizes is None or axes != [len(sizes) - 1]):
        raise NoMatchError(f"the {name} is over the axes {axes}, expected the last one")
    if "keepdims" in mean.attributes and not mean.attributes["keepdims"].as_int():
        raise NoMatchError(f"the {name} drops its axis (keepdims = 0), so that it belongs to another one")


def vector(value: ir.Value | None, x: ir.Value, name: str) -> ir.Value:
    """`value`, if it is a constant vector as long as the last axis of `x`; else raises NoMatchError."""
    if not is_constant(value) or value.shape is None or value.shape.rank() != 1:
        raise NoMatchError(f"the {name} is not a constant vector")
    if last_dimension(x) not in {None, last_dimension(value)}:
        raise NoMatchError(
            f"the {name} has {last_dimension(value)} numbers, and X {last_dimension(x)} in its last axis"
        )
    return value


def other_operand(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The operand of a node with two inputs that is not `value`."""
    first, second = node.inputs
    return second if first is value else first


def only_user(value: ir.Value) -> ir.Node | None:
    """The only node that reads a value; None if there are several, if it has unknown parts, or for a graph output."""
    users = list(value.uses())
    if len(users) != 1 or value.is_graph_output() or unknown_part(users[0].node):
        return None
    return users[0].node


def dimensions(value: ir.Value) -> list[int | str | None] | None:
    """The sizes of the axes: numbers, names of symbolic sizes, or None if unknown; None if the rank is unknown."""
    if value.shape is None:
        return None
    return [size if isinstance(size, int) else size.value for size in value.shape]


def same_size(one: int | str | None, other: int | str | None) -> bool:
    """Whether two sizes are known to be the same."""
    return one is not None and one == other


def input_of_size(graph: ir.Graph, size: int | str | None) -> tuple[ir.Value, int] | None:
    """An input of the graph, and its axis, that has a symbolic size of that name; None if there is none."""
    for value in graph.inputs if isinstance(size, str) else ():
        sizes = dimensions(value) or []
        if size in sizes:
            return value, sizes.index(size)
    return None


def insert_before(node: ir.Node, nodes: Sequence[ir.Node]) -> None:
    """Inserts a tape's new nodes before a node of a graph."""
    assert isinstance(node.graph, ir.Graph)
    node.graph.insert_before(node, nodes)


def put(
    last: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: dict[str, Any], **named: Any
) -> None:
    """Inserts a new node whose output replaces that of `last`; `named` are its name, domain and version."""
    builder = tape.Tape()
    value = builder.op(op_type, inputs, attributes, **named)
    insert_before(last, builder.nodes)
    replace(last.outputs[0], value)


def replace(old: ir.Value, new: ir.Value) -> None:
    """Makes all readers of `old` read `new`; if `old` is an output of the graph, `new` becomes that, with its name.

    `new` takes the old value's type and shape if it has none.
    """
    if new.type is None:
        new.type = old.type
    if new.shape is None:
        new.shape = old.shape
    name, is_output = old.name, old.is_graph_output()
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=is_output)
    if is_output:
        old.name = None
        new.name = name

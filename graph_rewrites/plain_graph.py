# SPDX-License-Identifier: Apache-2.0
"""What the rules for plain graphs ask of them: constants, shapes, operands.

A plain graph is one of standard operators only, as torch's exporter writes it. Its sizes are computed (Shape, Gather,
Concat) where nobody knows them, and where everybody does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from flownpu.graph_rewrites.signature import unknown_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


def constant(value: ir.Value | None) -> NDArray[np.generic] | None:
    """The elements of an initializer that cannot be fed, or of a Constant node; None if it is neither."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def scalar(value: ir.Value | None) -> float | None:
    """A constant of one element, whatever its shape; None if it is none."""
    if value is None or (value.const_value is not None and value.const_value.size != 1):
        return None
    array = constant(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def integers(value: ir.Value | None) -> list[int] | None:
    """A constant's elements as integers; None if the value is absent or computed."""
    array = constant(value)
    return None if array is None else [int(element) for element in array.reshape(-1)]


def made_by(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """The standard operator that made a value, if it is one of `operators` and nothing of it is unknown."""
    node = None if value is None else value.producer()
    return node if node is not None and is_operator(node, *operators) else None


def is_operator(node: ir.Node, *operators: str) -> bool:
    """Whether it is one of these standard operators, with inputs, outputs and attributes that are known."""
    return node.domain == "" and node.op_type in operators and unknown_part(node) is None


def with_constant(node: ir.Node | None) -> tuple[ir.Value, float] | None:
    """Of an operator with two inputs, the one that is computed and the constant; None if there is no such pair.

    Of Div and Sub the constant must be the second input.
    """
    if node is None or len(node.inputs) != 2:
        return None
    pairs = [node.inputs] if node.op_type in {"Div", "Sub", "Pow"} else [node.inputs, node.inputs[::-1]]
    for computed, number in pairs:
        if computed is not None and (found := scalar(number)) is not None:
            return computed, found
    return None


def other_operand(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The operand of a node with two inputs that is not `value`."""
    first, second = node.inputs
    return second if first is value else first


def only_user(value: ir.Value) -> ir.Node | None:
    """The node that alone reads a value, which is no output of the graph, if nothing of the node is unknown."""
    users = list(value.uses())
    if len(users) != 1 or value.is_graph_output() or unknown_part(users[0].node) is not None:
        return None
    return users[0].node


def dimensions(value: ir.Value) -> list[int | str | None] | None:
    """The sizes of the axes: numbers, names of what is not known before the model runs, or None; None without rank."""
    if value.shape is None:
        return None
    return [size if isinstance(size, int) else size.value for size in value.shape]


def same_size(one: int | str | None, other: int | str | None) -> bool:
    """Whether two sizes are known to be the same."""
    return one is not None and one == other


def input_of_size(graph: ir.Graph, size: int | str | None) -> tuple[ir.Value, int] | None:
    """An input of the graph and the axis of it that has a size of that name; None if there is none."""
    for value in graph.inputs if isinstance(size, str) else ():
        sizes = dimensions(value) or []
        if size in sizes:
            return value, sizes.index(size)
    return None


def insert_before(node: ir.Node, nodes: Sequence[ir.Node]) -> None:
    """Puts new nodes of a tape before a node of its graph."""
    assert isinstance(node.graph, ir.Graph)
    node.graph.insert_before(node, nodes)


def replace(old: ir.Value, new: ir.Value) -> None:
    """All that reads `old` reads `new`; as an output of the graph it takes the old one's name, type and shape too."""
    if new.type is None:
        new.type = old.type
    if new.shape is None:
        new.shape = old.shape
    name, is_output = old.name, old.is_graph_output()
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=is_output)
    if is_output:
        old.name = None
        new.name = name

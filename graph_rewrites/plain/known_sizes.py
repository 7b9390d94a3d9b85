# SPDX-License-Identifier: Apache-2.0
"""Replaces known computed sizes by constants, and takes other sizes from the graph's inputs."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from flownpu.graph_rewrites.plain.graph import constant, dimensions, input_of_size, integers, made_by

# The elements of a shape or of a part of one; None for an element that is not known.
Sizes: TypeAlias = list[int | None]

# A value with more elements than this is not taken for a shape.
MOST_SIZES = 16
_INTEGERS = {ir.DataType.INT64, ir.DataType.INT32}


def fold_known_sizes(model: ir.Model) -> int:
    """Replaces values that are computed from known sizes by constants: Gather(Shape(X [B, S, 64]), 2) -> 64.

    Args:
        model: a plain graph whose values have shapes; changed in place.

    Returns:
        How many values became constants.
    """
    known: dict[ir.Value, Sizes] = {}
    count = 0
    for node in list(model.graph):
        if node.domain != "" or len(node.outputs) != 1 or node.op_type == "Constant":
            continue
        output = node.outputs[0]
        sizes = _sizes(node, known)
        if sizes is None or len(sizes) > MOST_SIZES:
            continue
        known[output] = sizes
        elements = [size for size in sizes if size is not None]
        if node.op_type == "Shape" or len(elements) < len(sizes) or output.is_graph_output():
            continue
        array = np.array(elements, np.int64).reshape([] if _is_scalar(output) else [-1])
        value = ir.node("Constant", [], {"value": ir.tensor(array)})
        model.graph.insert_before(node, value)
        result = value.outputs[0]
        result.type, result.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(array.shape)
        result.const_value = ir.tensor(array)
        known[result] = sizes
        ir.convenience.replace_all_uses_with(output, result)
        count += 1
    return count


def take_sizes_from_inputs(model: ir.Model) -> int:
    """Takes sizes from an input of the graph that has them too: Gather(Shape(X [B, S, 64]), 1) -> from input_ids.

    A long prompt is computed some hundred tokens at a time, but a node that reads the shape of a hidden state would
    need all of it first.

    Args:
        model: a plain graph whose values have shapes; changed in place.

    Returns:
        How many sizes are now taken from an input.
    """
    graph, shapes, count = model.graph, dict[ir.Value, ir.Value](), 0
    for node in list(graph):
        shape = made_by(node.inputs[0], "Shape") if node.op_type == "Gather" else None
        position = integers(node.inputs[1]) if shape is not None else None
        of = None if shape is None or "start" in shape.attributes else shape.inputs[0]
        sizes = None if of is None else dimensions(of)
        if of is None or sizes is None or of.is_graph_input() or position is None or len(position) != 1:
            continue
        found = input_of_size(graph, sizes[position[0]])
        if found is None:
            continue
        source, axis = found
        if source not in shapes:
            asked = ir.node("Shape", [source])
            graph.insert_before(graph[0], asked)
            shapes[source] = asked.outputs[0]
        place = ir.node(
            "Constant", [], {"value": ir.tensor(np.array(axis).reshape(_shape_of_position(node.inputs[1])))}
        )
        graph.insert_before(node, place)
        node.replace_input_with(0, shapes[source])
        node.replace_input_with(1, place.outputs[0])
        count += 1
    return count


def _shape_of_position(value: ir.Value | None) -> tuple[int, ...]:
    """The shape of a constant position: () for a scalar, or (1,)."""
    array = constant(value)
    return () if array is None else array.shape


def _sizes(node: ir.Node, known: dict[ir.Value, Sizes]) -> Sizes | None:  # noqa: PLR0911 # a return for each operator
    """The elements of a node's result, if it computes with sizes; else None."""
    operands = [_known(value, known) for value in node.inputs]
    if node.op_type == "Shape":
        return _shape(node)
    if not operands or operands[0] is None:
        return None
    first = operands[0]
    if node.op_type in {"Unsqueeze", "Squeeze", "Identity"}:
        return first
    if node.op_type == "Cast":
        return first if node.attributes["to"].as_int() == ir.DataType.INT64 else None
    if node.op_type == "Reshape":
        return first if integers(node.inputs[1]) in ([-1], [len(first)]) else None
    if node.op_type == "Gather":
        positions = integers(node.inputs[1])
        inside = positions is not None and all(-len(first) <= i < len(first) for i in positions)
        return [first[i] for i in positions] if inside and positions is not None else None
    if node.op_type == "Slice":
        return _slice(node, first)
    if node.op_type == "Concat":
        parts = [part for part in operands if part is not None]
        return [size for part in parts for size in part] if len(parts) == len(operands) else None
    return _arithmetic(node.op_type, operands)


def _known(value: ir.Value | None, known: dict[ir.Value, Sizes]) -> Sizes | None:
    if value is None:
        return None
    if value in known:
        return known[value]
    if value.dtype not in _INTEGERS or (value.const_value is not None and value.const_value.size > MOST_SIZES):
        return None
    array = constant(value)
    return None if array is None or array.size > MOST_SIZES else [int(element) for element in array.reshape(-1)]


def _shape(node: ir.Node) -> Sizes | None:
    assert node.inputs[0] is not None
    sizes = dimensions(node.inputs[0])
    if sizes is None:
        return None
    start = node.attributes["start"].as_int() if "start" in node.attributes else 0
    end = node.attributes["end"].as_int() if "end" in node.attributes else len(sizes)
    return [size if isinstance(size, int) else None for size in sizes][start:end]


def _slice(node: ir.Node, first: Sizes) -> Sizes | None:
    start, end = integers(node.inputs[1]), integers(node.inputs[2])
    if start is None or end is None or (len(node.inputs) > 4 and integers(node.inputs[4]) != [1]):
        return None
    return first[start[0] : end[0]]


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    # For positive sizes ONNX's division, which rounds towards zero, is the same as Python's.
    "Div": lambda a, b: a // b,
}


def _arithmetic(operator: str, operands: list[Sizes | None]) -> Sizes | None:
    known = [sizes for sizes in operands if sizes is not None]
    if operator not in _OPERATIONS or len(known) != 2 or len(operands) != 2:
        return None
    first, second = known
    length = max(len(first), len(second))
    if {len(first), len(second)} - {1, length}:
        return None
    pairs = zip(first * (length // len(first)), second * (length // len(second)), strict=True)
    return [
        None if a is None or b is None or (operator == "Div" and (a < 0 or b <= 0)) else _OPERATIONS[operator](a, b)
        for a, b in pairs
    ]


def _is_scalar(value: ir.Value) -> bool:
    return value.shape is not None and value.shape.rank() == 0

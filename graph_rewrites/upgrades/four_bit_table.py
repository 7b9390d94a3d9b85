# SPDX-License-Identifier: Apache-2.0
"""Turns GatherBlockQuantized's tables of ONNX's types int4 and uint4 into bytes of two codes each.

ONNX Runtime's quantiser writes the types, ORT GenAI's builder bytes, which the rule q4nx_gather reads. A code of int4
is one of uint4 less 8, and so is its zero point; absent, the zero point is 0 for both types, and 8 for bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from flownpu.graph_rewrites.node import attribute_int, is_constant, last_dimension, optional_input, unique_name
from flownpu.graph_rewrites.report import Miss

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TYPES = {ir.DataType.INT4, ir.DataType.UINT4}
# Flips the highest bit of both codes of a byte: adds 8 to codes of int4, modulo 16.
_ADD_8 = 0x88
_TABLE, _SCALES, _ZERO_POINTS = 0, 2, 3


def bytes_of_tables(model: ir.Model) -> list[Miss]:
    """Changes all such tables of a model, in place.

    Returns:
        The nodes whose tables stay as they are, with the reasons.
    """
    misses = []
    for node in model.graph:
        if (node.domain, node.op_type) != ("com.microsoft", "GatherBlockQuantized"):
            continue
        table = optional_input(node, _TABLE)
        if table is None or table.dtype not in _TYPES:
            continue
        if reason := _obstacle(node):
            misses.append(Miss("four_bit_table", node.name or node.op_type, reason))
            continue
        codes, points = _constant(table), _constant(optional_input(node, _ZERO_POINTS))
        assert codes is not None
        _replace(model.graph, node, _TABLE, _bytes_of_codes(codes))
        if points is not None or codes.dtype == ir.DataType.UINT4:
            _replace(model.graph, node, _ZERO_POINTS, _bytes_of_points(points, codes.shape.numpy()[0], _blocks(node)))
        node.attributes["bits"] = ir.AttrInt64("bits", 4)
    return misses


def _obstacle(node: ir.Node) -> str:
    codes, zero_points = _constant(node.inputs[_TABLE]), optional_input(node, _ZERO_POINTS)
    if codes is None or (zero_points is not None and _constant(zero_points) is None):
        return "the table or its zero points are no constants of the model"
    axes = attribute_int(node, "gather_axis", 0), attribute_int(node, "quantize_axis", 1)
    shape = codes.shape.numpy()
    if len(shape) != 2 or axes[0] not in (0, -2) or axes[1] not in (1, -1):
        return f"a table {list(shape)} is gathered along axis {axes[0]} and quantised along {axes[1]}, expected 0 and 1"
    if shape[1] % 2:
        return f"rows of {shape[1]} codes do not fill bytes"
    return "" if _blocks(node) else "the scales' shape is not known to be [rows, blocks of a row]"


def _constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    return value.const_value if is_constant(value) else None


def _blocks(node: ir.Node) -> int:
    """The number of blocks in a row, each with a scale; 0 if it is not known."""
    scales = optional_input(node, _SCALES)
    return 0 if scales is None or scales.shape is None or len(scales.shape) != 2 else last_dimension(scales) or 0


def _bytes_of_codes(codes: ir.TensorProtocol) -> NDArray[np.uint8]:
    """The table's codes, [rows, columns / 2]."""
    packed = np.frombuffer(codes.tobytes(), np.uint8).reshape(codes.shape.numpy()[0], -1)
    return packed ^ np.uint8(_ADD_8) if codes.dtype == ir.DataType.INT4 else packed


def _bytes_of_points(points: ir.TensorProtocol | None, rows: int, blocks: int) -> NDArray[np.uint8]:
    """The zero points, each row in whole bytes; None: all are 0."""
    numbers = np.zeros((rows, blocks), np.int8)
    if points is not None:
        numbers += points.numpy().astype(np.int8).reshape(rows, blocks) + (8 if points.dtype == ir.DataType.INT4 else 0)
    padded = np.pad(numbers.astype(np.uint8), ((0, 0), (0, blocks % 2)))
    packed: NDArray[np.uint8] = padded[:, ::2] | padded[:, 1::2] << np.uint8(4)
    return packed


def _replace(graph: ir.Graph, node: ir.Node, position: int, array: NDArray[np.uint8]) -> None:
    """Makes an array the constant at an input of a node."""
    old = optional_input(node, position)
    name = unique_name(graph, f"{old.name if old is not None else node.name}_bytes")
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name), type=ir.TensorType(ir.DataType.UINT8),
                     shape=ir.Shape(array.shape))  # fmt: skip
    graph.register_initializer(value)
    node.resize_inputs(max(len(node.inputs), position + 1))
    node.replace_input_with(position, value)

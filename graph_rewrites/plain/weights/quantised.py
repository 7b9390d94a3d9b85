# SPDX-License-Identifier: Apache-2.0
"""Shape inference through products and tables of quantised weights, whose operators ONNX does not have."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import onnx_ir as ir

from flownpu.graph_rewrites.node import attribute_int

if TYPE_CHECKING:
    from collections.abc import Iterator

_ORT = "com.microsoft"


@contextmanager
def shown_with_floats(model: ir.Model) -> Iterator[None]:
    """Shows products and tables of quantised weights as those of floats, of which ONNX knows the results' shapes.

    MatMulNBits(X, codes, ..; N, K)         as MatMul(X, W [K, N])
    GatherBlockQuantized(codes, ids, ..)    as Gather(W [M, K], ids)

    W is an input of the graph meanwhile. Afterwards the nodes are what they were.

    Args:
        model: its nodes may be changed within the context, except that these must not be replaced.

    Raises:
        ValueError: a MatMulNBits lacks a required attribute.
    """
    graph, given = model.graph, len(model.graph.inputs)
    shown = {node: (node.op_type, tuple(node.inputs), tuple(node.attributes.values())) for node in graph}
    shown = {node: kept for node, kept in shown.items() if node.domain == _ORT and _show(node, graph)}
    try:
        yield
    finally:
        for node, (operator, inputs, attributes) in shown.items():
            _set(node, operator, _ORT, inputs)
            node.attributes.update({attribute.name: attribute for attribute in attributes})
        del graph.inputs[given:]


def _show(node: ir.Node, graph: ir.Graph) -> bool:
    """Changes a node to that of floats; whether it is one of a quantised weight that is understood."""
    if node.op_type == "MatMulNBits":
        weight = _weight([attribute_int(node, "K"), attribute_int(node, "N")], graph)
        _set(node, "MatMul", "", (node.inputs[0], weight))
        return True
    codes = node.inputs[0] if node.op_type == "GatherBlockQuantized" else None
    if codes is None or codes.shape is None or len(codes.shape) != 2 or attribute_int(node, "gather_axis", 0) != 0:
        return False
    rows, columns = codes.shape.numpy()
    in_byte = 8 // attribute_int(node, "bits", 4) if codes.dtype == ir.DataType.UINT8 else 1
    _set(node, "Gather", "", (_weight([rows, columns * in_byte], graph), node.inputs[1]))
    return True


def _weight(sizes: list[int], graph: ir.Graph) -> ir.Value:
    name = f"weight_in_floats_{len(graph.inputs)}"
    weight = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(sizes))
    graph.inputs.append(weight)
    return weight


def _set(node: ir.Node, operator: str, domain: str, inputs: tuple[ir.Value | None, ...]) -> None:
    """Gives a node another operator, without attributes."""
    node.op_type, node.domain = operator, domain
    node.attributes.clear()
    node.resize_inputs(len(inputs))
    for place, value in enumerate(inputs):
        node.replace_input_with(place, value)

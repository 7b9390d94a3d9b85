# SPDX-License-Identifier: Apache-2.0
"""The rows of an embedding -> Q4NXGather."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx_ir import tape

from flownpu.graph_rewrites.float_weight import FloatWeight, float_weight
from flownpu.graph_rewrites.node import attribute_int
from flownpu.graph_rewrites.plain_graph import insert_before, is_operator, made_by, replace
from flownpu.graph_rewrites.report import Miss
from flownpu.ops.definitions.onnx_function import DOMAIN, VERSION

if TYPE_CHECKING:
    import onnx_ir as ir

_RULE = "embedding"


def quantise_embeddings(model: ir.Model) -> tuple[int, list[Miss]]:
    """The table as Q4NX; tied to an LM head, the same initializer.

    Gather(W [M, K], ids; axis=0) -> Q4NXGather(quantised W, ids; M, K)       for ids that are an input of the graph

    Other tables (positions) stay as they are: they are small, and they are added to what the input says.

    Args:
        model: a plain graph whose projections are quantised; changed in place.

    Returns:
        How many were rewritten, and those whose table cannot become Q4NX.
    """
    count, misses = 0, []
    for node in list(model.graph):
        if not is_operator(node, "Gather") or attribute_int(node, "axis", 0) != 0:
            continue
        weight, ids = float_weight(node.inputs[0], transposed=False), _input_of(node.inputs[1])
        if weight is None or ids is None:
            continue
        if (obstacle := weight.obstacle()) is not None:
            misses.append(Miss(_RULE, node.name or "Gather", obstacle))
            continue
        builder = tape.Tape()
        value = _rows(builder, node, weight, model.graph)
        insert_before(node, builder.nodes)
        replace(node.outputs[0], value)
        count += 1
    return count, misses


def _rows(builder: tape.Tape, node: ir.Node, weight: FloatWeight, graph: ir.Graph) -> ir.Value:
    attributes = {"M": weight.rows, "K": weight.columns}
    inputs = [weight.initializer(graph, tied=True), node.inputs[1]]
    return builder.op("Q4NXGather", inputs, attributes, domain=DOMAIN, version=VERSION, name=node.name)


def _input_of(value: ir.Value | None) -> ir.Value | None:
    """The graph's input that a value is, reshaped or not."""
    while (node := made_by(value, "Reshape", "Identity")) is not None:
        value = node.inputs[0]
    return value if value is not None and value.is_graph_input() else None

# SPDX-License-Identifier: Apache-2.0
"""The rows of an embedding -> Q4NXGather."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.graph_rewrites.node import attribute_int
from flownpu.graph_rewrites.plain.graph import NoMatchError, fold_each, is_operator, made_by, put
from flownpu.graph_rewrites.plain.weights.float_weight import float_weight
from flownpu.ops.definitions.onnx_function import DOMAIN, VERSION

if TYPE_CHECKING:
    import onnx_ir as ir

    from flownpu.graph_rewrites.report import Miss


def quantise_embeddings(model: ir.Model) -> tuple[int, list[Miss]]:
    """Quantises the table of an embedding; one that is tied to an LM head shares its initializer.

    Gather(W [M, K], ids; axis=0) -> Q4NXGather(quantised W, ids; M, K)       for ids that are an input of the graph

    Other tables, such as those of positions, stay as they are: they are small.

    Args:
        model: a plain graph whose projections are quantised; changed in place.

    Returns:
        How many were rewritten, and the embeddings whose table cannot become Q4NX.
    """
    return fold_each(model, "embedding", lambda node: _quantise(node, model.graph))


def _quantise(node: ir.Node, graph: ir.Graph) -> bool:
    if not is_operator(node, "Gather") or attribute_int(node, "axis", 0) != 0:
        return False
    weight = float_weight(node.inputs[0], transposed=False)
    if weight is None or _input_of(node.inputs[1]) is None:
        return False
    if (obstacle := weight.obstacle()) is not None:
        raise NoMatchError(obstacle)
    inputs = [weight.initializer(graph, tied=True), node.inputs[1]]
    sizes = {"M": weight.rows, "K": weight.columns}
    put(node, "Q4NXGather", inputs, sizes, domain=DOMAIN, version=VERSION, name=node.name)
    return True


def _input_of(value: ir.Value | None) -> ir.Value | None:
    """The graph's input that a value is, possibly reshaped; None if it is not one."""
    while (node := made_by(value, "Reshape", "Identity")) is not None:
        value = node.inputs[0]
    return value if value is not None and value.is_graph_input() else None

# SPDX-License-Identifier: Apache-2.0
"""A product whose result is cut into parts -> a product for each part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx_ir import tape

from flownpu.graph_rewrites.node import is_constant, unique_name
from flownpu.graph_rewrites.plain.graph import fold_each, insert_before, is_operator, last_axis_bounds, replace
from flownpu.graph_rewrites.plain.weights.float_weight import FloatWeight, float_weight
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from flownpu.graph_rewrites.report import Miss


def part_products(model: ir.Model) -> tuple[int, list[Miss]]:
    """Computes the parts of a fused projection by themselves, as most models have them.

    Slice(MatMul(X, W [K, M]), first, last), ..  ->  MatMul(X, W[:, first:last]), ..

    The rules for separate queries, keys and values, and for a gate and its up projection, then join them again.

    Args:
        model: a plain graph whose values have shapes; changed in place. Parts of a weight are read with it.

    Returns:
        How many products were parted, and no near misses: results are also cut for other purposes.
    """
    return fold_each(model, "part_products", lambda node: _part(node, model.graph))


def _part(node: ir.Node, graph: ir.Graph) -> bool:
    weight = float_weight(node.inputs[1], transposed=True) if is_operator(node, "MatMul") else None
    if weight is None or is_constant(node.inputs[0]):
        return False
    result = node.outputs[0]
    cuts = [(use.node, last_axis_bounds(use.node) if is_operator(use.node, "Slice") else None) for use in result.uses()]
    bounds = sorted(bound for _, bound in cuts if bound is not None)
    firsts, lasts = [first for first, _ in bounds], [last for _, last in bounds]
    if result.is_graph_output() or len(bounds) < max(2, len(cuts)) or [0, *lasts] != [*firsts, weight.rows]:
        return False
    if any(last - first < q4nx.BLOCK_ROWS for first, last in bounds):  # no weight of Q4NX has so few rows
        return False
    for cut, bound in cuts:
        assert bound is not None
        builder = tape.Tape()
        part = builder.op(
            "MatMul", [node.inputs[0], _columns(weight, *bound, graph)], name=f"{cut.outputs[0].name}/product"
        )
        insert_before(cut, builder.nodes)
        replace(cut.outputs[0], part)
    return True


def _columns(weight: FloatWeight, first: int, last: int, graph: ir.Graph) -> ir.Value:
    """An initializer [K, last - first], which is read when the graph is saved."""
    stored, transposed = ir.convenience.get_const_tensor(weight.value), weight.transposed
    assert stored is not None

    def read() -> ir.TensorProtocol:
        numbers = stored.numpy()
        part = np.ascontiguousarray(numbers[:, first:last] if transposed else numbers[first:last].T)
        if isinstance(stored, ir.ExternalTensor):
            stored.release()
        return ir.Tensor(part)

    name = unique_name(graph, f"{weight.value.name}.{first}")
    shape = ir.Shape([weight.columns, last - first])
    tensor = ir.LazyTensor(read, stored.dtype, shape, name=name)
    value = ir.Value(name=name, type=ir.TensorType(stored.dtype), shape=shape, const_value=tensor)
    graph.register_initializer(value)
    return value

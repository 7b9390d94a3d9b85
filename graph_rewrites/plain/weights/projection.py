# SPDX-License-Identifier: Apache-2.0
"""Products with constant weights -> Q4NXMatMul, their weights quantised."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import onnx_ir as ir

from flownpu.graph_rewrites.node import attribute_float, attribute_int, is_constant, optional_input
from flownpu.graph_rewrites.plain.graph import (
    NoMatchError,
    dimensions,
    fold_each,
    is_operator,
    only_user,
    other_operand,
    put,
)
from flownpu.graph_rewrites.plain.weights.float_weight import FloatWeight, float_weight
from flownpu.ops.definitions.onnx_function import DOMAIN, VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.graph_rewrites.report import Miss


class _Match(NamedTuple):
    x: ir.Value
    weight: FloatWeight
    bias: ir.Value | None
    last: ir.Node


def quantise_projections(model: ir.Model) -> tuple[int, list[Miss]]:
    """Quantises constant weights of products to 4 bits, and moves the bias into the operator.

    Add(MatMul(X [.., K], W [K, M]), bias [M]),  Gemm(X, W, bias)  -> Q4NXMatMul(X, quantised W, bias; M, K)

    A product of two computed values is left, and is not a near miss.

    Args:
        model: a plain graph; changed in place.

    Returns:
        How many were rewritten, and the products whose weight cannot become Q4NX.
    """
    return fold_each(model, "projection", lambda node: _quantise(node, model.graph))


def _quantise(node: ir.Node, graph: ir.Graph) -> bool:
    match = _match(node) if is_operator(node, "MatMul", "Gemm") else None
    if match is None:
        return False
    weight = match.weight
    inputs = [match.x, weight.initializer(graph), *([] if match.bias is None else [match.bias])]
    sizes = {"M": weight.rows, "K": weight.columns}
    put(match.last, "Q4NXMatMul", inputs, sizes, domain=DOMAIN, version=VERSION, name=node.name)
    return True


def _match(node: ir.Node) -> _Match | None:
    """The product with its bias, or None if it has no constant weight; NoMatchError if the rule cannot take it."""
    transposed = node.op_type == "MatMul" or not attribute_int(node, "transB", 0)
    weight = float_weight(node.inputs[1], transposed=transposed)
    if weight is None or node.inputs[0] is None or is_constant(node.inputs[0]):
        return None
    if (obstacle := weight.obstacle()) is not None:
        raise NoMatchError(obstacle)
    if node.op_type == "Gemm":
        factors = [attribute_float(node, name, 1.0) for name in ("alpha", "beta")]
        if attribute_int(node, "transA", 0) or factors != [1.0, 1.0]:
            raise NoMatchError("a Gemm with transA, alpha or beta, which are no part of a projection")
        bias = optional_input(node, 2)
        if bias is not None and not _is_vector(bias, weight.rows):
            raise NoMatchError(f"the bias of the Gemm is not a constant of {weight.rows} numbers")
        return _Match(node.inputs[0], weight, bias, node)
    return _with_bias(node, weight)


def _with_bias(node: ir.Node, weight: FloatWeight) -> _Match:
    assert node.inputs[0] is not None
    added = only_user(node.outputs[0])
    if added is not None and (added.domain, added.op_type) == ("", "Add"):
        bias = other_operand(added, node.outputs[0])
        if bias is not None and _is_vector(bias, weight.rows):
            return _Match(node.inputs[0], weight, bias, added)
    return _Match(node.inputs[0], weight, None, node)


def _is_vector(value: ir.Value, size: int) -> bool:
    sizes: Sequence[int | str | None] | None = dimensions(value)
    return is_constant(value) and list(sizes or []) == [size] and value.dtype == ir.DataType.FLOAT

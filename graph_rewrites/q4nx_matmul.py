# SPDX-License-Identifier: Apache-2.0
"""MatMulNBits -> Q4NXMatMul."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxscript.rewriter import MatchContext, MatchResult

from flownpu.graph_rewrites.node import attribute_int, optional_input
from flownpu.graph_rewrites.quantized_weight import QuantizedWeight
from flownpu.graph_rewrites.rule import Builder, Rule
from flownpu.ops.onnx_function import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir


class Q4NXMatMul(Rule):
    """Weights of a matrix product as Q4NX, with their codes unchanged but in blocks of 16 columns.

    MatMulNBits(X, codes, scales[, zero_points][, bias]; K, N) = X . (scale * (code - zero_point))^T + bias
        -> Q4NXMatMul(X, W[, bias]; M=N, K)

    `accuracy_level` has no counterpart: how activations are held is an option of the execution provider, not of the
    model.
    """

    def pattern(self, op: Builder, x: Any) -> Any:
        return op.MatMulNBits(x, _domain="com.microsoft", _allow_other_inputs=True, _outputs=["y"])

    def examine(self, context: MatchContext, **_: object) -> MatchResult:
        node, result = context.root, MatchResult()
        if (bits := attribute_int(node, "bits", 4)) != 4:
            return result.fail(f"bits={bits}: Q4NX stores 4-bit codes; export this weight with 4 bits", node)
        if attribute_int(node, "weight_prepacked", 0):
            return result.fail("weight_prepacked: the codes are in an order made for a GPU; export without it", node)
        if optional_input(node, 4) is not None:
            return result.fail(
                "g_idx: Q4NX groups are 32 columns in order; export without reordering (act-order)", node
            )
        if (obstacle := _weight(node).obstacle()) is not None:
            return result.fail(obstacle, node)
        return result

    def rewrite(self, op: Builder, x: ir.Value, y: ir.Value) -> ir.Value:
        node = y.producer()
        assert node is not None
        weight = _weight(node)
        inputs = [x, weight.initializer(op)]
        if (bias := optional_input(node, 5)) is not None:
            inputs.append(bias)
        product: ir.Value = op.Q4NXMatMul(
            *inputs, M=weight.rows, K=weight.columns, _domain=DOMAIN, _version=1, _name=node.name
        )
        return product


def _weight(node: ir.Node) -> QuantizedWeight:
    codes, scales = node.inputs[1], node.inputs[2]
    assert codes is not None
    assert scales is not None
    return QuantizedWeight(
        codes=codes,
        scales=scales,
        zero_points=optional_input(node, 3),
        rows=attribute_int(node, "N"),
        columns=attribute_int(node, "K"),
        block_size=attribute_int(node, "block_size"),
    )

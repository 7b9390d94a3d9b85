# SPDX-License-Identifier: Apache-2.0
"""GatherBlockQuantized -> Q4NXGather."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxscript.rewriter import MatchContext, MatchResult

from flownpu.graph_rewrites.node import attribute_int, optional_input
from flownpu.graph_rewrites.quantized_weight import QuantizedWeight
from flownpu.graph_rewrites.rule import Builder, Rule
from flownpu.ops.onnx_function import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir


class Q4NXGather(Rule):
    """The embedding's table as Q4NX; tied to the LM head, the same initializer.

    GatherBlockQuantized(Reshape(codes, [M, K/2]), indices, scales[, zero_points])
        = (scale * (code - zero_point))[indices, :]
        -> Q4NXGather(W, indices; M, K)

    An index outside 0..M-1 is an error of Q4NXGather, where GatherBlockQuantized counts -M..-1 from the end and gives
    zeros for what is further out; token ids are neither.
    """

    def pattern(self, op: Builder, data: Any, indices: Any) -> Any:
        return op.GatherBlockQuantized(
            data, indices, _domain="com.microsoft", _allow_other_inputs=True, _outputs=["rows"]
        )

    def examine(self, context: MatchContext, **_: object) -> MatchResult:
        node, result = context.root, MatchResult()
        scales = optional_input(node, 2)
        if scales is None or scales.shape is None:
            return result.fail("scales are missing, or their shape is not known; expected [rows, blocks]", node)
        if (bits := attribute_int(node, "bits", 4)) != 4:
            return result.fail(f"bits={bits}: Q4NX stores 4-bit codes; export this table with 4 bits", node)
        axes = attribute_int(node, "gather_axis", 0), attribute_int(node, "quantize_axis", 1)
        if axes not in {(0, 1), (0, -1)} or scales.shape.rank() != 2:
            return result.fail(f"gather_axis, quantize_axis={axes}: expected rows of a matrix quantised along K", node)
        if (obstacle := _weight(node).obstacle()) is not None:
            return result.fail(obstacle, node)
        return result

    def rewrite(self, op: Builder, indices: ir.Value, rows: ir.Value, **_: object) -> ir.Value:
        node = rows.producer()
        assert node is not None
        weight = _weight(node)
        embedded: ir.Value = op.Q4NXGather(
            weight.initializer(op),
            indices,
            M=weight.rows,
            K=weight.columns,
            _domain=DOMAIN,
            _version=1,
            _name=node.name,
        )
        return embedded


def _weight(node: ir.Node) -> QuantizedWeight:
    data, scales = node.inputs[0], node.inputs[2]
    assert data is not None
    assert scales is not None
    # A tied table is the LM head's codes [M, K / block_size, block_size / 2], reshaped to [M, K / 2].
    reshape = data.producer()
    codes = reshape.inputs[0] if reshape is not None and reshape.op_type == "Reshape" else data
    assert codes is not None
    assert scales.shape is not None
    rows = scales.shape.numpy()[0]
    return QuantizedWeight(
        codes=codes,
        scales=scales,
        zero_points=optional_input(node, 3),
        rows=rows,
        columns=2 * codes.const_value.size // rows if codes.const_value is not None else 0,
        block_size=attribute_int(node, "block_size", 128),
    )

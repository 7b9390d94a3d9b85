# SPDX-License-Identifier: Apache-2.0
"""Gate, up, activation and product of a gated feed-forward network -> one Q4NXMatMul."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxscript.rewriter import MatchContext, MatchResult, pattern

from flownpu.graph_rewrites.node import attribute_int, attribute_text, projection_obstacle
from flownpu.graph_rewrites.quantized_weight import concatenated_initializer
from flownpu.graph_rewrites.rule import Builder, Rule
from flownpu.ops.onnx_function import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir


class GatedProjection(Rule):
    """Gate and up projection run over the same input, and the epilogue joins them.

    act(Q4NXMatMul(X, Wg)) * Q4NXMatMul(X, Wu) -> Q4NXMatMul(X, [Wg; Wu]; gating)

    gating = "geglu" for act = GELU with the tanh approximation (Gemma3), "swiglu" for act(g) = g * sigmoid(g) (Llama,
    Qwen3). Each weight is padded to whole blocks of 32 rows, so any number of rows will do.
    """

    def pattern(self, op: Builder, x: Any) -> Any:
        gate = op.Q4NXMatMul(x, _domain=DOMAIN, _allow_other_inputs=True, _outputs=["gate"])
        up = op.Q4NXMatMul(x, _domain=DOMAIN, _allow_other_inputs=True, _outputs=["up"])
        activated = pattern.OrValue(
            [
                op.Gelu(gate),
                op.FastGelu(gate, _domain="com.microsoft"),
                op.Mul(gate, op.Sigmoid(gate)),
            ],
            name="activated",
        )
        return op.Mul(activated, up)

    def examine(
        self, context: MatchContext, activated: ir.Value, gate: ir.Value, up: ir.Value, **_: object
    ) -> MatchResult:
        result = MatchResult()
        activation = activated.producer()
        assert activation is not None
        if activation.op_type == "Gelu" and attribute_text(activation, "approximate", "none") != "tanh":
            return result.fail("GELU without the tanh approximation: gating knows geglu (tanh) and swiglu", activation)
        projections = gate.producer(), up.producer()
        for projection in projections:
            assert projection is not None
            if (obstacle := projection_obstacle(projection)) is not None:
                return result.fail(obstacle, projection)
        rows = [attribute_int(projection, "M") for projection in projections if projection is not None]
        if rows[0] != rows[1]:
            return result.fail(f"gate and up have {rows[0]} and {rows[1]} rows, expected as many", context.root)
        return result

    def rewrite(
        self, op: Builder, x: ir.Value, activated: ir.Value, gate: ir.Value, up: ir.Value, **_: object
    ) -> ir.Value:
        activation, gate_node, up_node = activated.producer(), gate.producer(), up.producer()
        assert activation is not None
        assert gate_node is not None
        assert up_node is not None
        weights = [weight for node in (gate_node, up_node) if (weight := node.inputs[1]) is not None]
        columns = attribute_int(gate_node, "K")
        product: ir.Value = op.Q4NXMatMul(
            x,
            concatenated_initializer(op, weights, columns, "gate_up_proj.weight_Q4NX"),
            M=attribute_int(gate_node, "M"),
            K=columns,
            gating="swiglu" if activation.op_type == "Mul" else "geglu",
            _domain=DOMAIN,
            _version=1,
            _name=gate_node.name,
        )
        return product

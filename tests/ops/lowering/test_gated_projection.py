# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from flownpu.graph_rewrites import testing
from flownpu.ops import q4nx

ROWS, COLUMNS = 40, 96
MODEL = """
gated (float[B, S, 96] x, float[B, S, 96] other) => (float[B, S, 40] y{also}) {{
    gate = ai.flownpu.Q4NXMatMul <M = 40, K = 96> (x, gate_weight{gate_bias})
    up = ai.flownpu.Q4NXMatMul <M = {up_rows}, K = 96> ({up_input}, up_weight)
    {activation}
    y = Mul ({factors})
}}
"""
TANH = 'activated = Gelu <approximate = "tanh"> (gate)'
DEFAULTS = {
    "activation": TANH,
    "factors": "activated, up",
    "up_input": "x",
    "up_rows": "40",
    "gate_bias": "",
    "also": "",
}
SILU = "sigmoid = Sigmoid (gate)  activated = Mul ({})"


def _model(**changed: str) -> ir.Model:
    generator = np.random.default_rng(2)
    weights = {
        f"{name}_weight": q4nx.pack(*q4nx.quantize(generator.standard_normal((ROWS, COLUMNS), np.float32) / 10))
        for name in ("gate", "up")
    }
    return testing.parse(MODEL.format(**(DEFAULTS | changed)), **weights, gate_bias=np.ones(ROWS, np.float32))


@pytest.mark.parametrize("factors", ["activated, up", "up, activated"])
@pytest.mark.parametrize(
    ("activation", "gating"),
    [
        (TANH, "geglu"),
        ("activated = com.microsoft.FastGelu (gate)", "geglu"),
        (SILU.format("gate, sigmoid"), "swiglu"),
        (SILU.format("sigmoid, gate"), "swiglu"),
    ],
)
def test_gate_and_up_become_one(activation: str, gating: str, factors: str) -> None:
    original = _model(activation=activation, factors=factors)
    model, misses = testing.rewritten(original, "gated_projection")

    assert testing.operator_names(model) == ["Q4NXMatMul"]
    assert misses == []
    (node,) = model.graph
    assert node.attributes["gating"].as_string() == gating
    weight = node.inputs[1]
    assert weight is not None
    assert isinstance(weight.const_value, ir.LazyTensor)
    assert tuple(weight.shape or ()) == q4nx.blocks_shape(ROWS, COLUMNS, gated=True)

    x = np.random.default_rng(5).standard_normal((2, 3, COLUMNS), np.float32)
    feeds = {"x": x, "other": x}
    testing.add_functions(original)
    (result,), (expected,) = testing.run(model, feeds), testing.run(original, feeds)
    gate, up = (q4nx.dequantize(part, ROWS, COLUMNS) for part in np.split(weight.const_value.numpy(), 2))
    # |act'| <= 1.13 and |act(g)| <= |g| for both activations; each evaluates its activation with a tanh or a logistic
    # function that is right to 2^-20 (ORT's rational approximations), relative to 1, times g.
    gate_bound, up_bound = testing.product_bound(x, gate), testing.product_bound(x, up)
    gates, ups = np.abs(x @ gate.T), np.abs(x @ up.T)
    bound = (1.13 * gate_bound + 2 * 2.0**-20 * gates) * ups + up_bound * gates
    assert np.all(np.abs(result - expected) <= bound)
    testing.check(model)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_model(activation="activated = Gelu (gate)"), "GELU without the tanh approximation"),
        (_model(gate_bias=", gate_bias"), "gate_projection has an epilogue (bias, residual or gating)"),
        (_model(up_rows="20"), "gate and up have 40 and 20 rows, expected as many"),
        (_model(up_input="other"), "gate and up are products of different values"),
        (_model(also=", float up"), "something else reads gate, up or the activation"),
        (_model(also=", float gate"), "something else reads gate, up or the activation"),
        (_model(also=", float activated"), "something else reads gate, up or the activation"),
    ],
)
def test_unmatched_graph_reports_miss(model: ir.Model, reason: str) -> None:
    model.graph[0].name = "gate_projection"
    misses: list[Any] = []
    assert testing.apply("gated_projection", model, misses) == 0
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("gated_projection", reason)]


def test_plain_product_is_no_miss() -> None:
    model = testing.parse("scaled (float[B, S] x, float factor) => (float[B, S] y) { y = Mul (x, factor) }")
    misses: list[Any] = []
    assert testing.apply("gated_projection", model, misses) == 0
    assert misses == []

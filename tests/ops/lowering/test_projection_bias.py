# SPDX-License-Identifier: Apache-2.0
"""The rule projection_bias: Adds after a projection that move into it, and those that stay."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from flownpu.graph_rewrites import testing
from flownpu.ops import q4nx

MODEL = """
biased (float[B, S, 96] x, float[B, S, 64] other) => (float[B, S, 64] y{also}) {{
    p = ai.flownpu.Q4NXMatMul <M = 64, K = 96{attributes}> (x, weight{epilogue})
    y = Add ({operands})
}}
"""


def _model(bias: tuple[int, ...] = (64,), operands: str = "p, bias", **parts: str) -> ir.Model:
    generator = np.random.default_rng(5)
    weight = q4nx.quantize(generator.standard_normal((128 if "attributes" in parts else 64, 96), np.float32))
    constants: dict[str, Any] = {
        "weight": q4nx.pack(*weight, q4nx.NARROW),
        "bias": generator.standard_normal(bias, np.float32),
        "first": generator.standard_normal(64, np.float32),
    }
    given = {"attributes": "", "epilogue": "", "also": ""} | parts
    text = MODEL.format(operands=operands, **given)
    return testing.parse(text, **{name: array for name, array in constants.items() if name in text})


@pytest.mark.parametrize("operands", ["p, bias", "bias, p"])
def test_projection_takes_bias_of_following_add(operands: str) -> None:
    """Both give the same numbers but for the rounding of sums to float32, by 2^-24 of a sum in each."""
    original, _ = testing.rewritten(_model(operands=operands))
    model, misses = testing.rewritten(original, "projection_bias")
    assert misses == []
    assert testing.operator_names(model) == ["Q4NXMatMul"]
    (node,) = model.graph
    assert [value and value.name for value in node.inputs] == ["x", "weight", "bias"]
    assert [value.name for value in node.outputs] == ["y"]
    inputs = {name: np.random.default_rng(6).standard_normal((1, 3, size)) for name, size in (("x", 96), ("other", 64))}
    feeds = {name: array.astype(np.float32) for name, array in inputs.items()}
    (found,), (expected,) = (testing.run(graph, feeds) for graph in (model, original))
    np.testing.assert_allclose(found, expected, rtol=0, atol=4 * 2.0**-24 * np.abs(expected).max())


@pytest.mark.parametrize(
    "model",
    [
        _model(operands="p, other"),
        _model((3, 64)),
        _model((1,)),
        _model((1, 64)),
        _model(also=", float[B, S, 64] p"),
        _model(epilogue=", first"),
        _model(attributes=', gating = "swiglu"'),
    ],
    ids=["no constant", "rows of it", "one number", "axes before it", "a product that is read", "a bias", "gated"],
)
def test_sum_that_is_no_projection_bias_is_left(model: ir.Model) -> None:
    changed, misses = testing.rewritten(model, "projection_bias")
    assert misses == []
    assert testing.operator_names(changed) == ["Q4NXMatMul", "Add"]

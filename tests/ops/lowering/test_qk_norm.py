# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from flownpu.graph_rewrites import testing

# H = 4 query heads and G = 2 KV heads of d = 16.
MODEL = """
attention (float[B, S, 64] query, float[B, S, 32] key, float[B, S, 32] value,
           float[B, 2, P, 16] past_key, float[B, 2, P, 16] past_value, int32[B] seqlens_k, int32 total)
    => (float[B, S, 64] output, float present_key, float present_value{also}) {{
    q_apart = Constant <value_ints = {q_apart}> ()
    q_joined = Constant <value_ints = {q_joined}> ()
    k_apart = Constant <value_ints = {k_apart}> ()
    k_joined = Constant <value_ints = {k_joined}> ()
    q0 = Reshape (query, q_apart)
    q1 = SimplifiedLayerNormalization <axis = {axis}, epsilon = 0.01> (q0, q_weight)
    q2 = Reshape (q1, q_joined)
    k0 = Reshape (key, k_apart)
    k1 = {k_norm} <axis = -1, epsilon = {k_epsilon}> (k0, k_weight)
    k2 = Reshape (k1, k_joined)
    output, present_key, present_value = ai.flownpu.FlowQKVAttention
        <num_heads = 4, kv_num_heads = 2, head_size = 16, do_rotary = 0, softcap = 8.0>
        (q2, k2, value, past_key, past_value, seqlens_k, total{norms})
}}
"""
SHAPES = {"q_apart": "[0, -1, 16]", "q_joined": "[0, -1, 64]", "k_apart": "[0, -1, 16]", "k_joined": "[0, -1, 32]"}
OTHERS = {"axis": "-1", "k_norm": "SimplifiedLayerNormalization", "k_epsilon": "0.01", "also": "", "norms": ""}
WEIGHTS = {
    "q_weight": np.linspace(0.5, 1.5, 16, dtype=np.float32),
    "k_weight": np.linspace(2.0, -1.0, 16, dtype=np.float32),
}


def _model(weights: dict[str, testing.Array] | None = None, **changed: str) -> ir.Model:
    return testing.parse(MODEL.format(**(SHAPES | OTHERS | changed)), **(WEIGHTS | (weights or {})))


def _feeds() -> dict[str, testing.Array]:
    generator = np.random.default_rng(11)
    return {
        "query": generator.standard_normal((1, 3, 64), np.float32),
        "key": generator.standard_normal((1, 3, 32), np.float32),
        "value": generator.standard_normal((1, 3, 32), np.float32),
        "past_key": generator.standard_normal((1, 2, 5, 16), np.float32),
        "past_value": generator.standard_normal((1, 2, 5, 16), np.float32),
        "seqlens_k": np.array([7], np.int32),
        "total": np.array(8, np.int32),
    }


@pytest.mark.parametrize(
    "shapes",
    [{}, {"q_apart": "[0, 0, 4, 16]", "q_joined": "[0, 0, -1]", "k_apart": "[0, 0, -1, 16]", "k_joined": "[0, 0, 32]"}],
)
def test_norms_move_into_attention(shapes: dict[str, str]) -> None:
    original = _model(None, **shapes)
    model, misses = testing.rewritten(original, "qk_norm")

    assert testing.operator_names(model) == ["FlowQKVAttention"]
    assert misses == []
    (node,) = (node for node in model.graph if node.op_type == "FlowQKVAttention")
    names = [value and value.name for value in node.inputs]
    assert names[:3] == ["query", "key", "value"]
    assert names[-2:] == ["q_weight", "k_weight"]
    assert node.attributes["qk_norm_epsilon"].as_float() == pytest.approx(0.01)
    assert node.attributes["softcap"].as_float() == 8.0

    testing.add_functions(original)
    feeds = _feeds()
    expected, result = (testing.run(m, feeds) for m in (original, model))
    # A normed head has a root mean square of at most 1, so no element is above sqrt(d) = 4 times the largest weight, 2.
    values = testing.largest(feeds["value"], feeds["past_value"])
    bound = testing.attention_bound(4 * 2.0, values, head_size=16, scale=0.25, total=8)
    assert np.max(np.abs(result[0] - expected[0])) <= bound
    # Mean square (16 terms), square root, division and weight: at most 16 + 4 roundings on each side.
    np.testing.assert_allclose(result[1], expected[1], rtol=2 * 20 * testing.FLOAT32_ROUNDING, atol=0)
    np.testing.assert_array_equal(result[2], expected[2])
    testing.check(model)


def test_norm_without_epsilon_takes_default() -> None:
    text = MODEL.format(**(SHAPES | OTHERS)).replace(", epsilon = 0.01", "")
    model, misses = testing.rewritten(testing.parse(text, **WEIGHTS), "qk_norm")
    assert misses == []
    (node,) = (node for node in model.graph if node.op_type == "FlowQKVAttention")
    assert node.attributes["qk_norm_epsilon"].as_float() == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            _model(q_apart="[0, -1, 64]"),
            "q is reshaped to [0, -1, 64], normed, and reshaped to [0, -1, 64]: expected a norm over each of 4 heads",
        ),
        (_model(k_joined="[1, -1, 32]"), "k is reshaped to [0, -1, 16], normed, and reshaped to [1, -1, 32]"),
        (_model(k_epsilon="0.02"), "the norms of Q and K differ in epsilon: 0.01 and 0.02"),
        (_model(axis="1"), "the norms' axes are [1, -1], expected the last one"),
        (_model({"k_weight": np.ones(1, np.float32)}), "k's norm weight is not one of 16 numbers"),
        (_model(norms=", , , , , q_weight, k_weight"), "the attention has norms of Q and K already"),
        (_model(k_norm="LayerNormalization"), "only one of Q and K is reshaped, normed"),
        (_model(also=", float q1"), "something else reads Q or K on the way to the attention"),
    ],
)
def test_unmatched_graph_reports_miss(model: ir.Model, reason: str) -> None:
    misses: list[Any] = []
    assert testing.apply("qk_norm", model, misses) == 0
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("qk_norm", reason)]

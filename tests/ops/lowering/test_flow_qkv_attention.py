# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flownpu.graph_rewrites import testing

# H = 4 query heads and G = 2 KV heads of d = 16.
MODEL = """
attention (float[B, S, {width}] query, {more}{ids}float[B, 2, P, 16] past_key, float[B, 2, P, 16] past_value,
           int32[B] seqlens_k, int32 total) => (float[B, S, 64] output, float present_key, float present_value) {{
    output, present_key, present_value{fourth} = com.microsoft.GroupQueryAttention
        <num_heads = 4, kv_num_heads = 2, {attributes}>
        (query, {key}, {value}, past_key, past_value, seqlens_k, total, cos, sin, {positions}, , {inputs})
}}
"""
ATTRIBUTES = {"do_rotary": "1", "local_window_size": "-1"}


def _model(
    *,
    packed: bool = False,
    width: int | None = None,
    inputs: str = "",
    fourth: str = "",
    positions: str = "",
    constants: dict[str, testing.Array] | None = None,
    **attributes: str,
) -> Any:
    angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(8) / 8)
    return testing.parse(
        MODEL.format(
            width=width or (128 if packed else 64),
            more="" if packed else "float[B, S, 32] key, float[B, S, 32] value, ",
            key="" if packed else "key",
            value="" if packed else "value",
            inputs=inputs,
            positions=positions,
            ids=f"int64[B, S] {positions}, " if positions else "",
            fourth=fourth,
            attributes=", ".join(f"{name} = {value}" for name, value in (ATTRIBUTES | attributes).items()),
        ),
        cos=np.cos(angles).astype(np.float32),
        sin=np.sin(angles).astype(np.float32),
        **(constants or {}),
    )


def _feeds(*, packed: bool, new: int, past: int, capacity: int) -> dict[str, testing.Array]:
    generator = np.random.default_rng(7)
    query, key, value = (generator.standard_normal((1, new, width), np.float32) for width in (64, 32, 32))
    feeds = {
        "past_key": generator.standard_normal((1, 2, capacity, 16), np.float32),
        "past_value": generator.standard_normal((1, 2, capacity, 16), np.float32),
        "seqlens_k": np.array([past + new - 1], np.int32),
        "total": np.array(past + new, np.int32),
    }
    if packed:
        return {"query": np.concatenate([query, key, value], axis=2), **feeds}
    return {"query": query, "key": key, "value": value, **feeds}


@pytest.mark.parametrize(("new", "past"), [(9, 0), (1, 9), (3, 9)])
@pytest.mark.parametrize("rotary", ["0", "1"])
def test_positions_of_a_first_prompt_count_on(new: int, past: int, rotary: str) -> None:
    ids = np.random.default_rng(3).integers(0, 64, (1, new))
    if past == 0:
        ids = np.array([[40, *[0] * (new - 1)]])
    original = _model(positions="ids", do_rotary=rotary)
    _check_same(original, _feeds(packed=False, new=new, past=past, capacity=24) | {"ids": ids})
    model, _ = testing.rewritten(_model(positions="ids", do_rotary=rotary), "flow_qkv_attention")
    (node,) = model.graph
    has_positions = len(node.inputs) > 9 and node.inputs[9] is not None
    assert (has_positions, "counted_prompt" in node.attributes) == (rotary == "1", rotary == "1")


def test_norm_weights_of_the_attention_are_kept() -> None:
    ones = np.ones(16, np.float32)
    original = _model(
        inputs=", , , q_weight, k_weight", qk_norm_epsilon="0.25", constants={"q_weight": ones, "k_weight": 2 * ones}
    )
    model, misses = testing.rewritten(original, "flow_qkv_attention")
    assert misses == []
    (node,) = model.graph
    assert [value and value.name for value in node.inputs[9:]] == [None, None, "q_weight", "k_weight"]
    assert node.attributes["qk_norm_epsilon"].as_float() == 0.25
    testing.check(model)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            _model(inputs=", k_scale", constants={"k_scale": np.ones(1, np.float32)}),
            "input 12 (k_scale): expected",
        ),
        (_model(k_quant_type='"PER_TENSOR"'), "k_quant_type=PER_TENSOR: FlowQKVAttention's KV cache is"),
        (_model(kv_cache_bit_width="8"), "kv_cache_bit_width=8: FlowQKVAttention's KV cache is"),
        (_model(qk_output="2"), "attribute 'qk_output': expected 0, got 2"),
        # Attributes and inputs of later releases of ONNX Runtime.
        (_model(q_norm_epsilon="0.1"), "attribute q_norm_epsilon is not known"),
        (_model(inputs=", , , , , new", constants={"new": np.ones(1, np.int32)}), "input new is not known"),
        (_model(inputs=", , , , , , new", constants={"new": np.ones(1, np.int32)}), "input new is not known"),
        (_model(width=66), "the head size is not known from the query's last axis"),
    ],
)
def test_miss(model: Any, reason: str) -> None:
    model, misses = testing.rewritten(model, "flow_qkv_attention")
    assert testing.operator_names(model) == ["GroupQueryAttention"]
    rule = "signature" if "is not known:" in misses[0].reason else "flow_qkv_attention"
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [(rule, reason)]


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ("output", "output 1 (present_key): expected float or float16 or bfloat16, got none; FlowQKVAttention appends"),
        # The scores, which FlowQKVAttention never holds.
        ("output, k, v, scores", "output 3 (output_qk): expected none"),
    ],
)
def test_miss_of_other_outputs(outputs: str, reason: str) -> None:
    results = outputs.split(", ")[::3]
    model = testing.parse(
        f"""
        attention (float[B, S, 128] query, int32[B] lengths, int32 total) => (float {", float ".join(results)}) {{
            {outputs} = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2, qk_output = 1>
                (query, , , , , lengths, total)
        }}
        """
    )
    _, misses = testing.rewritten(model, "flow_qkv_attention")
    assert [miss.reason[: len(reason)] for miss in misses] == [reason]


def test_miss_of_float16_activations() -> None:
    model = testing.parse(
        """
        attention (float16[B, S, 128] query, int32[B] lengths, int32 total)
            => (float16 output, float16 present_key, float16 present_value) {
            output, present_key, present_value = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>
                (query, , , , , lengths, total)
        }
        """
    )
    _, misses = testing.rewritten(model, "flow_qkv_attention")
    assert [miss.reason for miss in misses] == [
        "input 0 (query): expected float, got float16; export with float32 activations"
    ]


def _check_same(original: Any, feeds: dict[str, testing.Array], window: int = 0) -> None:
    model, misses = testing.rewritten(original, "flow_qkv_attention")
    assert testing.operator_names(model) == ["FlowQKVAttention"]
    assert misses == []

    expected, result = (testing.run(m, feeds) for m in (original, model))
    total = int(feeds["total"])
    largest = testing.largest(*(array for array in feeds.values() if array.dtype == np.float32))
    bound = testing.attention_bound(largest, largest, head_size=16, scale=0.25, total=total)
    assert np.max(np.abs(result[0] - expected[0])) <= bound
    rows = testing.resident_rows(total, feeds["past_key"].shape[2], window) if window else total
    for ours, theirs in zip(result[1:], expected[1:], strict=True):
        assert ours.shape == theirs.shape
        # A rotation sums two products of numbers below `largest`: 3 roundings of at most twice that, on each side.
        bound = 2 * 3 * testing.FLOAT32_ROUNDING * 2 * largest
        assert np.max(np.abs(ours[:, :, :rows] - theirs[:, :, :rows])) <= bound
    testing.check(model)

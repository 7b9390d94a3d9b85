# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.sliding_window_cache import set_sliding_window_cache

if TYPE_CHECKING:
    import onnx_ir as ir

WINDOW, CAPACITY = 4, 6
ATTENTION = """
    {outputs} = ai.flownpu.FlowQKVAttention <num_heads = 4, kv_num_heads = 2, head_size = 16{window}>
        (packed, , , past_key, past_value, seqlens_k, total)
"""
MODEL = """
attention (float[B, S, 128] packed, float[B, 2, P, 16] past_key, float[B, 2, P, 16] past_value,
           int32[B] seqlens_k, int32 total) => (float output, float present_key, float present_value{more}) {{
    {attentions}
}}
"""


def _model(before: int, *, also_without_window: bool = False) -> ir.Model:
    outputs = "output, present_key, present_value"
    window = f", local_window_size = {WINDOW}, sliding_window_cache = {before}"
    attentions, more = ATTENTION.format(outputs=outputs, window=window), ""
    if also_without_window:
        attentions += ATTENTION.format(outputs="whole, whole_key, whole_value", window="")
        more = ", float whole, float whole_key, float whole_value"
    return testing.parse(MODEL.format(attentions=attentions, more=more))


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("enabled", [False, True])
def test_layers_without_window_stay(before: int, enabled: bool) -> None:
    model = _model(before, also_without_window=True)
    assert set_sliding_window_cache(model, enabled) == int(before != enabled)
    windowed, whole = model.graph
    assert windowed.attributes["sliding_window_cache"].as_int() == int(enabled)
    assert "sliding_window_cache" not in whole.attributes
    testing.add_functions(model)
    testing.check(model)


def test_window_sized_cache_keeps_outputs() -> None:
    windowed, whole = (_model(1) for _ in range(2))
    set_sliding_window_cache(whole, False)
    for model in (windowed, whole):
        testing.add_functions(model)
    generator = np.random.default_rng(5)
    tokens = generator.standard_normal((1, 12, 128), np.float32)
    caches = {model: np.zeros((2, 1, 2, size, 16), np.float32) for model, size in ((windowed, CAPACITY), (whole, 12))}
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 12)):
        outputs = {}
        for model, cache in caches.items():
            feeds = {
                "packed": tokens[:, start:stop],
                "past_key": cache[0],
                "past_value": cache[1],
                "seqlens_k": np.array([stop - 1], np.int32),
                "total": np.array(stop, np.int32),
            }
            outputs[model], key, value = testing.run(model, feeds)
            caches[model] = np.stack([key, value])
        bound = testing.attention_bound(*[testing.largest(tokens)] * 2, head_size=16, scale=0.25, total=stop)
        assert np.max(np.abs(outputs[windowed] - outputs[whole])) <= bound
    assert caches[windowed].shape[3] == CAPACITY

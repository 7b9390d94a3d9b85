# SPDX-License-Identifier: Apache-2.0
"""Converted models, run by stock ONNX Runtime through their functions, compute what transformers computes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from numpy.typing import NDArray

from flownpu.convert import convert
from tests.decoding import DecoderSession, float32_tolerance


class RoundingCache(transformers.DynamicCache):
    """transformers' cache, with keys and values rounded to the type of FlowNPU's."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(*(t.to(self.dtype).to(t.dtype) for t in (key, value)), *args, **kwargs)


def tolerance(logits: NDArray[np.float32], config: Any) -> float:
    return float32_tolerance(logits, config.num_hidden_layers, config.intermediate_size)


def random_ids(*shape: int) -> NDArray[np.int64]:
    return np.random.default_rng(5).integers(4, 300, shape)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16"])
def test_narrow_caches_round_keys_and_values_and_nothing_else(
    kv_dtype: str, tiny_models: Callable[[str], Any], tmp_path: Path
) -> None:
    tiny = tiny_models("gemma3_text")
    convert(tiny.folder, tmp_path / "model", kv_dtype=kv_dtype)
    ids = random_ids(1, 40)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kv_dtype]
    expected = tiny.logits(ids, RoundingCache(dtype))
    # A value near the middle between two neighbours of the narrow type may be rounded either way: a float32 error of
    # some 2^-21 reaches across the middle for one value in 2^12 of bfloat16 (2^9 of float16), so for a few of the 7680
    # in the cache. One step of one of d components moves a score by step / sqrt(d) of its size. The key is one of at
    # least 8 visible keys, so attention's result moves by an 8th of that.
    step = {"bf16": 2**-8, "fp16": 2**-11}[kv_dtype]
    flip = step / math.sqrt(tiny.reference.config.head_dim) * np.abs(expected).max()
    atol = tolerance(expected, tiny.reference.config) + flip / 8
    decoder = DecoderSession(tmp_path / "model")
    for start, stop in ((0, 30), *((i, i + 1) for i in range(30, 40))):
        logits = decoder(ids[:, start:stop], np.ones((1, stop), np.int64))
        np.testing.assert_allclose(logits[0, 0], expected[0, stop - 1], rtol=0, atol=atol)
    assert np.abs(tiny.logits(ids) - expected).max() > 2 * atol, "the rounding is too small to be seen"


def test_all_token_logits_are_within_bound(tiny_models: Callable[[str], Any], tmp_path: Path) -> None:
    tiny = tiny_models("llama")
    convert(tiny.folder, tmp_path / "model", kv_dtype="fp32", logits="all")
    ids = random_ids(2, 20)
    expected = tiny.logits(ids)
    logits = DecoderSession(tmp_path / "model")(ids, np.ones_like(ids))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance(expected, tiny.reference.config))


def test_rows_of_different_lengths_yield_their_own_last_token(
    tiny_models: Callable[[str], Any], tmp_path: Path
) -> None:
    tiny = tiny_models("gemma3_text")
    convert(tiny.folder, tmp_path / "model", kv_dtype="fp32")
    ids, lengths = random_ids(3, 21), np.array([20, 3, 11])
    mask = (np.arange(20) < lengths[:, None]).astype(np.int64)
    decoder = DecoderSession(tmp_path / "model")
    logits = decoder(np.where(mask, ids[:, :20], 0), mask)
    following = decoder(ids[:, 20:], np.concatenate([mask, np.ones((3, 1), np.int64)], axis=1))
    for row, length in enumerate(lengths):
        text = np.concatenate([ids[row, :length], ids[row, 20:]])[None]
        expected = tiny.logits(text)[0]
        atol = tolerance(expected, tiny.reference.config)
        np.testing.assert_allclose(logits[row, 0], expected[length - 1], rtol=0, atol=atol)
        np.testing.assert_allclose(following[row, 0], expected[length], rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("ours", "reason"),
    [(True, "does its attention_mask begin with 0\\? Pad prompts on the right"), (False, "-2 .*out of range")],
)
def test_rows_padded_on_left_are_refused(
    ours: bool,
    reason: str,
    tiny_models: Callable[[str], Any],
    tmp_path: Path,
    ep_devices: list[onnxruntime.OrtEpDevice],
) -> None:
    """In a prompt, and in a step after an unpadded prompt. Without FlowNPU, ONNX Runtime's check of a position refuses
    them.
    """
    convert(tiny_models("llama").folder, tmp_path / "model")
    ids, mask = random_ids(2, 9), np.ones((2, 9), np.int64)
    decoder = DecoderSession(tmp_path / "model", ep_devices[:1] if ours else ())
    mask[1, :3] = 0
    with pytest.raises(Exception, match=reason):
        decoder(ids[:, :8], mask[:, :8])
    decoder = DecoderSession(tmp_path / "model", ep_devices[:1] if ours else ())
    decoder(ids[:, :8], np.ones((2, 8), np.int64))
    with pytest.raises(Exception, match=reason):
        decoder(ids[:, 8:], mask)


def test_soft_cap_of_logits_is_in_graph(tiny_models: Callable[[str], Any], checkpoint: Path, tmp_path: Path) -> None:
    # Gemma 3's own checkpoints have no softcaps, but its configuration has them.
    tiny = tiny_models("gemma3_text")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 2.0}))
    convert(checkpoint, tmp_path / "model", kv_dtype="fp32")
    ids = random_ids(1, 12)
    expected = 2 * np.tanh(tiny.logits(ids)[0, -1] / 2)
    logits = DecoderSession(tmp_path / "model")(ids, np.ones_like(ids))
    atol = tolerance(tiny.logits(ids), tiny.reference.config)
    np.testing.assert_allclose(logits[0, 0], expected, rtol=0, atol=atol)


def test_sliding_window_cache_of_fixed_capacity_is_within_bound(
    tiny_models: Callable[[str], Any], tmp_path: Path
) -> None:
    """Local layers' caches have 11 positions for a window of 8, and are fed back whole, like GenAI's shared buffers."""
    tiny = tiny_models("gemma3_text")
    convert(tiny.folder, tmp_path / "model", kv_dtype="fp32", sliding_window_cache=True)
    ids = random_ids(1, 40)
    expected = tiny.logits(ids)
    atol = tolerance(expected, tiny.reference.config)
    decoder = DecoderSession(tmp_path / "model")
    kinds = tiny.reference.config.layer_types
    capacities = [11 if kinds[int(v.name.split(".")[1])] == "sliding_attention" else 40 for v in decoder.cache_inputs]
    decoder.cache = [
        onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((1, 2, capacity, 16), np.float32)) for capacity in capacities
    ]
    for start, stop in ((0, 5), (5, 20), *((i, i + 1) for i in range(20, 40))):
        logits = decoder(ids[:, start:stop], np.ones((1, stop), np.int64))
        assert [value.shape()[2] for value in decoder.cache] == capacities
        np.testing.assert_allclose(logits[0, 0], expected[0, stop - 1], rtol=0, atol=atol)

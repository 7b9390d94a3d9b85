# SPDX-License-Identifier: Apache-2.0
"""Gemma 2: soft caps of scores and of logits, every other layer local, no norms of queries and keys."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from flownpu.convert import convert
from flownpu.convert.families import read_decoder
from tests.convert.conftest import gemma2_config, write_tiny
from tests.convert.running import IDS, LASTS, logits_of


@pytest.mark.parametrize("cap", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_soft_caps_are_converted(cap: str, tmp_path: Path) -> None:
    """Logits with and without the cap differ, and both equal transformers'."""
    capped, free = write_tiny("gemma2", tmp_path / "capped"), write_tiny("gemma2", tmp_path / "free", **{cap: None})
    expected = [tiny.logits(IDS)[0, LASTS] for tiny in (capped, free)]
    apart = np.abs(expected[0] - expected[1]).max()
    assert apart > 0.05 * np.abs(expected[1]).max(), "the cap changes nothing"
    for tiny, wanted in zip((capped, free), expected, strict=True):
        convert(tiny.folder, tiny.folder / "model", kv_dtype="fp32")
        np.testing.assert_allclose(logits_of(tiny.folder / "model"), wanted, rtol=0, atol=apart / 100)


@pytest.mark.parametrize("settings", [{}, {"attn_logit_softcapping": None, "final_logit_softcapping": None}])
def test_defaults_are_those_of_transformers(settings: dict[str, Any]) -> None:
    decoder = read_decoder({"model_type": "gemma2", "num_hidden_layers": 5, **settings})
    expected = transformers.Gemma2Config(num_hidden_layers=5, **settings)
    assert (decoder.hidden_size, decoder.feed_forward_size) == (expected.hidden_size, expected.intermediate_size)
    assert (decoder.heads, decoder.kv_heads, decoder.head_size) == (8, 4, expected.head_dim)
    assert decoder.vocabulary_size == expected.vocab_size
    assert decoder.context_length == expected.max_position_embeddings
    assert decoder.attention_scale == expected.query_pre_attn_scalar**-0.5
    assert decoder.attention_softcap == (expected.attn_logit_softcapping or 0)
    assert decoder.logit_softcap == (expected.final_logit_softcapping or 0)
    assert decoder.tied_embeddings
    windows = [expected.sliding_window if kind == "sliding_attention" else None for kind in expected.layer_types]
    assert [layer.window for layer in decoder.layers] == windows
    assert {layer.rotary.theta for layer in decoder.layers} == {expected.rope_parameters["rope_theta"]}


def test_new_configurations_are_read() -> None:
    decoder = read_decoder(gemma2_config().to_dict())
    assert [layer.window for layer in decoder.layers] == [8, None, 8]
    assert (decoder.attention_softcap, decoder.logit_softcap) == (0.5, 2.0)
    assert not decoder.qk_norm
    assert decoder.sandwich_norms

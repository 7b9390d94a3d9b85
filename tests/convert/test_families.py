# SPDX-License-Identifier: Apache-2.0
"""Configurations of both generations are read as transformers reads them."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flownpu.convert import ConversionError
from flownpu.convert.decoder import LinearScaling, Llama3Scaling, Rotary
from flownpu.convert.families import read_decoder
from flownpu.model.shapes import SHAPES

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# As published checkpoints have them: transformers 4 wrote these.
OLD_GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 8,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 2e6,
    "rope_local_base_freq": 5e3,
    "sliding_window": 1024,
    "sliding_window_pattern": 3,
}
OLD_LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 5e5,
    "rope_scaling": LLAMA3,
    "tie_word_embeddings": True,
}
OLD_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1e6,
}


def from_transformers(config: dict[str, Any]) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model(**config)


@pytest.mark.parametrize("old", [OLD_GEMMA3, OLD_LLAMA, OLD_QWEN3], ids=lambda config: config["model_type"])
def test_old_and_new_configurations_mean_the_same(old: dict[str, Any]) -> None:
    new = from_transformers(dict(old)).to_dict()
    assert "rope_parameters" in new
    assert "rope_theta" not in new
    assert read_decoder(old) == read_decoder(new)


@pytest.mark.parametrize("config", [*SHAPES.values(), OLD_GEMMA3, OLD_LLAMA, OLD_QWEN3])
def test_values_are_those_of_transformers(config: dict[str, Any]) -> None:
    decoder, expected = read_decoder(config), from_transformers(dict(config))
    assert decoder.hidden_size == expected.hidden_size
    assert decoder.feed_forward_size == expected.intermediate_size
    assert len(decoder.layers) == expected.num_hidden_layers
    assert (decoder.heads, decoder.kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)
    assert decoder.head_size == expected.head_dim
    assert decoder.vocabulary_size == expected.vocab_size
    assert decoder.context_length == expected.max_position_embeddings
    assert decoder.norm_epsilon == expected.rms_norm_eps
    assert decoder.tied_embeddings == expected.tie_word_embeddings
    kinds = getattr(expected, "layer_types", None) or ["full_attention"] * len(decoder.layers)
    windows = [expected.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.window for layer in decoder.layers] == windows
    for layer, kind in zip(decoder.layers, kinds, strict=True):
        rope = expected.rope_parameters
        assert layer.rotary.theta == rope.get(kind, rope)["rope_theta"]


@pytest.mark.parametrize(
    ("rotary", "settings"),
    [
        (Rotary(1e4), {"rope_type": "default"}),
        (Rotary(1e6, LinearScaling(8.0)), {"rope_type": "linear", "factor": 8.0}),
        (Rotary(5e5, Llama3Scaling(32.0, 1.0, 4.0, 8192)), LLAMA3),
    ],
)
def test_rotary_frequencies_are_those_of_transformers(rotary: Rotary, settings: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(head_dim=64, rope_parameters={"rope_theta": rotary.theta, **settings})
    kind = settings["rope_type"]
    if kind == "default":
        expected = 1 / rotary.theta ** (torch.arange(0, 64, 2).float() / 64)
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    # Both round to float32 after each of at most 8 operations; powers may be off by an ulp or two each.
    np.testing.assert_allclose(rotary.frequencies(64), expected.numpy(), rtol=8 * 2**-23)


def test_rotary_caches_hold_the_cosine_and_sine_of_float32_angles() -> None:
    cos, sin = Rotary(1e4).caches(100, 8)
    assert cos.shape == sin.shape == (100, 4)
    assert cos.dtype == sin.dtype == np.float32
    angles = np.arange(100)[:, None] * 1e4 ** (-np.arange(0, 8, 2) / 8)
    # An angle of up to 99 is off by a few roundings of the frequency and one of the product: 99 * 4 * 2^-24.
    np.testing.assert_allclose(cos, np.cos(angles), atol=99 * 4 * 2**-24)
    np.testing.assert_allclose(sin, np.sin(angles), atol=99 * 4 * 2**-24)


def test_gemma3_traits() -> None:
    decoder = read_decoder(SHAPES["gemma3-1b"])
    assert decoder.family == "gemma3_text"
    assert decoder.gating == "geglu"
    assert decoder.norm_offset == 1.0
    assert decoder.qk_norm
    assert decoder.sandwich_norms
    assert decoder.embedding_scale == pytest.approx(1152**0.5)
    assert decoder.attention_scale == 1 / 16  # query_pre_attn_scalar = 256
    assert [layer.window for layer in decoder.layers[:7]] == [512, 512, 512, 512, 512, None, 512]
    assert len(decoder.rotaries) == 2


def test_a_vision_model_is_read_by_its_text_config() -> None:
    text = {key: value for key, value in OLD_GEMMA3.items() if key != "model_type"}
    nested = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": {}}
    decoder = read_decoder(nested)
    assert decoder.family == "gemma3_text"
    assert decoder.eos_token_ids == (1, 106)
    assert decoder.layers == read_decoder(OLD_GEMMA3).layers


def test_generation_config_names_the_tokens_that_end_a_text() -> None:
    assert read_decoder(OLD_GEMMA3).eos_token_ids == (1,)
    assert read_decoder(OLD_GEMMA3, {"eos_token_id": [1, 106], "pad_token_id": None}).eos_token_ids == (1, 106)


def test_qwen3_layers_behind_max_window_layers_have_a_window() -> None:
    config = OLD_QWEN3 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    assert [layer.window for layer in read_decoder(config).layers] == [None, None, None, 64]
    expected = from_transformers(dict(config)).layer_types
    assert expected == ["full_attention"] * 3 + ["sliding_attention"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "mamba"},
            'expected model_type to be one of gemma2, gemma3_text, gemma3, llama, qwen3, got "mamba"',
        ),
        ({}, 'got "None"'),
        (OLD_LLAMA | {"hidden_size": None}, "hidden_size is missing"),
        (OLD_LLAMA | {"attention_bias": True}, "attention_bias is set"),
        (OLD_LLAMA | {"hidden_act": "relu"}, 'got "relu"'),
        (OLD_LLAMA | {"num_key_value_heads": 5}, "multiple of num_key_value_heads"),
        (OLD_LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 'got "yarn"'),
        (OLD_LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        (OLD_GEMMA3 | {"layer_types": ["full_attention"]}, "each of the 8 layers, got 1"),
        (OLD_GEMMA3 | {"use_bidirectional_attention": True}, "only causal decoders"),
        ({"model_type": "gemma3"}, "needs a text_config"),
    ],
)
def test_what_cannot_be_converted_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=r"config\.json: ") as raised:
        read_decoder(config)
    assert message in str(raised.value)

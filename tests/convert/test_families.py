# SPDX-License-Identifier: Apache-2.0
"""Configurations that transformers 4 or 5 wrote are read as transformers reads them."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from flownpu.convert import ConversionError
from flownpu.convert.decoder import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    Rotary,
    YarnScaling,
)
from flownpu.convert.families import FAMILIES, read_decoder
from flownpu.model.shapes import SHAPES

# Configurations as published checkpoints have them, written by transformers 4.
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
OLD_LLAMA = SHAPES["llama3.2-1b"] | {"num_hidden_layers": 2}
OLD_QWEN3 = SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 4}
OLD_GEMMA2 = {
    "model_type": "gemma2",
    "num_hidden_layers": 5,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": None,
}
# The same for other families.
OLD_MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
WINDOWS = {"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False}
OLD_QWEN2 = SHAPES["qwen2.5-3b"] | {"num_hidden_layers": 4, **WINDOWS}
LONG = {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
OLD_PHI3 = {
    "model_type": "phi3",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": LONG,
    "sliding_window": 262144,
    "vocab_size": 32064,
}
OLD_PHI4 = OLD_PHI3 | {
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 24, "long_factor": [2.0] * 24},
    "tie_word_embeddings": True,
}
OLD_SMOLLM3 = {
    "model_type": "smollm3",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65536,
    "rope_theta": 5e6,
    "vocab_size": 128256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
OTHER_YARN = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
OTHERS = [OLD_MISTRAL, OLD_QWEN2, OLD_PHI3, OLD_PHI4, OLD_SMOLLM3]


MOE = SHAPES["qwen3-30b-a3b"]


def from_transformers(config: dict[str, Any]) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.for_model(**config)


@pytest.mark.parametrize("old", [OLD_GEMMA3, OLD_LLAMA, OLD_QWEN3, *OTHERS], ids=lambda config: config["model_type"])
def test_old_and_new_configurations_give_same_decoder(old: dict[str, Any]) -> None:
    new = from_transformers(dict(old)).to_dict()
    assert "rope_parameters" in new
    assert "rope_theta" not in new
    assert read_decoder(old) == read_decoder(new)


# Gemma 4's class has no sizes that hold for all layers; tests/families compares its logits.
OF_ONE_SIZE = [shape for shape in SHAPES.values() if shape["model_type"] != "gemma4_text"]


@pytest.mark.parametrize("config", [*OF_ONE_SIZE, OLD_GEMMA2, OLD_GEMMA3, OLD_LLAMA, OLD_QWEN3, OLD_QWEN2, OLD_SMOLLM3])
def test_configuration_values_equal_transformers(config: dict[str, Any]) -> None:
    decoder, expected = read_decoder(config), from_transformers(dict(config))
    assert decoder.hidden_size == expected.hidden_size
    size = getattr(expected, "moe_intermediate_size", expected.intermediate_size)
    if expected.model_type == "lfm2":  # its model cuts the size that the configuration says
        with torch.device("meta"):
            size = Lfm2MLP(expected).w1.out_features
    assert decoder.feed_forward_size == size
    assert len(decoder.layers) == expected.num_hidden_layers
    assert (decoder.heads, decoder.kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)
    assert decoder.head_size == getattr(expected, "head_dim", expected.hidden_size // expected.num_attention_heads)
    assert decoder.vocabulary_size == expected.vocab_size
    assert decoder.context_length == expected.max_position_embeddings
    assert decoder.norm_epsilon == (expected.norm_eps if expected.model_type == "lfm2" else expected.rms_norm_eps)
    assert decoder.tied_embeddings == expected.tie_word_embeddings
    assert decoder.attention_softcap == (getattr(expected, "attn_logit_softcapping", None) or 0)
    assert decoder.logit_softcap == (getattr(expected, "final_logit_softcapping", None) or 0)
    kinds = getattr(expected, "layer_types", None) or ["full_attention"] * len(decoder.layers)
    windows = [expected.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.window for layer in decoder.layers] == windows
    for layer, kind in zip(decoder.layers, kinds, strict=True):
        rope = expected.rope_parameters
        assert layer.rotary.theta == rope.get(kind, rope)["rope_theta"]


# Settings of configurations from before transformers 5, which its classes do not have as attributes.
OLDER = {
    "hidden_act",
    "hidden_activation",
    "sliding_window_pattern",
    "rope_local_base_freq",
    "global_head_dim",
    "full_attention_interval",
    "partial_rotary_factor",
}


# The classes of drafters have no decoder by default.
WITH_DEFAULTS = [name for name, family in FAMILIES.items() if family.drafts_for is None]


@pytest.mark.parametrize("name", WITH_DEFAULTS)
def test_omitted_configuration_keys_take_class_defaults(name: str) -> None:
    family = FAMILIES[name]
    # The configuration classes of these families drop a window that is not used.
    used = {"use_sliding_window": True} if family.windows == "behind" else {}
    config = transformers.AutoConfig.for_model(name, **used)
    config = config if family.inner is None else getattr(config, family.inner)
    # Attributes that differ between layers cannot be read from the configuration's object.
    values = config.to_dict()
    found = {
        key: values[key] if key in values else getattr(config, key)
        for key in family.defaults
        if key in values or hasattr(config, key)
    }
    assert set(family.defaults) - set(found) <= OLDER
    assert found == {key: family.defaults[key] for key in found}
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert {key: rope[key] for key in family.rope_defaults} == family.rope_defaults


def test_gemmas_gelu_is_its_tanh_approximation() -> None:
    """Gemma's first checkpoints say "gelu", for which transformers computes the tanh approximation too."""
    config = transformers.GemmaConfig().to_dict()
    assert read_decoder(config | {"hidden_act": "gelu"}) == read_decoder(config | {"hidden_act": "gelu_pytorch_tanh"})


@pytest.mark.parametrize(
    ("rotary", "settings"),
    [
        (Rotary(1e4), {"rope_type": "default"}),
        (Rotary(1e6, LinearScaling(8.0)), {"rope_type": "linear", "factor": 8.0}),
        (Rotary(5e5, Llama3Scaling(32.0, 1.0, 4.0, 8192)), OLD_LLAMA["rope_scaling"]),
        (Rotary(1e6, YarnScaling(4.0, 4096, 1.0)), YARN),
        (Rotary(1e6, YarnScaling(4.0, 4096, 1.0, 16.0, 2.0, whole=False)), YARN | OTHER_YARN),
        (Rotary(1e4, FrequencyFactors((1.5,) * 32)), LONG | {"rope_type": "longrope", "short_factor": [1.5] * 32}),
        (Rotary(1e4, rotated=0.5), {"rope_type": "default", "partial_rotary_factor": 0.5}),
        (Rotary(1e6, ProportionalScaling(0.25)), {"rope_type": "proportional", "partial_rotary_factor": 0.25}),
    ],
)
def test_rotary_frequencies_equal_transformers(rotary: Rotary, settings: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(head_dim=64, rope_parameters={"rope_theta": rotary.theta, **settings})
    kind = settings["rope_type"]
    if kind == "default":
        size = int(64 * rotary.rotated)
        expected = 1 / rotary.theta ** (torch.arange(0, size, 2).float() / size)
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    # Both round to float32 after each of at most 8 operations; powers may be off by an ulp or two each.
    found = rotary.frequencies(64)
    np.testing.assert_allclose(found[: len(expected)], expected.numpy(), rtol=8 * 2**-23)
    assert len(found) == 32
    assert not found[len(expected) :].any()


def test_rotary_caches_hold_cosine_and_sine_of_float32_angles() -> None:
    cos, sin = Rotary(1e4).caches(100, 8)
    assert cos.shape == sin.shape == (100, 4)
    assert cos.dtype == sin.dtype == np.float32
    angles = np.arange(100)[:, None] * 1e4 ** (-np.arange(0, 8, 2) / 8)
    # An angle of up to 99 is off by a few roundings of the frequency and one of the product: 99 * 4 * 2^-24.
    np.testing.assert_allclose(cos, np.cos(angles), atol=99 * 4 * 2**-24)
    np.testing.assert_allclose(sin, np.sin(angles), atol=99 * 4 * 2**-24)


def test_gemma3_configuration_is_read() -> None:
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


def test_vision_model_takes_decoder_from_text_config() -> None:
    text = {key: value for key, value in OLD_GEMMA3.items() if key != "model_type"}
    nested = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": {}}
    decoder = read_decoder(nested)
    assert decoder.family == "gemma3_text"
    assert decoder.eos_token_ids == (1, 106)
    assert decoder.layers == read_decoder(OLD_GEMMA3).layers


def test_generation_config_names_end_tokens() -> None:
    assert read_decoder(OLD_GEMMA3).eos_token_ids == (1,)
    assert read_decoder(OLD_GEMMA3, {"eos_token_id": [1, 106], "pad_token_id": None}).eos_token_ids == (1, 106)


def test_qwen3_layers_behind_max_window_layers_have_window() -> None:
    config = OLD_QWEN3 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
    assert [layer.window for layer in read_decoder(config).layers] == [None, None, None, 64]
    expected = from_transformers(dict(config)).layer_types
    assert expected == ["full_attention"] * 3 + ["sliding_attention"]


def test_windows_of_other_families_are_read() -> None:
    def windows(config: dict[str, Any]) -> set[int | None]:
        return {layer.window for layer in read_decoder(config).layers}

    assert windows(OLD_MISTRAL) == {4096}
    assert windows(OLD_MISTRAL | {"sliding_window": None}) == {None}
    assert windows({k: v for k, v in OLD_MISTRAL.items() if k != "sliding_window"}) == {4096}  # transformers' default
    assert windows(OLD_PHI3) == {None}  # a window of the whole context hides nothing
    assert windows(OLD_QWEN2) == {None}


def test_phi4_mini_rotates_three_quarters_of_head() -> None:
    decoder = read_decoder(OLD_PHI4)
    (rotary,) = decoder.rotaries
    assert (decoder.head_size, decoder.rotated_size) == (64, 48)
    # transformers computes sqrt(1 + ln(131072 / 4096) / ln(4096)) from the two context lengths.
    assert rotary.scaling is not None
    assert rotary.scaling.magnitude == pytest.approx((1 + 5 / 12) ** 0.5)
    assert rotary.beyond is not None
    assert rotary.rows(4096) == 4096
    assert rotary.rows(8192) == 4096 + 8192


def test_fourth_layers_of_smollm3_have_no_rope() -> None:
    rotated = [layer.rotary.rotated for layer in read_decoder(OLD_SMOLLM3).layers]
    assert rotated == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    assert from_transformers(dict(OLD_SMOLLM3)).no_rope_layers == [int(part) for part in rotated]


def test_ministral_3_ends_where_its_queries_begin_to_be_scaled() -> None:
    decoder = read_decoder(OLD_MISTRAL | {"model_type": "ministral3", "max_position_embeddings": 262144})
    assert decoder.context_length == 16384


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "mamba"},
            'qwen3_5_moe, qwen3_next, smollm3, got "mamba"; a model of another family can be exported by ORT GenAI',
        ),
        ({}, 'got "None"'),
        (OLD_LLAMA | {"hidden_size": None}, "hidden_size is missing"),
        (OLD_LLAMA | {"hidden_act": "relu"}, 'got "relu"'),
        (OLD_LLAMA | {"num_key_value_heads": 5}, "multiple of num_key_value_heads"),
        (
            OLD_LLAMA | {"rope_scaling": {"rope_type": "xpos"}},
            'dynamic, llama3, yarn, longrope or proportional, got "xpos"',
        ),
        (OLD_LLAMA | {"rope_scaling": LONG | {"long_factor": [1.0]}}, "expected long_factor to be 32 positive numbers"),
        (OLD_LLAMA | {"rope_scaling": LONG | {"short_factor": [0.0] * 32}}, "got 32, the smallest 0.0"),
        (OLD_LLAMA | {"partial_rotary_factor": 1.5}, "expected a partial_rotary_factor of at most 1"),
        (OLD_SMOLLM3 | {"no_rope_layers": [1, 0]}, "each of the 8 layers whether it has RoPE, got 2"),
        (OLD_SMOLLM3 | {"use_sliding_window": True}, "there are no layer_types"),
        (OLD_LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        (OLD_GEMMA3 | {"layer_types": ["full_attention"]}, "each of the 8 layers, got 1"),
        (OLD_GEMMA3 | {"use_bidirectional_attention": True}, "only causal decoders"),
        ({"model_type": "gemma3"}, "needs a text_config"),
        (MOE | {"mlp_only_layers": [3]}, "mlp_only_layers is [3], and only models that have [] there"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, and only models that have 1 there"),
        (MOE | {"num_experts_per_tok": 129}, "at most the number of experts, 128, got 129"),
        (SHAPES["olmoe-1b-7b"] | {"clip_qkv": 8.0}, "clip_qkv is 8.0, and only models that have None there"),
    ],
)
def test_unfit_configuration_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=r"config\.json: ") as raised:
        read_decoder(config)
    assert message in str(raised.value)


@pytest.mark.parametrize(("name", "layers"), [("deepseek_v3", r"attention \(MLA\)"), ("granitemoehybrid", "Mamba-2")])
def test_family_left_out_is_refused_with_its_layers(name: str, layers: str) -> None:
    with pytest.raises(ConversionError, match=f'got "{name}", whose .*{layers}'):
        read_decoder({"model_type": name})

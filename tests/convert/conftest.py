# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of each family, written by transformers, and a decoder loop over stock ONNX Runtime."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from flownpu.ops import q4nx

# Rows and columns that are no multiples of Q4NX's 32 and 256 where weights may have such sizes, and grouped queries.
# Windows of the configurations below (8 tokens) are shorter than the texts.
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "bos_token_id": 2,
    "eos_token_id": [1, 3],
    "pad_token_id": 0,
}
# A token uses only some of the experts, and their number is no power of two.
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
SHARED = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 80}
# Heads of keys and values of different numbers and sizes, and two layers with states before one with attention.
DELTA_RULE: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25},
}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def gemma3_config() -> transformers.PreTrainedConfig:
    return transformers.Gemma3TextConfig(
        **SIZES,
        query_pre_attn_scalar=24,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_theta": 1e6, **LINEAR},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    )


def gemma2_config() -> transformers.PreTrainedConfig:
    # Caps small enough that the tiny model's scores and logits reach them.
    return transformers.Gemma2Config(
        **SIZES,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attn_logit_softcapping=0.5,
        final_logit_softcapping=2.0,
    )


def llama_config() -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(**SIZES, rms_norm_eps=1e-5, rope_parameters={"rope_theta": 5e5, **LLAMA3})


def qwen3_config() -> transformers.PreTrainedConfig:
    return transformers.Qwen3Config(
        **SIZES, tie_word_embeddings=True, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}
    )


CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "gemma3_text": gemma3_config,
    "llama": llama_config,
    "qwen3": qwen3_config,
}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
DEFAULT = {"rope_theta": 1e4, "rope_type": "default"}
# YaRN, which also scales cosines and sines, so that softmax has a temperature other than 1.
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def longrope(dimensions: int, **others: Any) -> dict[str, Any]:
    """LongRoPE that rotates `dimensions` of a head; long factors apply beyond 24 tokens, within the tests' texts."""
    pairs = np.arange(dimensions // 2)
    return {
        "rope_theta": 1e4,
        "rope_type": "longrope",
        "short_factor": (1 + 0.1 * pairs).tolist(),
        "long_factor": (2.0 + pairs).tolist(),
        "original_max_position_embeddings": 24,
        **others,
    }


def phi3_config(**changes: Any) -> transformers.PreTrainedConfig:
    return transformers.Phi3Config(**SIZES, **changes)


def granite_config(
    kind: type[transformers.PreTrainedConfig] = transformers.GraniteConfig, **more: Any
) -> transformers.PreTrainedConfig:
    # No powers of two: multiplying by those is exact, so a multiplier in the wrong place would change no rounding.
    scales = {"attention_multiplier": 0.3, "embedding_multiplier": 5.0, "residual_multiplier": 0.22}
    # An epsilon large enough to show in the logits: conversion divides it by the residual multiplier's square.
    others = {"logits_scaling": 3.0, "rms_norm_eps": 0.05, "rope_parameters": DEFAULT}
    return kind(**SIZES, **scales, **others, **more)


def ministral3_config() -> transformers.PreTrainedConfig:
    rope = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.1}
    return transformers.Ministral3Config(**SIZES, rope_parameters=rope | {"original_max_position_embeddings": 64})


def gemma4_config(
    kind: type[transformers.PreTrainedConfig] = transformers.Gemma4TextConfig, **more: Any
) -> transformers.PreTrainedConfig:
    """Heads of two sizes; by default the E form, whose last layers share keys and values."""
    sizes = SIZES | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }
    e_form = {
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": SIZES["vocab_size"],
    }
    return kind(**sizes, **(more or e_form), global_head_dim=32, sliding_window=8, final_logit_softcapping=2.0)


def gpt_oss_config() -> transformers.PreTrainedConfig:
    # A limit that about a third of the tiny model's gates and up projections reach.
    return transformers.GptOssConfig(
        **SIZES,
        **LOCAL_EXPERTS,
        sliding_window=8,
        swiglu_limit=1.5,
        rope_parameters=YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    )


# Configurations of the families that CONFIGS does not have, some families in more than one form.
OTHER_CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "gemma": lambda: transformers.GemmaConfig(**SIZES),
    "gemma2": gemma2_config,
    "gemma4_text": gemma4_config,
    # Values are keys in layers that see all tokens, which have another number of them.
    "gemma4_unified_text": lambda: gemma4_config(
        transformers.Gemma4UnifiedTextConfig, attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    "gemma4_text with experts": lambda: gemma4_config(
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=48,
    ),
    "gpt_oss": gpt_oss_config,
    "granite": granite_config,
    "granitemoe": lambda: granite_config(transformers.GraniteMoeConfig, **LOCAL_EXPERTS),
    "lfm2": lambda: transformers.Lfm2Config(
        **SIZES, block_multiple_of=16, layer_types=["conv", "full_attention", "conv"]
    ),
    # The first layer has no experts.
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **SIZES,
        **EXPERTS,
        moe_intermediate_size=48,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "llama with biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama with yarn": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama with dynamic": lambda: transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}
    ),
    "ministral": lambda: transformers.MinistralConfig(**SIZES, sliding_window=8, layer_types=LAYERS),
    "ministral3": ministral3_config,
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=8),
    "mistral without window": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    # Four experts: with five, one token's candidates are 0.003 apart, and rounding to bfloat16 swaps its choice.
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, **EXPERTS),
    "olmoe with normalised weights": lambda: transformers.OlmoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "phi3": lambda: phi3_config(rope_parameters=DEFAULT, sliding_window=8),
    "phi3 with longrope": lambda: phi3_config(rope_parameters=longrope(16), original_max_position_embeddings=24),
    "phi3 as phi4-mini": lambda: phi3_config(
        rope_parameters=longrope(12, partial_rotary_factor=0.75),
        original_max_position_embeddings=24,
        tie_word_embeddings=True,
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen2 with windows": lambda: transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, moe_intermediate_size=48, norm_topk_prob=True),
    "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(**SIZES, **DELTA_RULE),
    "qwen3_5_moe_text": lambda: transformers.Qwen3_5MoeTextConfig(**SIZES, **DELTA_RULE, **EXPERTS, **SHARED),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**SIZES, **DELTA_RULE, **EXPERTS, **SHARED),
    "smollm3": lambda: transformers.SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
}
# CONFIGS is kept apart because peers' converters write those families too.
ALL_CONFIGS = CONFIGS | OTHER_CONFIGS


def is_projection(name: str) -> bool:
    return name.endswith(
        (
            *("_proj.weight", "experts.gate_up_proj", "experts.down_proj", "embed_tokens.weight", "lm_head.weight"),
            *("embed_tokens_per_layer.weight", "per_layer_model_projection.weight"),
            *("per_layer_input_gate.weight", "per_layer_projection.weight"),
            *("w1.weight", "w2.weight", "w3.weight", "in_proj_qkv.weight", "in_proj_qkvz.weight", "in_proj_z.weight"),
        )
    )


def by_columns(parameter: torch.Tensor, name: str, config: Any) -> torch.Tensor:
    """A view of a projection with the columns that are multiplied last: gpt-oss has its experts transposed."""
    is_transposed = config.model_type == "gpt_oss" and ".experts." in name and parameter.ndim == 3
    return parameter.transpose(1, 2) if is_transposed else parameter


def vary_biases(model: torch.nn.Module) -> None:
    """Gives buffers other values than those they start with.

    The experts' biases start as zeros; these are about as far apart as sigmoids of their logits.
    """
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_(std=0.2)
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.6, 1.4)


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """A checkpoint folder, and transformers' model of it with the weights that Q4NX makes of them, in float32."""

    folder: Path
    reference: transformers.PreTrainedModel

    def logits(self, ids: NDArray[np.int64], cache: transformers.Cache | None = None) -> NDArray[np.float32]:
        with torch.no_grad():
            logits = self.reference(input_ids=torch.from_numpy(ids), past_key_values=cache).logits
        return logits.numpy()


def write_tiny(family: str, folder: Path, *, spread: float = 0.15, **changes: Any) -> TinyModel:
    """Writes a checkpoint of a family, with some settings of its configuration changed.

    Normal noise is added to transformers' initial weights, with deviation `spread` for matrices and 0.15 for vectors.
    """
    torch.manual_seed(7)
    config = ALL_CONFIGS[family]()
    config.update(changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which would otherwise all be equal
            parameter.add_(torch.randn_like(parameter), alpha=0.15 if parameter.ndim == 1 else spread)
        vary_biases(model)
    model.bfloat16().save_pretrained(folder)
    vocabulary = {f"<{i}>": i for i in range(SIZES["vocab_size"])}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GemmaTokenizer"}))
    # Read back, not cast back: a cast to bfloat16 also rounds the rotary frequencies.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_projection(name):
                rows = by_columns(parameter, name, config)
                quantized = q4nx.quantize(rows.numpy().reshape(-1, rows.shape[-1]))
                rows.copy_(torch.from_numpy(q4nx.dequantize_codes(quantized)).reshape(rows.shape))
    return TinyModel(folder, model)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    made: dict[str, TinyModel] = {}

    def tiny(family: str) -> TinyModel:
        if family not in made:
            made[family] = write_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return tiny


@pytest.fixture
def checkpoint(tiny_models: Callable[[str], TinyModel], tmp_path: Path) -> Path:
    """A copy of the tiny Gemma3 checkpoint that a test may change."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for path in tiny_models("gemma3_text").folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder

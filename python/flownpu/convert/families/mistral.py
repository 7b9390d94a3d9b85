# SPDX-License-Identifier: Apache-2.0
"""Mistral (Mistral AI, 2023): Llama with a window in all layers or in none; Ministral: in layers that are listed."""

from dataclasses import replace

from flownpu.convert.families.family import Biases, Experts, Family
from flownpu.convert.layer_parts import ExpertTensors

_MISTRAL = Family(
    model_type="mistral",
    genai_type="mistral",
    title="Mistral",
    defaults={
        "vocab_size": 32000,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    biases=Biases(qkv=False, output=False, feed_forward=False),
    windows="all",
)

FAMILIES = (
    _MISTRAL,
    replace(_MISTRAL, model_type="ministral", title="Ministral", windows="listed"),
    replace(
        _MISTRAL,
        model_type="ministral3",
        title="Ministral 3",
        defaults={
            **_MISTRAL.defaults,
            "vocab_size": 131072,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 11,
        },
        rope_defaults={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    ),
    # Mixtral (2023): with experts, and by default without windows.
    Family(
        model_type="mixtral",
        genai_type="mistral",
        title="Mixtral",
        gguf_interleaved=True,
        defaults={
            "vocab_size": 32000,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        rope_defaults={"rope_type": "default", "rope_theta": 1e6},
        biases=Biases(qkv=False, output=False, feed_forward=False),
        windows="all",
        experts=Experts(
            tensors=ExpertTensors(
                "block_sparse_moe.gate.weight",
                "block_sparse_moe.experts.{}.w1.weight",
                "block_sparse_moe.experts.{}.w3.weight",
                "block_sparse_moe.experts.{}.w2.weight",
            )
        ),
    ),
)

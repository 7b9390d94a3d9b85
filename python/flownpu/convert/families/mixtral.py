# SPDX-License-Identifier: Apache-2.0
"""Mixtral (Mistral AI, 2023): Mistral with experts, and by default without windows."""

from flownpu.convert.families.family import Biases, Experts, Family
from flownpu.convert.layer_parts import ExpertTensors

FAMILIES = (
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

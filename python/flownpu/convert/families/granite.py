# SPDX-License-Identifier: Apache-2.0
"""Granite 3 (IBM, 2024): Llama with multipliers of embeddings, scores, residual stream, logits; also with experts."""

from dataclasses import replace

from flownpu.convert.families.family import Experts, Family, Power
from flownpu.convert.layer_parts import ExpertTensors

_GRANITE = Family(
    model_type="granite",
    genai_type="granite",
    title="Granite 3",
    gguf="granite",
    gguf_interleaved=True,
    defaults={
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    attention_scale=Power("attention_multiplier"),
    embedding_scale=Power("embedding_multiplier"),
    residual_scale=Power("residual_multiplier"),
    logit_scale=Power("logits_scaling", -1.0),
)

FAMILIES = (
    _GRANITE,
    replace(
        _GRANITE,
        model_type="granitemoe",
        title="Granite 3 MoE",
        gguf="granitemoe",
        defaults={**_GRANITE.defaults, "num_local_experts": 8, "num_experts_per_tok": 2},
        experts=Experts(
            tensors=ExpertTensors(
                "block_sparse_moe.router.layer.weight",
                "block_sparse_moe.input_linear.weight",
                "block_sparse_moe.input_linear.weight",
                "block_sparse_moe.output_linear.weight",
            )
        ),
    ),
)

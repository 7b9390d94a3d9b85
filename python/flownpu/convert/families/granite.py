# SPDX-License-Identifier: Apache-2.0
"""Granite 3 (IBM, 2024): Llama with multipliers of embeddings, scores, residual stream and logits."""

from flownpu.convert.families.family import Family, Power

__all__ = ["FAMILIES"]

FAMILIES = (
    Family(
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
    ),
)

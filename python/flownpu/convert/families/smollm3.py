# SPDX-License-Identifier: Apache-2.0
"""SmolLM3 (Hugging Face, 2025): Llama in which every fourth layer has no RoPE (Yang et al., "RoPE to NoPE", 2025)."""

from flownpu.convert.families.family import Family

FAMILIES = (
    Family(
        model_type="smollm3",
        genai_type="smollm3",
        title="SmolLM3",
        gguf="smollm3",
        gguf_interleaved=True,
        defaults={
            "vocab_size": 128256,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "pad_token_id": 128004,
            "no_rope_layer_interval": 4,
        },
        windows="listed",
        rope_layers="no_rope_layers",
        rope_period="no_rope_layer_interval",
        rope_defaults={"rope_theta": 2e6},
    ),
)

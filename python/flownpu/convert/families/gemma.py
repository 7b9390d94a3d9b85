# SPDX-License-Identifier: Apache-2.0
"""Gemma (Google, 2024)."""

from flownpu.convert.families.family import Family, Power

# The defaults that all of Gemma's configuration classes in transformers share.
DEFAULTS = {
    "head_dim": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
}

FAMILIES = (
    Family(
        model_type="gemma",
        genai_type="gemma",
        title="Gemma",
        gguf="gemma",
        defaults={
            **DEFAULTS,
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 8192,
        },
        # The first checkpoints say gelu, but were trained with its tanh approximation.
        activations={"gelu": "gelu_pytorch_tanh"},
        norm_offset=1.0,
        embedding_scale=Power("hidden_size", 0.5),
    ),
)

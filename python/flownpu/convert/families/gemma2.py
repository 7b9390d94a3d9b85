# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 (Google, 2024): norms before and after each part, soft caps, a window in every other layer."""

from flownpu.convert.families import gemma
from flownpu.convert.families.family import Family, Power

FAMILIES = (
    Family(
        model_type="gemma2",
        genai_type="gemma2",
        title="Gemma 2",
        gguf="gemma2",
        defaults={
            **gemma.DEFAULTS,
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        activation="hidden_activation",
        norms="around",
        norm_offset=1.0,
        windows="listed",
        period=2,
        attention_scale=Power("query_pre_attn_scalar", -0.5),
        embedding_scale=Power("hidden_size", 0.5),
        attention_softcap="attn_logit_softcapping",
        logit_softcap="final_logit_softcapping",
    ),
)

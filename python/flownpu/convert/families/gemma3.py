# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 (Google, 2025): most layers have a window and another RoPE; queries and keys are normalised per head."""

from dataclasses import replace

from flownpu.convert.families import gemma
from flownpu.convert.families.family import Family, Power

_TEXT = Family(
    model_type="gemma3_text",
    genai_type="gemma3_text",
    title="Gemma 3",
    gguf="gemma3",
    defaults={
        **gemma.DEFAULTS,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 1e4,
    },
    activation="hidden_activation",
    norms="around",
    norm_offset=1.0,
    qk_norm="heads",
    windows="listed",
    period=Power("sliding_window_pattern"),
    rope_by_kind=True,
    rope_defaults={"rope_theta": 1e6},
    attention_scale=Power("query_pre_attn_scalar", -0.5),
    embedding_scale=Power("hidden_size", 0.5),
    attention_softcap="attn_logit_softcapping",
    logit_softcap="final_logit_softcapping",
)

# The second has a vision tower besides its decoder.
FAMILIES = (_TEXT, replace(_TEXT, model_type="gemma3", title="Gemma 3 with pictures", inner="text_config", gguf=None))

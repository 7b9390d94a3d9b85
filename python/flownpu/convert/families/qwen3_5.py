# SPDX-License-Identifier: Apache-2.0
"""Qwen 3.5 (Alibaba, 2026), text only: three of four layers have linear attention by the gated delta rule."""

from dataclasses import replace

from flownpu.convert.families.family import Biases, Family, Power

_TEXT = Family(
    model_type="qwen3_5_text",
    genai_type="qwen3_5_text",
    title="Qwen 3.5",
    defaults={
        "vocab_size": 248320,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "full_attention_interval": 4,
    },
    norm_offset=1.0,
    qk_norm="heads",
    biases=Biases(feed_forward=False),
    delta_rule=True,
    output_gate=True,
    windows="listed",
    period=Power("full_attention_interval"),
    # Tokens of a text have three equal positions, so that sections of them change nothing. The gated norm has SiLU.
    neutral={"output_gate_type": "swish", "attn_output_gate": True},
)

FAMILIES = (_TEXT, replace(_TEXT, model_type="qwen3_5", inner="text_config"))

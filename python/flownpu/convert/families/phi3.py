# SPDX-License-Identifier: Apache-2.0
"""Phi-3, 3.5 and 4-mini (Microsoft, 2024): Llama with fused QKV and gate/up tensors, partial RoPE and LongRoPE."""

from flownpu.convert.families.family import Biases, Family

FAMILIES = (
    Family(
        model_type="phi3",
        genai_type="phi3",
        title="Phi-3, Phi-4-mini",
        gguf="phi3",
        defaults={
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "pad_token_id": 32000,
        },
        biases=Biases(qkv=False, output=False, feed_forward=False),
        fused=True,
        windows="all",
    ),
)

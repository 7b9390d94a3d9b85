# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 (Alibaba, 2025): queries and keys normalised by heads."""

from flownpu.convert.families.family import Biases, Family

__all__ = ["FAMILIES"]

FAMILIES = (
    Family(
        model_type="qwen3",
        genai_type="qwen3",
        title="Qwen 3",
        gguf="qwen3",
        defaults={
            "vocab_size": 151936,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        qk_norm="heads",
        biases=Biases(feed_forward=False),
        windows="behind",
    ),
)

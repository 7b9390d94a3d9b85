# SPDX-License-Identifier: Apache-2.0
"""Qwen 2 and 2.5 (Alibaba, 2024), and DeepSeek's distillations on them: Llama with biases in the QKV projections."""

from flownpu.convert.families.family import Biases, Family

FAMILIES = (
    Family(
        model_type="qwen2",
        genai_type="qwen2",
        title="Qwen 2, 2.5",
        gguf="qwen2",
        defaults={
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        biases=Biases(qkv=True, output=False, feed_forward=False),
        windows="behind",
    ),
)

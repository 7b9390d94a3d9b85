# SPDX-License-Identifier: Apache-2.0
"""Qwen 3 (Alibaba, 2025): queries and keys are normalised per head; also with experts in each layer."""

from dataclasses import replace

from flownpu.convert.families.family import Biases, Experts, Family

_QWEN3 = Family(
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
)

FAMILIES = (
    _QWEN3,
    replace(
        _QWEN3,
        model_type="qwen3_moe",
        title="Qwen 3 MoE",
        gguf="qwen3moe",
        defaults={
            "vocab_size": 151936,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        windows="none",
        experts=Experts(size="moe_intermediate_size", normalize="norm_topk_prob"),
        # The first two ask for layers without experts, which no known checkpoint has.
        neutral={"mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False},
    ),
)

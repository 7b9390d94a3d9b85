# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 (Ai2, 2024): norms after each part; one norm over all query heads, and one over all key heads."""

from flownpu.convert.families.family import Biases, Experts, Family

FAMILIES = (
    Family(
        model_type="olmo2",
        genai_type="olmo",
        title="OLMo 2",
        gguf="olmo2",
        defaults={
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
            "pad_token_id": 1,
        },
        norms="after",
        qk_norm="all",
    ),
    # OLMoE (2024): with experts, and norms before each part.
    Family(
        model_type="olmoe",
        genai_type="olmo",
        title="OLMoE",
        gguf="olmoe",
        defaults={
            "vocab_size": 50304,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50279,
            "pad_token_id": 1,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        qk_norm="all",
        biases=Biases(feed_forward=False),
        experts=Experts(normalize="norm_topk_prob"),
        neutral={"clip_qkv": None},
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""gpt-oss (OpenAI, 2025): experts with biases and a limited SwiGLU, sinks, windows in every other layer."""

from flownpu.convert.families.family import Biases, Experts, Family
from flownpu.convert.layer_parts import ExpertTensors

_STACK = "mlp.experts.gate_up_proj"

FAMILIES = (
    Family(
        model_type="gpt_oss",
        genai_type="gptoss",
        title="gpt-oss",
        gguf="gpt-oss",
        defaults={
            "vocab_size": 201088,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        rope_defaults={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        biases=Biases(feed_forward=False),
        head_sinks=True,
        windows="listed",
        period=2,
        experts=Experts(
            tensors=ExpertTensors("mlp.router.weight", _STACK, _STACK, "mlp.experts.down_proj", in_turns=True),
            has_biases=True,
            swiglu=("swiglu_alpha", 1.0, "swiglu_limit"),
        ),
    ),
)

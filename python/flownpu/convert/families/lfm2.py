# SPDX-License-Identifier: Apache-2.0
"""LFM2 (Liquid AI, 2025): most layers have a gated convolution over three tokens in the place of attention."""

from dataclasses import replace

from flownpu.convert.families.family import Biases, Experts, Family
from flownpu.convert.layer_parts import ExpertTensors

_DEFAULTS = {
    "vocab_size": 65536,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
_DENSE = Family(
    model_type="lfm2",
    genai_type="lfm2",
    title="LFM2",
    gguf="lfm2",
    defaults={**_DEFAULTS, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0},
    qk_norm="heads",
    biases=Biases(qkv=False, output=False, feed_forward=False),
    tensors={
        "norm.weight": "embedding_norm.weight",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    },
    convolution="conv_L_cache",
    adjusted_size=True,
    norm_epsilon="norm_eps",
    windows="listed",
    rope_defaults={"rope_theta": 1e6},
    neutral={"conv_bias": False},
)

FAMILIES = (
    _DENSE,
    replace(
        _DENSE,
        model_type="lfm2_moe",
        genai_type="lfm2_moe",
        title="LFM2 MoE",
        gguf="lfm2moe",
        defaults={
            **_DEFAULTS,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_dense_layers": 2,
        },
        adjusted_size=False,
        # transformers adds 1e-6 to the sum of the chosen experts' weights, which is about the rounding of a float32.
        experts=Experts(
            size="moe_intermediate_size",
            tensors=ExpertTensors(
                router="feed_forward.gate.weight",
                gate="feed_forward.experts.{}.w1.weight",
                up="feed_forward.experts.{}.w3.weight",
                down="feed_forward.experts.{}.w2.weight",
                bias="feed_forward.expert_bias",
            ),
            biased=True,
            dense_layers="num_dense_layers",
        ),
        neutral={
            **_DENSE.neutral,
            "use_expert_bias": True,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
    ),
)

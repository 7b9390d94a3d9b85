# SPDX-License-Identifier: Apache-2.0
"""LFM2 (Liquid AI, 2025): most layers have a gated convolution over three tokens in the place of attention."""

from flownpu.convert.families.family import Biases, Family

FAMILIES = (
    Family(
        model_type="lfm2",
        genai_type="lfm2",
        title="LFM2",
        defaults={
            "vocab_size": 65536,
            "max_position_embeddings": 128000,
            "norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "conv_L_cache": 3,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
        },
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
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next (Alibaba, 2025) and Qwen 3.5 (2026), text only: three of four layers have the gated delta rule.

Next and some sizes of 3.5 have experts, one of them for all tokens.
"""

from dataclasses import replace

from flownpu.convert.families.family import Biases, Experts, Family, Power
from flownpu.convert.layer_parts import DeltaRuleTensors, ExpertTensors

_TEXT = Family(
    model_type="qwen3_5_text",
    genai_type="qwen3_5_text",
    title="Qwen 3.5",
    gguf="qwen35",
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
    delta_rule=DeltaRuleTensors(),
    output_gate=True,
    windows="listed",
    period=Power("full_attention_interval"),
    # Tokens of a text have three equal positions, so that sections of them change nothing. The gated norm has SiLU.
    neutral={"output_gate_type": "swish", "attn_output_gate": True},
)

_EXPERTS = Experts(size="moe_intermediate_size", shared="shared_expert_intermediate_size")
_MIXTURE = replace(
    _TEXT,
    model_type="qwen3_5_moe_text",
    genai_type="qwen3_5_moe_text",
    title="Qwen 3.5 MoE",
    gguf="qwen35moe",
    defaults={
        **_TEXT.defaults,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    experts=_EXPERTS,
)
# The wrapper's class keeps experts as transformers 5 computes with them.
_STACKED = ExpertTensors(gate="mlp.experts.gate_up_proj", up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj")

FAMILIES = (
    _TEXT,
    replace(_TEXT, model_type="qwen3_5", gguf=None, inner="text_config"),
    _MIXTURE,
    replace(
        _MIXTURE,
        model_type="qwen3_5_moe",
        gguf=None,
        inner="text_config",
        experts=replace(_EXPERTS, tensors=_STACKED),
    ),
    replace(
        _MIXTURE,
        model_type="qwen3_next",
        title="Qwen3-Next",
        gguf="qwen3next",
        defaults={
            **_MIXTURE.defaults,
            "vocab_size": 151936,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        delta_rule=DeltaRuleTensors(fused_qkvz=True, fused_ba=True),
        experts=replace(_EXPERTS, normalize="norm_topk_prob"),
        # The first two ask for layers without experts, which no known checkpoint has.
        neutral={**_TEXT.neutral, "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
)

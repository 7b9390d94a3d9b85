# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 (Google, 2026), text: its E forms have an embedding for each layer, and layers that share keys and values."""

from dataclasses import replace

from flownpu.convert.families.family import Experts, Family, Power
from flownpu.convert.layer_parts import ExpertTensors

_STACK = "experts.gate_up_proj"
_DEFAULTS = {
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "rope_local_base_freq": 1e4,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_TEXT = Family(
    model_type="gemma4_text",
    genai_type="gemma4_text",
    title="Gemma 4",
    gguf="gemma4",
    defaults={**_DEFAULTS, "hidden_size_per_layer_input": 256},
    activation="hidden_activation",
    norms="around",
    qk_norm="heads",
    value_norm=True,
    windows="listed",
    period=6,
    sizes_by_kind=True,
    rope_by_kind=True,
    attention_scale=None,
    embedding_scale=Power("hidden_size", 0.5),
    logit_softcap="final_logit_softcapping",
    per_layer_size="hidden_size_per_layer_input",
    layer_scalars=True,
    experts=Experts(
        count=("num_experts",),
        chosen="top_k_experts",
        size="moe_intermediate_size",
        tensors=ExpertTensors("router.proj.weight", _STACK, _STACK, "experts.down_proj"),
        beside="enable_moe_block",
    ),
    neutral={"attention_bias": False},
)

# The 12B, which takes pictures and sounds without towers for them.
_UNIFIED = replace(
    _TEXT,
    model_type="gemma4_unified_text",
    gguf=None,
    defaults={**_DEFAULTS, "max_position_embeddings": 262144, "sliding_window": 1024},
    per_layer_size=None,
)
# Small decoders that draft for the others; a layer reads the keys and values of the last layer of its kind there.
_DRAFTER = replace(
    _TEXT,
    model_type="gemma4_assistant",
    gguf=None,
    defaults=_DEFAULTS,
    inner="text_config",
    per_layer_size=None,
    drafts_for="backbone_hidden_size",
)
# The others have towers for pictures and sounds besides their decoder, which are left out.
FAMILIES = (
    _TEXT,
    replace(_TEXT, model_type="gemma4", gguf=None, inner="text_config"),
    _UNIFIED,
    replace(_UNIFIED, model_type="gemma4_unified", inner="text_config"),
    _DRAFTER,
    replace(_DRAFTER, model_type="gemma4_unified_assistant"),
)

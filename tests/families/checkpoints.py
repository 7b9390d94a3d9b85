# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints of each form of a family, with weights that every source holds without rounding any.

A weight is s (c - 8) with c in 0 .. 15; each 32 neighbours in a row share s, and both 0 and 15 are among their c. So s
and c are found again by Q4NX, which takes the smallest and the largest weight for the codes 0 and 15, and by GGUF's
Q4_0 and ORT GenAI's builder (MatMulNBits), which take the weight of largest magnitude for -8 steps. s has 3 bits, so
that a weight has 3 + 4 and bfloat16 holds it. One model of transformers' is the reference for all of a form's cells.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from flownpu.ops import q4nx
from tests.convert.conftest import ALL_CONFIGS, TinyModel, by_columns, is_projection, longrope, vary_biases
from tests.npu.models import SIZES as ARRAY_SIZES
from tests.rewrites.genai_export import make_tokenizer

SIZES: dict[str, Any] = ARRAY_SIZES | {"eos_token_id": 1}
# For families whose head size is hidden size / heads somewhere in transformers or the exporters.
_EVEN = {"hidden_size": 256, "num_attention_heads": 8}
_WHOLE_VALUES = {"linear_value_head_dim": 32}
_SHARED = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 160}
# Changes to forms of tests/convert/conftest.py that no GGUF file or export can hold, or that do not fit these sizes.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32, "final_logit_softcapping": 10.0},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "llama with biases": {"mlp_bias": False},
    "phi3": {
        **_EVEN,
        "original_max_position_embeddings": SIZES["max_position_embeddings"],  # exporters tell LongRoPE by it
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
    },
    "phi3 as phi4-mini": _EVEN,
    "phi3 with longrope": _EVEN,
    # With embeddings of 32, two keys of a head nearly tie (weights 0.499 and 0.495), and rounding to bfloat16 makes
    # 0.67 and 0.32 of them in transformers, too: one call of 5 is off by a tenth of the logits' deviation.
    "gemma4_text": {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": SIZES["vocab_size"]},
    "gemma4_text with experts": {"moe_intermediate_size": 96},
    "gpt_oss": {"swiglu_limit": 7.0},  # no GGUF file says it
    "granitemoe": _EVEN,
    "olmoe": _EVEN,
    "olmoe with normalised weights": _EVEN,
    "lfm2_moe": {"moe_intermediate_size": 96},
    "qwen3_moe": {"moe_intermediate_size": 96},
    # Value heads of whole groups of weights, whose codes GGUF's order of heads leaves together.
    "qwen3_5_text": _WHOLE_VALUES,
    # Four experts: with five, rounding to bfloat16 swaps a token's choice.
    "qwen3_5_moe_text": _WHOLE_VALUES | _SHARED | {"num_experts": 4},
    "qwen3_next": _WHOLE_VALUES | _SHARED,
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4},
}
# Scales of groups, with 3 significant bits.
_SCALES = torch.tensor([0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5, 1.75])
# The factor by which a product changes the rms of its rows: enough that attention and experts choose clearly, and
# logits differ.
_GAIN = 1.5


def configuration(form: str, changes: dict[str, Any] | None = None) -> transformers.PreTrainedConfig:
    """A form's configuration, in the sizes of these checkpoints but for changes."""
    config = ALL_CONFIGS[form]()
    config.update(SIZES | CHANGES.get(form, {}) | (changes or {}))
    if config.rope_parameters and "long_factor" in config.rope_parameters:
        dimensions = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        factors = {key: longrope(dimensions)[key] for key in ("short_factor", "long_factor")}
        # RoPE's type under its older name, too, which GenAI's builder reads.
        config.update({"rope_parameters": config.rope_parameters | factors | {"type": "longrope"}})
    return config


def make_checkpoint(form: str, folder: Path, changes: dict[str, Any] | None = None) -> TinyModel:
    """Writes the checkpoint of a form, in bfloat16, and returns it with transformers' model of it in float32."""
    torch.manual_seed(7)
    config = configuration(form, changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_projection(name):
                rows = by_columns(parameter, name, config)
                rows.copy_(_on_steps(rows.shape))
            else:  # norms, biases and routers, which would be alike otherwise
                parameter.add_(torch.randn_like(parameter), alpha=0.15)
        vary_biases(model)
    model.bfloat16().save_pretrained(folder)
    make_tokenizer(folder)
    # Read back rather than cast back: a cast to bfloat16 rounds the rotary frequencies too.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return TinyModel(folder, model)


def _on_steps(shape: torch.Size) -> torch.Tensor:
    """Random weights of the kind that the module's docstring describes."""
    groups = torch.Size([*shape[:-1], shape[-1] // q4nx.GROUP])
    codes = torch.randint(0, q4nx.LARGEST_CODE + 1, [*groups, q4nx.GROUP])
    ends = torch.rand([*groups, q4nx.GROUP]).argsort(-1)[..., :2]
    codes.scatter_(-1, ends, torch.tensor([0, q4nx.LARGEST_CODE]).expand(ends.shape))
    # 16 equally likely codes have an rms of 4.6 around 7.5, and nearly the same around 8.
    base = 2.0 ** torch.floor(torch.log2(torch.tensor(_GAIN / 4.6 / shape[-1] ** 0.5)))
    scales = base * _SCALES[torch.randint(0, len(_SCALES), groups)]
    return (scales[..., None] * (codes - 8.0)).reshape(shape)


def for_transformers_4(folder: Path) -> None:
    """Rewrites a checkpoint's config.json as transformers 4 reads it, which optimum needs."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype")
    if "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    rope = config.pop("rope_parameters", None) or {}
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            config[key] = rope.pop(key)
    if rope.get("rope_type", "default") != "default":
        if config["model_type"] == "phi3":  # it takes these three and no other
            rope = {key: rope[key] for key in ("short_factor", "long_factor")} | {"type": rope["rope_type"]}
        config["rope_scaling"] = rope
    path.write_text(json.dumps(config))

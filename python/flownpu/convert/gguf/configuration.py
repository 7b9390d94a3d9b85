# SPDX-License-Identifier: Apache-2.0
"""Translates the metadata of a GGUF file into the Hugging Face configuration that `families` reads.

Settings that a file omits have llama.cpp's defaults. A setting that changes the model and is not supported is an error:
a model that was converted without it would compute something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.convert.errors import ConversionError
from flownpu.convert.families import FAMILIES, OTHER_WAYS
from flownpu.convert.gguf.layer_forms import layer_forms
from flownpu.convert.gguf.settings import GgufSettings

if TYPE_CHECKING:
    from flownpu.convert.families.family import Experts, Family
    from flownpu.convert.gguf.file import GgufFile

ARCHITECTURES = {family.gguf: family for family in FAMILIES.values() if family.gguf is not None}
"""Families by the value of general.architecture."""

# Settings of related models with the same architecture name, and the values that change nothing.
_SCALES = {"logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 1.0}
_NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
}

# The gating functions softmax and sigmoid of experts.
_SOFTMAX, _SIGMOID = 1, 2

# How many layers the Gemmas of 27B parameters have. Their attention is scaled by 1 / sqrt(hidden size / heads), that of
# all others by 1 / sqrt(head size). The file does not say so; llama.cpp also recognises them by the number of layers.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}

# The texts of tokens with which chat models end a turn; a file gives the id of only one of them.
_ENDS_OF_TURNS = (
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>"),
    *("<|end_of_text|>", "<|endoftext|>", "<|return|>", "<|call|>"),
)


def read_configuration(file: GgufFile) -> dict[str, Any]:
    """The configuration, with config.json's names.

    Raises:
        ConversionError: the architecture is not supported, or a setting is missing or has no place in FlowNPU.
    """
    return _Configuration(file).configuration()


def _neutral_experts(family: Family) -> dict[str, Any]:
    """Settings of experts that change the model, and the values that a family has."""
    if (experts := family.experts) is None:
        return {"expert_count": 0}
    shared = {} if experts.shared else {"expert_shared_feed_forward_length": 0}
    return {"expert_gating_func": _SIGMOID if experts.biased else _SOFTMAX, "expert_shared_count": 0, **shared}


class _Configuration(GgufSettings):
    def configuration(self) -> dict[str, Any]:
        if self.architecture not in ARCHITECTURES:
            raise ConversionError(
                f"{self.file.path}: expected general.architecture to be one of {', '.join(ARCHITECTURES)}, got "
                f'"{self.architecture}"; {OTHER_WAYS}'
            )
        if int(self.metadata.get("split.count") or 1) > 1:
            raise ConversionError(
                f"{self.file.path}: one of {self.metadata['split.count']} parts of a model; join them with "
                "llama-gguf-split --merge"
            )
        family = self._family()
        has_scales = family.residual_scale is not None
        self.check_neutral(_NEUTRAL | ({} if has_scales else _SCALES) | _neutral_experts(family))
        # Files of models with a drafter of their own count its layers, which are the last.
        layers = self.integer("block_count") - self.file.drafter_layers
        if layers > len(self.file.tensors):
            raise ConversionError(
                f"{self.file.path}: {self.architecture}.block_count is {layers}, and there are "
                f"{len(self.file.tensors)} tensors; the file is damaged"
            )
        hidden_size, heads = self.integer("embedding_length"), self.integer("attention.head_count")
        head_size = self.integer("attention.key_length", hidden_size // heads)
        is_partial = self.architecture == "phi3" or family.delta_rule is not None
        self._check_head_size("", head_size, is_partial=is_partial)
        config = {
            "model_type": family.model_type,
            "hidden_size": hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "head_dim": head_size,
            "vocab_size": self._vocabulary_size(),
            "max_position_embeddings": self.integer("context_length"),
            family.norm_epsilon: self.value("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.value("rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "attention_bias": "blk.0.attn_output.bias" in self.file.tensors,
            **self._tokens(),
            **self._mixture(family.experts),
            **self._layers(family, layers),
        }
        if scaling := self._rope_scaling(family):
            config["rope_scaling"] = scaling
        if family.head_sinks:
            config["sliding_window"] = self.integer("attention.sliding_window")
        if self.architecture in _LAYERS_OF_27B:
            config |= self._gemma(config)
        elif has_scales:
            config |= self._granite(head_size)
        else:
            self._check_scale(1.0 if family.attention_scale is None else head_size**-0.5)
        if self.architecture == "phi3":
            window = self.value("attention.sliding_window", 0)
            config["sliding_window"] = int(window) or None
        if is_partial:
            config["partial_rotary_factor"] = self.integer("rope.dimension_count", head_size) / head_size
        return config

    def _family(self) -> Family:
        """The file's family; the architecture llama with experts is Mixtral."""
        family = ARCHITECTURES[self.architecture]
        return FAMILIES["mixtral"] if family.model_type == "llama" and self.value("expert_count", 0) else family

    def _check_head_size(self, kind: str, head_size: int, *, is_partial: bool = False) -> None:
        """Raises ConversionError unless values and rotated parts have that size, in layers of a kind."""
        for key in (f"attention.value_length{kind}", *(() if is_partial else (f"rope.dimension_count{kind}",))):
            if (size := self.integer(key, head_size)) != head_size:
                raise ConversionError(
                    f"{self.file.path}: {self.architecture}.{key} is {size}, and only models that have the head's "
                    f"size, {head_size}, there can be converted"
                )

    def _layers(self, family: Family, layers: int) -> dict[str, Any]:
        """The settings of layers with states, the key and value heads of the others, and the feed-forward's size."""
        if family.sizes_by_kind:
            forms = layer_forms(self, layers)
            self._check_head_size("_swa", forms["head_dim"])
            return forms
        size = self.integer("feed_forward_length", self.value("expert_feed_forward_length", 0))
        return {"intermediate_size": size, **self._mixers(family, layers)}

    def _mixers(self, family: Family, layers: int) -> dict[str, Any]:
        if family.convolution is not None:
            # Layers without keys and values have convolutions.
            kv_heads = np.atleast_1d(self.value("attention.head_count_kv"))
            kinds = ["full_attention" if heads else "conv" for heads in kv_heads.tolist()]
            taps = {family.convolution: self.integer("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
            return {"num_key_value_heads": int(kv_heads.max()), "layer_types": kinds[:layers], **taps}
        heads = self.integer("attention.head_count")
        config: dict[str, Any] = {"num_key_value_heads": self.integer("attention.head_count_kv", heads)}
        if family.delta_rule is not None:
            heads = self.integer("ssm.time_step_rank")
            config |= {
                "full_attention_interval": self.integer("full_attention_interval", 4),
                "linear_conv_kernel_dim": self.integer("ssm.conv_kernel"),
                "linear_num_key_heads": self.integer("ssm.group_count"),
                "linear_num_value_heads": heads,
                "linear_key_head_dim": self.integer("ssm.state_size"),
                "linear_value_head_dim": self.integer("ssm.inner_size") // heads,
            }
        return config

    def _mixture(self, experts: Experts | None) -> dict[str, Any]:
        if experts is None or (experts.beside and not self.value("expert_count", 0)):
            return {}
        size = self.integer("expert_feed_forward_length", self.value("feed_forward_length", 0))
        shared = {experts.shared: self.integer("expert_shared_feed_forward_length")} if experts.shared else {}
        dense = {experts.dense_layers: int(self.value("leading_dense_block_count"))} if experts.dense_layers else {}
        return {
            "num_experts": self.integer("expert_count"),
            experts.chosen: self.integer("expert_used_count"),
            experts.size: size,
            **({experts.beside: True} if experts.beside else {}),
            **shared,
            **dense,
            # The file does not say it. Of these families, llama.cpp leaves only OLMoE's weights unnormalised.
            "norm_topk_prob": self.architecture != "olmoe",
        }

    def _granite(self, head_size: int) -> dict[str, Any]:
        return {
            "attention_multiplier": float(self.value("attention.scale", head_size**-0.5)),
            "embedding_multiplier": float(self.value("embedding_scale", 1.0)),
            "residual_multiplier": float(self.value("residual_scale", 1.0)),
            "logits_scaling": float(self.value("logit_scale", 1.0)),
        }

    def _gemma(self, config: dict[str, Any]) -> dict[str, Any]:
        second = self.architecture == "gemma2"
        special = config["num_hidden_layers"] == _LAYERS_OF_27B[self.architecture]
        scalar = config["hidden_size"] // config["num_attention_heads"] if special else config["head_dim"]
        self._check_scale(scalar**-0.5)
        local = self.local_layers(config["num_hidden_layers"], 2 if second else 6)
        return {
            "query_pre_attn_scalar": scalar,
            "sliding_window": self.integer("attention.sliding_window", 4096 if second else None),
            "layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in local],
            "rope_local_base_freq": self.value("rope.freq_base_swa", 10000.0),
            "final_logit_softcapping": self.value("final_logit_softcapping", 30.0 if second else 0.0),
            "attn_logit_softcapping": self.value("attn_logit_softcapping", 50.0 if second else 0.0),
        }

    def _rope_scaling(self, family: Family) -> dict[str, Any] | None:
        kind = self.value("rope.scaling.type", "none")
        # Older files have no type: rope.scale_linear alone means linear scaling.
        factor = float(self.value("rope.scaling.factor", self.value("rope.scale_linear", 1.0)))
        if kind == "none" and f"{self.architecture}.rope.scale_linear" in self.metadata:
            kind = "linear"
        if kind == "yarn" and family.rope_defaults.get("rope_type") == "yarn":
            context = self.integer("rope.scaling.original_context_length")
            fixed = {key: value for key, value in family.rope_defaults.items() if key != "rope_theta"}
            return {**fixed, "factor": factor, "original_max_position_embeddings": context}
        if kind not in ("none", "linear"):
            raise ConversionError(
                f'{self.file.path}: expected {self.architecture}.rope.scaling.type none or linear, got "{kind}", which '
                "cannot be converted"
            )
        return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else None

    def _check_scale(self, expected: float) -> None:
        scale = float(self.value("attention.scale", expected))
        # The file stores float32.
        if abs(scale / expected - 1) > 1e-6:
            raise ConversionError(
                f"{self.file.path}: {self.architecture}.attention.scale is {scale}, and only models that have "
                f"{expected} there can be converted"
            )

    def _vocabulary_size(self) -> int:
        tensor = self.file.tensors.get("token_embd.weight")
        if tensor is None or len(tensor.shape) != 2:
            raise ConversionError(f"{self.file.path}: tensor token_embd.weight is missing; is it a language model?")
        return int(tensor.shape[0])

    def _tokens(self) -> dict[str, Any]:
        """Token ids: eos_token_id lists every token that ends a turn."""
        names = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
        ids = {key: self.metadata.get(f"tokenizer.ggml.{name}") for key, name in names.items()}
        tokens = self.metadata.get("tokenizer.ggml.tokens") or []
        types = self.metadata.get("tokenizer.ggml.token_type")
        ends = [self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        if types is not None:
            wanted = set(_ENDS_OF_TURNS)
            control = 3
            ends += [i for i, text in enumerate(tokens) if text in wanted and types[i] == control]
        return {**ids, "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}

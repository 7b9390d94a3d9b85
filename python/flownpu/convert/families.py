# SPDX-License-Identifier: Apache-2.0
"""Reads Hugging Face configurations (config.json) of the model families that are supported into `Decoder`.

Both generations of files are read. transformers 4 wrote `rope_theta`, `rope_scaling`, `rope_local_base_freq` and
`sliding_window_pattern`; transformers 5 writes `rope_parameters` (for Gemma3 one entry a kind of layer) and
`layer_types`. What a file leaves out has the default of the family's configuration class in transformers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flownpu.convert.decoder import Decoder, Layer, LinearScaling, Llama3Scaling, Rotary
from flownpu.convert.errors import ConversionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Settings = Mapping[str, Any]

__all__ = ["FAMILIES", "read_decoder"]


def read_decoder(config: Settings, generation: Settings | None = None) -> Decoder:
    """The decoder that a checkpoint's configuration describes.

    Args:
        config: config.json.
        generation: generation_config.json, whose token ids go before config.json's (chat models end a turn with a
            token that config.json does not list).

    Raises:
        ConversionError: the family is not supported, or the configuration asks for something that is not.
    """
    family = config.get("model_type")
    reader = FAMILIES.get(str(family))
    if reader is None:
        raise ConversionError(
            f'config.json: expected model_type to be one of {", ".join(FAMILIES)}, got "{family}"; '
            "other families cannot be converted"
        )
    tokens = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokens.update({key: value for key, value in (generation or {}).items() if key in tokens and value is not None})
    return reader(config, tokens)


def _read_gemma2(config: Settings, tokens: Settings) -> Decoder:
    if config.get("use_bidirectional_attention"):
        raise ConversionError("config.json: use_bidirectional_attention is set; only causal decoders can be converted")
    count = int(config.get("num_hidden_layers", 26))
    kinds = _layer_kinds(config, count, pattern=2)
    rotary = _rotary(_flat_rope(config))
    return _decoder(
        config,
        tokens,
        family="gemma2",
        defaults={
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        activation_key="hidden_activation",
        layers=_layers(kinds, int(config.get("sliding_window") or 4096), rotary, rotary),
        attention_scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        attention_softcap=_softcap(config, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(config, "final_logit_softcapping", 30.0),
        norm_offset=1.0,
        sandwich_norms=True,
        embedding_scale=math.sqrt(int(config.get("hidden_size", 2304))),
    )


def _read_gemma3_text(config: Settings, tokens: Settings) -> Decoder:
    if config.get("use_bidirectional_attention"):
        raise ConversionError("config.json: use_bidirectional_attention is set; only causal decoders can be converted")
    count = int(config.get("num_hidden_layers", 26))
    kinds = _layer_kinds(config, count, pattern=int(config.get("sliding_window_pattern") or 6))
    rope = config.get("rope_parameters") or {}
    full = {"rope_theta": config.get("rope_theta", 1e6), **(config.get("rope_scaling") or {})}
    full |= rope.get("full_attention") or {}
    local = {"rope_theta": config.get("rope_local_base_freq", 1e4), **(rope.get("sliding_attention") or {})}
    return _decoder(
        config,
        tokens,
        family="gemma3_text",
        defaults={
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        activation_key="hidden_activation",
        layers=_layers(kinds, int(config.get("sliding_window") or 4096), _rotary(full), _rotary(local)),
        attention_scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        attention_softcap=_softcap(config, "attn_logit_softcapping"),
        logit_softcap=_softcap(config, "final_logit_softcapping"),
        norm_offset=1.0,
        qk_norm=True,
        sandwich_norms=True,
        embedding_scale=math.sqrt(int(config.get("hidden_size", 2304))),
    )


def _read_gemma3(config: Settings, tokens: Settings) -> Decoder:
    """A checkpoint with a vision tower: its text decoder."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ConversionError("config.json: model_type gemma3 needs a text_config, and there is none")
    outer = {key: value for key, value in tokens.items() if value is not None}
    inner = {key: text[key] for key in tokens if text.get(key) is not None}
    return _read_gemma3_text(text, {**inner, **outer})


def _read_llama(config: Settings, tokens: Settings) -> Decoder:
    count = int(_required(config, "num_hidden_layers"))
    return _decoder(
        config,
        tokens,
        family="llama",
        defaults={"max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
        layers=(Layer(_rotary(_flat_rope(config))),) * count,
    )


def _read_qwen3(config: Settings, tokens: Settings) -> Decoder:
    count = int(_required(config, "num_hidden_layers"))
    if not config.get("use_sliding_window"):
        kinds = ["full_attention"] * count
    elif config.get("layer_types"):
        kinds = _layer_kinds(config, count, pattern=None)
    else:
        first = int(config.get("max_window_layers", 28))
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(count)]
    rotary = _rotary(_flat_rope(config))
    return _decoder(
        config,
        tokens,
        family="qwen3",
        defaults={"max_position_embeddings": 32768, "tie_word_embeddings": False, "head_dim": 128},
        layers=_layers(kinds, int(config.get("sliding_window") or 4096), rotary, rotary),
        qk_norm=True,
    )


FAMILIES: dict[str, Callable[[Settings, Settings], Decoder]] = {
    "gemma2": _read_gemma2,
    "gemma3_text": _read_gemma3_text,
    "gemma3": _read_gemma3,
    "llama": _read_llama,
    "qwen3": _read_qwen3,
}


def _decoder(
    config: Settings,
    tokens: Settings,
    *,
    family: str,
    defaults: Settings,
    layers: tuple[Layer, ...],
    activation_key: str = "hidden_act",
    attention_scale: float | None = None,
    **traits: Any,
) -> Decoder:
    """What all families write under the same names."""
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ConversionError(f"config.json: {key} is set; projections with a bias cannot be converted")
    settings = {**defaults, **{key: value for key, value in config.items() if value is not None}}
    given = {key: value for key, value in tokens.items() if value is not None}
    ids = {**{key: defaults[key] for key in tokens if key in defaults}, **given}
    heads = int(_required(settings, "num_attention_heads"))
    hidden_size = int(_required(settings, "hidden_size"))
    head_size = int(settings.get("head_dim") or hidden_size // heads)
    activation = str(settings.get(activation_key, "silu"))
    gating = {"gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "silu": "swiglu", "swish": "swiglu"}.get(activation)
    if gating is None:
        raise ConversionError(
            f'config.json: expected {activation_key} gelu_pytorch_tanh or silu, got "{activation}", which cannot be '
            "converted"
        )
    kv_heads = int(settings.get("num_key_value_heads") or heads)
    if heads % kv_heads or head_size % 2:
        raise ConversionError(
            f"config.json: expected num_attention_heads to be a multiple of num_key_value_heads, and an even head_dim; "
            f"got {heads}, {kv_heads} and {head_size}"
        )
    eos = ids.get("eos_token_id")
    return Decoder(
        family=family,
        hidden_size=hidden_size,
        feed_forward_size=int(_required(settings, "intermediate_size")),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary_size=int(_required(settings, "vocab_size")),
        context_length=int(settings["max_position_embeddings"]),
        layers=layers,
        gating=gating,  # type: ignore[arg-type]  # one of the dictionary's values above
        norm_epsilon=float(settings.get("rms_norm_eps", 1e-6)),
        attention_scale=head_size**-0.5 if attention_scale is None else attention_scale,
        tied_embeddings=bool(settings["tie_word_embeddings"]),
        bos_token_id=ids.get("bos_token_id"),
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),),
        pad_token_id=ids.get("pad_token_id"),
        **traits,
    )


def _softcap(config: Settings, key: str, default: float = 0.0) -> float:
    """A cap; null in the file is none, whatever a file without it means."""
    return float(config.get(key, default) or 0.0)


def _layer_kinds(config: Settings, count: int, pattern: int | None) -> list[str]:
    """Each layer's kind: as listed, or every `pattern`-th layer global and the others local."""
    kinds = config.get("layer_types")
    if kinds is None:
        if pattern is None:
            raise ConversionError("config.json: use_sliding_window is set, but there are no layer_types")
        return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)]
    if len(kinds) != count or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ConversionError(
            f"config.json: expected layer_types to say full_attention or sliding_attention for each of the {count} "
            f"layers, got {len(kinds)} entries: {', '.join(sorted(set(map(str, kinds))))}"
        )
    return list(kinds)


def _layers(kinds: list[str], window: int, full: Rotary, local: Rotary) -> tuple[Layer, ...]:
    return tuple(Layer(local, window) if kind == "sliding_attention" else Layer(full) for kind in kinds)


def _flat_rope(config: Settings) -> Settings:
    """The rotary settings of a family whose layers all have the same."""
    rope = {"rope_theta": config.get("rope_theta", 1e4), **(config.get("rope_scaling") or {})}
    return rope | (config.get("rope_parameters") or {})


def _rotary(settings: Settings) -> Rotary:
    theta = float(settings["rope_theta"])
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if float(settings.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConversionError("config.json: a partial_rotary_factor below 1 cannot be converted")
    if kind == "default":
        return Rotary(theta)
    if kind == "linear":
        return Rotary(theta, LinearScaling(float(_required(settings, "factor"))))
    if kind == "llama3":
        scaling = Llama3Scaling(
            float(_required(settings, "factor")),
            float(_required(settings, "low_freq_factor")),
            float(_required(settings, "high_freq_factor")),
            int(_required(settings, "original_max_position_embeddings")),
        )
        return Rotary(theta, scaling)
    raise ConversionError(
        f'config.json: expected rope_type default, linear or llama3, got "{kind}", which cannot be converted'
    )


def _required(settings: Settings, key: str) -> Any:
    value = settings.get(key)
    if value is None:
        raise ConversionError(f"config.json: {key} is missing; is it the model's own file?")
    return value

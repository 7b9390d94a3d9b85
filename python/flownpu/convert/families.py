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
from flownpu.convert.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["FAMILIES", "read_decoder"]

# More than any model has; a layer's settings are held for each.
_MOST_LAYERS = 4096


def read_decoder(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> Decoder:
    """The decoder that a checkpoint's configuration describes.

    Args:
        config: config.json.
        generation: generation_config.json, whose token ids go before config.json's (chat models end a turn with a
            token that config.json does not list).
        where: what errors call the configuration.

    Raises:
        ConversionError: the family is not supported, or the configuration asks for something that is not, or has
            something else in a setting's place.
    """
    settings, others = Settings(config, where), Settings(generation or {}, "generation_config.json")
    family = config.get("model_type")
    reader = FAMILIES.get(str(family))
    if reader is None:
        raise ConversionError(
            f'{where}: expected model_type to be one of {", ".join(FAMILIES)}, got "{family}"; '
            "other families cannot be converted"
        )
    return reader(settings, _Tokens([others, settings]))


class _Tokens:
    """The tokens that files name, those of the first file before those of the next."""

    def __init__(self, files: list[Settings]) -> None:
        self._files = files

    def then(self, file: Settings) -> _Tokens:
        return _Tokens([*self._files, file])

    def one(self, key: str) -> int | None:
        return next((file.token(key) for file in self._files if key in file), None)

    def several(self, key: str) -> tuple[int, ...]:
        return next((file.tokens(key) for file in self._files if key in file), ())


def _read_gemma2(config: Settings, tokens: _Tokens) -> Decoder:
    _refuse_bidirectional(config)
    count = config.integer("num_hidden_layers", 26, most=_MOST_LAYERS)
    kinds = _layer_kinds(config, count, pattern=2)
    rotary = _rotary(_flat_rope(config))
    return _decoder(
        config,
        tokens,
        family="gemma2",
        defaults=_GEMMA_DEFAULTS | {"vocab_size": 256000, "max_position_embeddings": 8192},
        activation_key="hidden_activation",
        layers=_layers(kinds, _window(config), rotary, rotary),
        attention_scale=config.number("query_pre_attn_scalar", 256, positive=True) ** -0.5,
        attention_softcap=_softcap(config, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(config, "final_logit_softcapping", 30.0),
        norm_offset=1.0,
        sandwich_norms=True,
        embedding_scale=math.sqrt(config.integer("hidden_size", _GEMMA_DEFAULTS["hidden_size"])),
    )


def _read_gemma3_text(config: Settings, tokens: _Tokens) -> Decoder:
    _refuse_bidirectional(config)
    count = config.integer("num_hidden_layers", 26, most=_MOST_LAYERS)
    kinds = _layer_kinds(config, count, pattern=config.integer("sliding_window_pattern", 6, least=0) or 6)
    rope = config.section("rope_parameters")
    full = config.section("rope_scaling").with_defaults({"rope_theta": config.number("rope_theta", 1e6)})
    full |= rope.section("full_attention")
    local = rope.section("sliding_attention")
    local = local.with_defaults({"rope_theta": config.number("rope_local_base_freq", 1e4)})
    return _decoder(
        config,
        tokens,
        family="gemma3_text",
        defaults=_GEMMA_DEFAULTS | {"vocab_size": 262208, "max_position_embeddings": 131072},
        activation_key="hidden_activation",
        layers=_layers(kinds, _window(config), _rotary(full), _rotary(local)),
        attention_scale=config.number("query_pre_attn_scalar", 256, positive=True) ** -0.5,
        attention_softcap=_softcap(config, "attn_logit_softcapping"),
        logit_softcap=_softcap(config, "final_logit_softcapping"),
        norm_offset=1.0,
        qk_norm=True,
        sandwich_norms=True,
        embedding_scale=math.sqrt(config.integer("hidden_size", _GEMMA_DEFAULTS["hidden_size"])),
    )


def _read_gemma3(config: Settings, tokens: _Tokens) -> Decoder:
    """A checkpoint with a vision tower: its text decoder."""
    if "text_config" not in config:
        raise ConversionError(f"{config.where}: model_type gemma3 needs a text_config, and there is none")
    text = config.section("text_config")
    return _read_gemma3_text(text, tokens.then(text))


def _read_llama(config: Settings, tokens: _Tokens) -> Decoder:
    count = config.integer("num_hidden_layers", most=_MOST_LAYERS)
    return _decoder(
        config,
        tokens,
        family="llama",
        defaults={"max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
        layers=(Layer(_rotary(_flat_rope(config))),) * count,
    )


def _read_qwen3(config: Settings, tokens: _Tokens) -> Decoder:
    count = config.integer("num_hidden_layers", most=_MOST_LAYERS)
    if not config.flag("use_sliding_window"):
        kinds = ["full_attention"] * count
    elif "layer_types" in config:
        kinds = _layer_kinds(config, count, pattern=None)
    else:
        first = config.integer("max_window_layers", 28, least=0)
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(count)]
    rotary = _rotary(_flat_rope(config))
    return _decoder(
        config,
        tokens,
        family="qwen3",
        defaults={"max_position_embeddings": 32768, "tie_word_embeddings": False, "head_dim": 128},
        layers=_layers(kinds, _window(config), rotary, rotary),
        qk_norm=True,
    )


FAMILIES: dict[str, Callable[[Settings, _Tokens], Decoder]] = {
    "gemma2": _read_gemma2,
    "gemma3_text": _read_gemma3_text,
    "gemma3": _read_gemma3,
    "llama": _read_llama,
    "qwen3": _read_qwen3,
}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}


def _decoder(
    config: Settings,
    tokens: _Tokens,
    *,
    family: str,
    defaults: Mapping[str, Any],
    layers: tuple[Layer, ...],
    activation_key: str = "hidden_act",
    attention_scale: float | None = None,
    **traits: Any,
) -> Decoder:
    """What all families write under the same names."""
    for key in ("attention_bias", "mlp_bias"):
        if config.flag(key):
            raise ConversionError(f"{config.where}: {key} is set; projections with a bias cannot be converted")
    settings = config.with_defaults(defaults)
    tokens = tokens.then(Settings(defaults, config.where))
    heads = settings.integer("num_attention_heads")
    hidden_size = settings.integer("hidden_size")
    head_size = settings.integer("head_dim", 0, least=0) or hidden_size // heads
    activation = settings.text(activation_key, "silu")
    gating = {"gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "silu": "swiglu", "swish": "swiglu"}.get(activation)
    if gating is None:
        raise ConversionError(
            f'{config.where}: expected {activation_key} gelu_pytorch_tanh or silu, got "{activation}", which cannot be '
            "converted"
        )
    kv_heads = settings.integer("num_key_value_heads", 0, least=0) or heads
    if heads % kv_heads or head_size % 2 or not head_size:
        raise ConversionError(
            f"{config.where}: expected num_attention_heads to be a multiple of num_key_value_heads, and an even "
            f"head_dim; got {heads}, {kv_heads} and {head_size}"
        )
    return Decoder(
        family=family,
        hidden_size=hidden_size,
        feed_forward_size=settings.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary_size=settings.integer("vocab_size"),
        context_length=settings.integer("max_position_embeddings"),
        layers=layers,
        gating=gating,  # type: ignore[arg-type]  # one of the dictionary's values above
        norm_epsilon=settings.number("rms_norm_eps", 1e-6),
        attention_scale=head_size**-0.5 if attention_scale is None else attention_scale,
        tied_embeddings=settings.flag("tie_word_embeddings"),
        bos_token_id=tokens.one("bos_token_id"),
        eos_token_ids=tokens.several("eos_token_id"),
        pad_token_id=tokens.one("pad_token_id"),
        **traits,
    )


def _refuse_bidirectional(config: Settings) -> None:
    if config.flag("use_bidirectional_attention"):
        raise ConversionError(
            f"{config.where}: use_bidirectional_attention is set; only causal decoders can be converted"
        )


def _window(config: Settings) -> int:
    return config.integer("sliding_window", 0, least=0) or 4096


def _softcap(config: Settings, key: str, default: float = 0.0) -> float:
    """A cap; null in the file is none, whatever a file without it means."""
    return 0.0 if config.is_null(key) else config.number(key, default)


def _layer_kinds(config: Settings, count: int, pattern: int | None) -> list[str]:
    """Each layer's kind: as listed, or every `pattern`-th layer global and the others local."""
    if "layer_types" not in config:
        if pattern is None:
            raise ConversionError(f"{config.where}: use_sliding_window is set, but there are no layer_types")
        return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)]
    kinds = config.texts("layer_types")
    if len(kinds) != count or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ConversionError(
            f"{config.where}: expected layer_types to say full_attention or sliding_attention for each of the {count} "
            f"layers, got {len(kinds)} entries: {', '.join(sorted(set(kinds)))}"
        )
    return kinds


def _layers(kinds: list[str], window: int, full: Rotary, local: Rotary) -> tuple[Layer, ...]:
    return tuple(Layer(local, window) if kind == "sliding_attention" else Layer(full) for kind in kinds)


def _flat_rope(config: Settings) -> Settings:
    """The rotary settings of a family whose layers all have the same."""
    rope = config.section("rope_scaling").with_defaults({"rope_theta": config.number("rope_theta", 1e4)})
    return rope | config.section("rope_parameters")


def _rotary(settings: Settings) -> Rotary:
    theta = settings.number("rope_theta", positive=True)
    kind = settings.text("rope_type", settings.text("type", "default")) or "default"
    if settings.number("partial_rotary_factor", 1.0) != 1.0:
        raise ConversionError(f"{settings.where}: a partial_rotary_factor below 1 cannot be converted")
    if kind == "default":
        return Rotary(theta)
    if kind == "linear":
        return Rotary(theta, LinearScaling(settings.number("factor", positive=True)))
    if kind == "llama3":
        low, high = (settings.number(f"{name}_freq_factor") for name in ("low", "high"))
        if low >= high:
            raise ConversionError(
                f"{settings.where}: expected a low_freq_factor below the high_freq_factor, got {low} and {high}"
            )
        context = settings.integer("original_max_position_embeddings")
        return Rotary(theta, Llama3Scaling(settings.number("factor", positive=True), low, high, context))
    raise ConversionError(
        f'{settings.where}: expected rope_type default, linear or llama3, got "{kind}", which cannot be converted'
    )

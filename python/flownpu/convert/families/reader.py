# SPDX-License-Identifier: Apache-2.0
"""Reads a family's configuration into a `Decoder`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.convert.decoder import Decoder, Layer, Rotary
from flownpu.convert.errors import ConversionError
from flownpu.convert.families.family import Power
from flownpu.convert.families.layer_forms import with_forms
from flownpu.convert.families.rope import read_rotaries
from flownpu.convert.layer_parts import Convolution, DeltaRule, Drafting, Mixture, Swiglu

if TYPE_CHECKING:
    from flownpu.convert.families.family import Experts, Family
    from flownpu.convert.layer_parts import Mixer
    from flownpu.convert.settings import Settings

# Most layers that a configuration may ask for, since a `Layer` is made for each: more than any model has.
_MOST_LAYERS = 4096
_GATINGS = {"gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "silu": "swiglu", "swish": "swiglu"}
_FULL, _LOCAL = "full_attention", "sliding_attention"
_CONVOLUTION, _LINEAR = "conv", "linear_attention"


class Tokens:
    """Token ids by name from several files, of which the earlier ones have precedence."""

    def __init__(self, files: list[Settings]) -> None:
        """Takes the files' settings."""
        self._files = files

    def then(self, file: Settings) -> Tokens:
        """These files, followed by another."""
        return Tokens([*self._files, file])

    def one(self, key: str) -> int | None:
        """A token's id from the first file that has it; None if no file has it."""
        return next((file.token(key) for file in self._files if key in file), None)

    def several(self, key: str) -> tuple[int, ...]:
        """Token ids from the first file that has the setting; () if no file has it."""
        return next((file.tokens(key) for file in self._files if key in file), ())


def read_family(family: Family, settings: Settings, tokens: Tokens, *, embeds: bool = False) -> Decoder:
    """The decoder that a configuration of that family describes.

    Args:
        family: the family.
        settings: the configuration.
        tokens: where token ids are looked for.
        embeds: whether the model embeds texts: only then may it be bidirectional.

    Raises:
        ConversionError: it asks for something that cannot be converted, or a setting has a value of another type.
    """
    whole = settings
    if family.inner is not None:
        if family.inner not in settings:
            raise ConversionError(
                f"{settings.where}: model_type {family.model_type} needs a {family.inner}, and there is none"
            )
        settings = settings.section(family.inner)
        tokens = tokens.then(settings)
    # A text says which tokens: "vision" those of pictures, which are no part of a text.
    words = settings.value("use_bidirectional_attention") if "use_bidirectional_attention" in settings else False
    bidirectional = words == "all" if isinstance(words, str) else settings.flag("use_bidirectional_attention")
    if bidirectional and not embeds:
        raise ConversionError(
            f"{settings.where}: use_bidirectional_attention is set; only causal decoders can be converted"
        )
    _check_neutral(family, settings)
    # A null soft cap or window in the file means none; the family's default is for files without the setting.
    none = {
        key for key in (family.attention_softcap, family.logit_softcap, "sliding_window") if settings.is_null(str(key))
    }
    config = settings.with_defaults({key: value for key, value in family.defaults.items() if key not in none})
    tokens = tokens.then(config)
    heads, kv_heads, head_size = _head_sizes(config)
    config = config.with_defaults({"head_dim": head_size})
    context = config.integer("max_position_embeddings")
    full, local, context = read_rotaries(family, config, head_size, context)
    residual = _factor(config, family.residual_scale)
    return Decoder(
        family=family.genai_type,
        hidden_size=config.integer("hidden_size"),
        feed_forward_size=_feed_forward_size(family, config),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary_size=config.integer("vocab_size"),
        context_length=context,
        layers=with_forms(family, config, _layers(family, config, full, local, bidirectional=bidirectional), full),
        bidirectional=bidirectional,
        gating=_gating(family, config),  # type: ignore[arg-type]  # one of _GATINGS' values
        # A residual scale m needs no node. With s = r / m, the stream r + m f(norm(r)) is m (s + f(norm(m s))), and the
        # RMS norm of m s is that of s with epsilon / m^2. The graph computes s: embeddings are divided by m.
        norm_epsilon=config.number(family.norm_epsilon, 1e-6) / residual**2,
        embedding_scale=_factor(config, family.embedding_scale) / residual,
        attention_scale=_factor(config, family.attention_scale),
        logit_scale=_factor(config, family.logit_scale),
        attention_softcap=config.number(family.attention_softcap, 0.0) if family.attention_softcap else 0.0,
        logit_softcap=config.number(family.logit_softcap, 0.0) if family.logit_softcap else 0.0,
        norm_offset=family.norm_offset,
        norms_before=family.norms != "after",
        sandwich_norms=family.norms != "before",
        qk_norm=family.qk_norm == "heads",
        value_norm=family.value_norm,
        per_layer_size=config.integer(family.per_layer_size, least=0) if family.per_layer_size else 0,
        layer_scalars=family.layer_scalars,
        projection_norms=family.qk_norm == "all",
        qkv_bias=_has(config, family.biases.qkv),
        output_gate=family.output_gate,
        head_sinks=family.head_sinks,
        output_bias=_has(config, family.biases.output),
        feed_forward_bias=_has(config, family.biases.feed_forward),
        fused_projections=family.fused,
        tensor_names=family.tensors,
        mixture=_mixture(family, config),
        drafting=_drafting(family, whole),
        tied_embeddings=config.flag("tie_word_embeddings"),
        bos_token_id=tokens.one("bos_token_id"),
        eos_token_ids=tokens.several("eos_token_id"),
        pad_token_id=tokens.one("pad_token_id"),
    )


def _drafting(family: Family, settings: Settings) -> Drafting | None:
    if family.drafts_for is None:
        return None
    size = settings.integer(family.drafts_for)
    if not settings.flag("use_ordered_embeddings"):
        return Drafting(size)
    clusters = settings.integer("num_centroids")
    return Drafting(size, clusters, settings.integer("centroid_intermediate_top_k", most=clusters))


def _check_neutral(family: Family, settings: Settings) -> None:
    """Raises ConversionError if an unsupported setting would change the model."""
    for key, neutral in family.neutral.items():
        if key in settings and (value := settings.value(key)) != neutral:
            raise ConversionError(
                f"{settings.where}: {key} is {value!r}, and only models that have {neutral!r} there can be converted"
            )


def _feed_forward_size(family: Family, config: Settings) -> int:
    experts = _experts(family, config)
    size = config.integer("intermediate_size" if experts is None else experts.size)
    if not family.adjusted_size or not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size, step = 2 * size // 3, config.integer("block_multiple_of")
    return -(-int(config.number("block_ffn_dim_multiplier", positive=True) * size) // step) * step


def _experts(family: Family, config: Settings) -> Experts | None:
    experts = family.experts
    return None if experts is not None and experts.beside and not config.flag(experts.beside) else experts


def _mixture(family: Family, config: Settings) -> Mixture | None:
    if (experts := _experts(family, config)) is None:
        return None
    count = config.integer(next((key for key in experts.count if key in config), experts.count[0]))
    per_token = config.integer(experts.chosen)
    if per_token > count:
        raise ConversionError(
            f"{config.where}: expected {experts.chosen} to be at most the number of experts, {count}, got {per_token}"
        )
    return Mixture(
        count,
        per_token,
        _has(config, experts.normalize),
        experts.tensors,
        biased=experts.biased,
        has_biases=experts.has_biases,
        beside=experts.beside is not None,
        swiglu=_swiglu(experts.swiglu, config),
        shared_size=config.integer(experts.shared) if experts.shared else 0,
        dense_layers=config.integer(experts.dense_layers, least=0) if experts.dense_layers else 0,
        dense_size=config.integer("intermediate_size") if experts.dense_layers or experts.beside else 0,
    )


def _swiglu(constants: tuple[str, float, str] | None, config: Settings) -> Swiglu | None:
    if constants is None:
        return None
    alpha, beta, limit = constants
    return Swiglu(config.number(alpha, positive=True), beta, config.number(limit, positive=True))


def _head_sizes(config: Settings) -> tuple[int, int, int]:
    """The numbers of heads H and of key and value heads G, and the head size d."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", 0, least=0) or heads
    head_size = config.integer("head_dim", 0, least=0) or config.integer("hidden_size") // heads
    if heads % kv_heads or head_size % 2 or not head_size:
        raise ConversionError(
            f"{config.where}: expected num_attention_heads to be a multiple of num_key_value_heads, and an even "
            f"head_dim; got {heads}, {kv_heads} and {head_size}"
        )
    return heads, kv_heads, head_size


def _gating(family: Family, config: Settings) -> str:
    activation = config.text(family.activation, "silu")
    gating = _GATINGS.get(family.activations.get(activation, activation))
    if gating is None:
        raise ConversionError(
            f'{config.where}: expected {family.activation} gelu_pytorch_tanh or silu, got "{activation}", which '
            "cannot be converted"
        )
    return gating


def _factor(config: Settings, factor: Power | None) -> float:
    return 1.0 if factor is None else float(config.number(factor.key, positive=True) ** factor.exponent)


def _has(config: Settings, bias: bool | str) -> bool:
    return config.flag(bias) if isinstance(bias, str) else bias


def _layers(family: Family, config: Settings, full: Rotary, local: Rotary, *, bidirectional: bool) -> tuple[Layer, ...]:
    count = config.integer("num_hidden_layers", most=_MOST_LAYERS)
    kinds = _kinds(family, config, count)
    has_window = _LOCAL in kinds
    window = config.integer("sliding_window") if has_window else 0
    if bidirectional:  # half of the window on each side, and the token itself
        window = window // 2 + 1
    # A window that is as long as the context hides nothing.
    seen = window if has_window and window < config.integer("max_position_embeddings") else None
    mixers = _mixers(family, config)
    layers = [Layer(local, seen) if kind == _LOCAL else Layer(full, mixer=mixers.get(kind)) for kind in kinds]
    for index in _without_rope(family, config, count):
        layers[index] = Layer(Rotary(layers[index].rotary.theta, rotated=0.0), layers[index].window)
    return tuple(layers)


def _mixers(family: Family, config: Settings) -> dict[str, Mixer]:
    """Mixers in the place of attention, by kind of layer."""
    mixers: dict[str, Mixer] = {}
    if family.convolution:
        mixers[_CONVOLUTION] = Convolution(config.integer(family.convolution, least=2))
    if family.delta_rule is not None:
        rule = DeltaRule(
            config.integer("linear_conv_kernel_dim"),
            config.integer("linear_num_key_heads"),
            config.integer("linear_num_value_heads"),
            config.integer("linear_key_head_dim"),
            config.integer("linear_value_head_dim"),
            family.delta_rule,
        )
        if rule.value_heads % rule.key_heads:
            raise ConversionError(
                f"{config.where}: expected linear_num_value_heads to be a multiple of linear_num_key_heads, got "
                f"{rule.value_heads} and {rule.key_heads}"
            )
        mixers[_LINEAR] = rule
    return mixers


def _kinds(family: Family, config: Settings, count: int) -> list[str]:
    """The kind of each layer: _LOCAL with a window, _FULL without."""
    window = "sliding_window" in config and config.integer("sliding_window", least=0) > 0
    is_off = family.windows == "behind" and not (window and config.flag("use_sliding_window"))
    if family.windows == "none" or is_off:
        return [_FULL] * count
    if family.windows == "all":
        return [_LOCAL if window else _FULL] * count
    if "layer_types" in config:
        return _listed(family, config, count)
    if family.windows == "behind":
        first = config.integer("max_window_layers", least=0)
        return [_FULL if i < first else _LOCAL for i in range(count)]
    period = family.period
    if isinstance(period, Power):
        period = config.integer(period.key, least=0)
    if period:
        other = _LOCAL if family.delta_rule is None else _LINEAR
        return [_FULL if (i + 1) % period == 0 else other for i in range(count)]
    if config.flag("use_sliding_window"):
        raise ConversionError(f"{config.where}: use_sliding_window is set, but there are no layer_types")
    return [_LOCAL if window else _FULL] * count


def _listed(family: Family, config: Settings, count: int) -> list[str]:
    kinds = config.texts("layer_types")
    other = _CONVOLUTION if family.convolution else _LOCAL if family.delta_rule is None else _LINEAR
    if len(kinds) != count or not set(kinds) <= {_FULL, other}:
        raise ConversionError(
            f"{config.where}: expected layer_types to say {_FULL} or {other} for each of the {count} layers, got "
            f"{len(kinds)} entries: {', '.join(sorted(set(kinds)))}"
        )
    return kinds


def _without_rope(family: Family, config: Settings, count: int) -> list[int]:
    """The indices of layers without RoPE."""
    if family.rope_layers is None or family.rope_period is None:
        return []
    if family.rope_layers in config:
        has = config.numbers(family.rope_layers)
        if len(has) < count:
            raise ConversionError(
                f"{config.where}: expected {family.rope_layers} to say of each of the {count} layers whether it has "
                f"RoPE, got {len(has)}"
            )
        return [i for i in range(count) if not has[i]]
    period = config.integer(family.rope_period)
    return [i for i in range(count) if (i + 1) % period == 0]

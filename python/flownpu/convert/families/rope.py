# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of RoPE, as transformers 4 and 5 write them.

transformers 4 wrote `rope_theta`, `rope_scaling`, `rope_local_base_freq` and `partial_rotary_factor` as settings of the
model; transformers 5 writes a section `rope_parameters`, with a section for each kind of layer if there are two.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flownpu.convert.decoder import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    Rotary,
    YarnScaling,
)
from flownpu.convert.errors import ConversionError

if TYPE_CHECKING:
    from flownpu.convert.families.family import Family
    from flownpu.convert.settings import Settings

# The setting by which Ministral 3 scales queries at positions beyond the original context. The graph cannot do that, so
# such a model is converted for the original context only.
_QUERY_SCALE = "llama_4_scaling_beta"


def read_rotaries(family: Family, config: Settings, head_size: int, context: int) -> tuple[Rotary, Rotary, int]:
    """The RoPE of layers that see all tokens, the RoPE of layers with a window, and how many positions they allow.

    Args:
        family: the model's family.
        config: the configuration, with the family's defaults.
        head_size: d.
        context: how many positions the configuration says.

    Raises:
        ConversionError: the kind of scaling is not known, or a setting is missing or out of its range.
    """
    top = {
        "rope_theta": config.number("rope_theta", family.rope_defaults.get("rope_theta", 1e4)),
        "partial_rotary_factor": config.number("partial_rotary_factor", 1.0),
        "original_max_position_embeddings": config.integer("original_max_position_embeddings", context),
        "max_position_embeddings": context,
    }
    section, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    if not family.rope_by_kind:
        silent = "rope_parameters" not in config and "rope_scaling" not in config
        others = family.rope_defaults if silent else {}
        settings = (scaling | section).with_defaults({**top, **others, "rope_theta": top["rope_theta"]})
        rotary = _rotary(settings, head_size)
        if settings.number(_QUERY_SCALE, 0.0):
            context = min(context, settings.integer("original_max_position_embeddings"))
        return rotary, rotary, context
    full = (scaling | section.section("full_attention")).with_defaults(top)
    local = section.section("sliding_attention").with_defaults(
        {**top, "rope_theta": config.number("rope_local_base_freq")}
    )
    return _rotary(full, head_size), _rotary(local, head_size), context


def _rotary(settings: Settings, head_size: int) -> Rotary:
    theta = settings.number("rope_theta", positive=True)
    kind = settings.text("rope_type", settings.text("type", "default")) or "default"
    rotated = settings.number("partial_rotary_factor", positive=True)
    if rotated > 1 or int(head_size * rotated) % 2:
        raise ConversionError(
            f"{settings.where}: expected a partial_rotary_factor of at most 1, of which {head_size} dimensions make an "
            f"even number, got {rotated}"
        )
    match kind:
        case "default" | "dynamic":
            # Dynamic frequencies change only beyond max_position_embeddings, the most positions that a model is
            # converted for.
            return Rotary(theta, None, rotated)
        case "proportional":
            return Rotary(theta, ProportionalScaling(rotated, settings.number("factor", 1.0, positive=True)))
        case "linear":
            return Rotary(theta, LinearScaling(settings.number("factor", positive=True)), rotated)
        case "llama3":
            return Rotary(theta, _llama3(settings), rotated)
        case "yarn":
            return Rotary(theta, _yarn(settings), rotated)
        case "longrope" | "su":
            context, short, long = _long(settings, int(head_size * rotated) // 2)
            return Rotary(theta, short, rotated, beyond=(context, long))
    raise ConversionError(
        f"{settings.where}: expected rope_type default, linear, dynamic, llama3, yarn, longrope or proportional, got "
        f'"{kind}", which cannot be converted'
    )


def _llama3(settings: Settings) -> Llama3Scaling:
    low, high = (settings.number(f"{name}_freq_factor") for name in ("low", "high"))
    if low >= high:
        raise ConversionError(
            f"{settings.where}: expected a low_freq_factor below the high_freq_factor, got {low} and {high}"
        )
    context = settings.integer("original_max_position_embeddings")
    return Llama3Scaling(settings.number("factor", positive=True), low, high, context)


def _yarn(settings: Settings) -> YarnScaling:
    context = settings.integer("original_max_position_embeddings")
    factor = settings.number("factor", settings.integer("max_position_embeddings") / context, positive=True)
    fast, slow = settings.number("beta_fast", 32.0, positive=True), settings.number("beta_slow", 1.0, positive=True)
    scale, scale_all = settings.number("mscale", 0.0), settings.number("mscale_all_dim", 0.0)
    magnitude = _magnitude(factor)
    if scale and scale_all:
        magnitude = _magnitude(factor, scale) / _magnitude(factor, scale_all)
    magnitude = settings.number("attention_factor", magnitude)
    return YarnScaling(factor, context, magnitude, fast, slow, settings.flag("truncate", True))


def _magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's softmax temperature, as a factor of both queries and keys."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _long(settings: Settings, pairs: int) -> tuple[int, FrequencyFactors, FrequencyFactors]:
    """LongRoPE: the original context's length, and the factors of frequencies within it and beyond it."""
    context = settings.integer("original_max_position_embeddings")
    factor = settings.number("factor", settings.integer("max_position_embeddings") / context, positive=True)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
    magnitude = settings.number("attention_factor", magnitude)
    factors = []
    for key in ("short_factor", "long_factor"):
        values = settings.numbers(key)
        if len(values) != pairs or min(values) <= 0:
            raise ConversionError(
                f"{settings.where}: expected {key} to be {pairs} positive numbers, got {len(values)}, the smallest "
                f"{min(values, default=0.0)}"
            )
        factors.append(FrequencyFactors(tuple(values), magnitude))
    short, long = factors
    return context, short, long

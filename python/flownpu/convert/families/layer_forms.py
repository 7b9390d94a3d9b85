# SPDX-License-Identifier: Apache-2.0
"""Reads how layers of one decoder differ in more than window and RoPE, as those of Gemma 4.

global_head_dim, num_global_key_value_heads   of layers that see all tokens, in files as they are released
per_layer_config                              in their place, {layer: {head_dim, num_key_value_heads}}, as
                                              transformers 5 writes them
num_kv_shared_layers                          how many of the last layers share keys and values: each those of the
                                              last layer before them that has its own, and the same window
use_double_wide_mlp                           whether these have a feed-forward of twice the size
attention_k_eq_v                              whether values are the keys in layers that see all tokens
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flownpu.convert.errors import ConversionError

if TYPE_CHECKING:
    from flownpu.convert.decoder import Layer, Rotary
    from flownpu.convert.families.family import Family
    from flownpu.convert.settings import Settings


def with_forms(family: Family, config: Settings, layers: tuple[Layer, ...], full: Rotary) -> tuple[Layer, ...]:
    """The layers with the sizes that are their own, and what they share; `full` is the RoPE of those that see all.

    Raises:
        ConversionError: a layer shares keys and values, and none before it has such.
    """
    if not family.sizes_by_kind:
        return layers
    shared = config.integer("num_kv_shared_layers", 0, least=0, most=len(layers))
    if family.drafts_for and shared not in (0, len(layers)):
        raise ConversionError(
            f"{config.where}: expected a drafter all of whose {len(layers)} layers share keys and values, got {shared}"
        )
    shared = len(layers) if family.drafts_for else shared
    first = len(layers) - shared
    are_equal = config.flag("attention_k_eq_v")
    made: list[Layer] = []
    for index, layer in enumerate(layers):
        sees_all = layer.rotary == full
        sized = _sized(layer, config, index, sees_all=sees_all, has_count=are_equal)
        if index < first:
            made.append(replace(sized, keys_are_values=are_equal and sees_all))
            continue
        if family.drafts_for:
            made.append(replace(sized, shared=int(sees_all)))
            continue
        source = next((i for i in range(first - 1, -1, -1) if layers[i].rotary == layer.rotary), None)
        if source is None:
            raise ConversionError(
                f"{config.where}: expected layer {index} to share the keys and values of an earlier layer of its kind, "
                f"and none of the first {first} is of that kind"
            )
        wide = 2 * config.integer("intermediate_size") if config.flag("use_double_wide_mlp") else 0
        made.append(replace(sized, shared=source, feed_forward_size=wide))
    return tuple(made)


def _sized(layer: Layer, config: Settings, index: int, *, sees_all: bool, has_count: bool) -> Layer:
    """The layer with its own size and number of heads, 0 for those of the decoder."""
    if "per_layer_config" in config:
        layers = config.section("per_layer_config")
        width = len(str(config.integer("num_hidden_layers") - 1))  # transformers may pad the numbers with zeros
        own = layers.section(str(index)) | layers.section(f"{index:0{width}}")
        kv_heads = own.integer("num_key_value_heads", 0, least=0)
        return replace(layer, head_size=own.integer("head_dim", 0, least=0), kv_heads=kv_heads)
    if not sees_all:
        return layer
    count = config.integer("num_global_key_value_heads", 0, least=0) if has_count else 0
    return replace(layer, head_size=config.integer("global_head_dim"), kv_heads=count)

# SPDX-License-Identifier: Apache-2.0
"""The model families that are converted from their weights, with a file for each, and the reader of configurations.

A `Family` says how a family differs from Llama. `read_decoder` turns a configuration into a family-free `Decoder`.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from flownpu.convert.errors import ConversionError
from flownpu.convert.families.reader import Tokens, read_family
from flownpu.convert.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.convert.decoder import Decoder
    from flownpu.convert.families.family import Family

__all__ = ["FAMILIES", "OTHER_WAYS", "read_decoder"]

OTHER_WAYS = (
    "a model of another family can be exported by ORT GenAI's builder or by optimum, and the export's folder converted"
)

# Families that are left out because of their layers.
_LEFT_OUT = {
    "multi-head latent attention (MLA)": ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "minicpm3"),
    "Mamba-2 layers": ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"),
}
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in iter_modules(__path__)
    for family in getattr(import_module(f"{__name__}.{module.name}"), "FAMILIES", ())
}
"""Families by the value of model_type in config.json."""


def read_decoder(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    where: str = "config.json",
    *,
    embeds: bool = False,
) -> Decoder:
    """The decoder that a checkpoint's configuration describes.

    Args:
        config: the contents of config.json.
        generation: the contents of generation_config.json, whose token ids have precedence (chat models end a turn with
            a token that config.json does not list).
        where: what errors call the configuration.
        embeds: whether it is a model that embeds texts, whose tokens may see one another in both directions.

    Raises:
        ConversionError: the family is not supported, or the configuration asks for something that is not, or a setting
            has a value of another type.
    """
    settings, others = Settings(config, where), Settings(generation or {}, "generation_config.json")
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        name = str(config.get("model_type"))
        reason = next((f", whose {what} cannot be converted" for what, names in _LEFT_OUT.items() if name in names), "")
        raise ConversionError(
            f'{where}: expected model_type to be one of {", ".join(FAMILIES)}, got "{name}"{reason}; {OTHER_WAYS}'
        )
    return read_family(family, settings, Tokens([others, settings]), embeds=embeds)

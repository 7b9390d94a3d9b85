# SPDX-License-Identifier: Apache-2.0
"""The model families that are converted from their weights: one description a file, and what reads them.

A family is a `Family`: what it differs in from Llama. `read_decoder` makes a family-free `Decoder` of a configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.convert.errors import ConversionError
from flownpu.convert.families import (
    gemma,
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
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

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for module in (gemma, gemma2, gemma3, granite, llama, mistral, mixtral, olmo2, olmoe, phi3, qwen2, qwen3, smollm3)
    for family in module.FAMILIES
}
"""By config.json's model_type."""


def read_decoder(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    where: str = "config.json",
    *,
    embeds: bool = False,
) -> Decoder:
    """The decoder that a checkpoint's configuration describes.

    Args:
        config: config.json.
        generation: generation_config.json, whose token ids go before config.json's (chat models end a turn with a
            token that config.json does not list).
        where: what errors call the configuration.
        embeds: it is a model that embeds texts, whose tokens may see one another in both directions.

    Raises:
        ConversionError: the family is not supported, or the configuration asks for something that is not, or has
            something else in a setting's place.
    """
    settings, others = Settings(config, where), Settings(generation or {}, "generation_config.json")
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ConversionError(
            f'{where}: expected model_type to be one of {", ".join(FAMILIES)}, got "{config.get("model_type")}"; '
            f"{OTHER_WAYS}"
        )
    return read_family(family, settings, Tokens([others, settings]), embeds=embeds)

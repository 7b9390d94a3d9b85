# SPDX-License-Identifier: Apache-2.0
"""Reads the vision part of a Hugging Face configuration (config.json) into a `VisionTower`."""

from collections.abc import Mapping
from typing import Any

from flownpu.convert.errors import ConversionError
from flownpu.convert.settings import Settings
from flownpu.convert.vision.tower import VisionTower

# How many image tokens ORT GenAI's processor of this family writes for each picture, whatever the configuration says
# (gemma_image_processor.cpp of 0.18).
_TOKENS_PER_IMAGE = 256
# Most layers that a configuration may ask for, since the plan of weights lists each layer: more than any tower has.
_MOST_LAYERS = 4096

# The defaults of SiglipVisionConfig in transformers.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def has_vision(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's configuration describes a model with pictures, of a family that can be converted."""
    return config.get("model_type") == "gemma3" and bool(config.get("vision_config"))


def image_token_id(config: Mapping[str, Any]) -> int:
    """The token that stands for one feature of a picture.

    Raises:
        ConversionError: the token is outside of the vocabulary.
    """
    settings = Settings(config, "config.json")
    older = settings.integer("image_token_index", 262144, least=0)
    token = settings.integer("image_token_id", older, least=0)
    vocabulary = settings.section("text_config").integer("vocab_size", 262208)
    if token >= vocabulary:
        raise ConversionError(
            f"config.json: expected image_token_id below the vocabulary's size {vocabulary}, got {token}; the words' "
            "table has no row for it"
        )
    return token


def read_vision(config: Mapping[str, Any], output_size: int) -> VisionTower:
    """The vision tower that a checkpoint's configuration describes.

    Args:
        config: the contents of config.json.
        output_size: the decoder's hidden size.

    Raises:
        ConversionError: it describes a tower that cannot be converted, or its sizes do not fit together.
    """
    settings = Settings(config, "config.json")
    vision = settings.section("vision_config").with_defaults(_DEFAULTS)
    if (activation := vision.text("hidden_act")) != "gelu_pytorch_tanh":
        raise ConversionError(
            f'{vision.where}: expected hidden_act gelu_pytorch_tanh, got "{activation}", which cannot be converted'
        )
    tower = VisionTower(
        image_size=vision.integer("image_size"),
        patch_size=vision.integer("patch_size"),
        channels=vision.integer("num_channels"),
        hidden_size=vision.integer("hidden_size"),
        feed_forward_size=vision.integer("intermediate_size"),
        heads=vision.integer("num_attention_heads"),
        layers=vision.integer("num_hidden_layers", most=_MOST_LAYERS),
        norm_epsilon=vision.number("layer_norm_eps"),
        tokens_per_image=settings.integer("mm_tokens_per_image", _TOKENS_PER_IMAGE),
        output_size=output_size,
        pooled_norm_offset=1.0,
    )
    _check(tower)
    return tower


def _check(tower: VisionTower) -> None:
    if tower.tokens_per_image != _TOKENS_PER_IMAGE:
        raise ConversionError(
            f"config.json: expected mm_tokens_per_image {_TOKENS_PER_IMAGE}, got {tower.tokens_per_image}; ORT GenAI "
            f"writes {_TOKENS_PER_IMAGE} tokens for a picture. --vision-weights none converts the text decoder alone"
        )
    across = tower.patches_per_side
    if tower.channels != 3 or tower.hidden_size % tower.heads or not across or across % tower.pooled_per_side:
        raise ConversionError(
            "config.json: expected 3 channels, a hidden_size that is a multiple of num_attention_heads, and patches in "
            f"a row that are a multiple of {tower.pooled_per_side}; got {tower.channels}, {tower.hidden_size} and "
            f"{tower.heads}, {across}"
        )

# SPDX-License-Identifier: Apache-2.0
"""The models that the NPU's designs are built for, and the decoder of any configuration on the array."""

from collections.abc import Mapping
from typing import Any

from flownpu._native import EncoderShape, unsupported_by_array
from flownpu.aie.programs.decoder_shape import DecoderShape
from flownpu.convert.families import read_decoder
from flownpu.convert.weight_bits import FOUR_BITS, WeightBits
from flownpu.model.shapes import SHAPES


def decoder_of_configuration(
    config: Mapping[str, Any],
    where: str,
    image_tokens: int = 0,
    *,
    int8_cache: bool = False,
    bits: WeightBits = FOUR_BITS,
) -> DecoderShape:
    """The decoder that conversion makes of a checkpoint's configuration.

    Args:
        config: the contents of config.json.
        where: what errors call it.
        image_tokens: tokens of an image; 0: the model takes none.
        int8_cache: whether keys and values are kept in int8.
        bits: of the weights.

    Raises:
        ConversionError: the family is not supported.
        ValueError: the NPU's designs have no place for it.
    """
    found = read_decoder(config, where=where)
    description = found.description(images=image_tokens > 0, int8_cache=int8_cache, bits=bits)
    if reason := unsupported_by_array(description):
        raise ValueError(reason)
    return DecoderShape(description, found.context_length, image_tokens)


# Gemma3-4B's image encoder, SigLIP so400m: 896 x 896 pixels in patches of 14 x 14; 256 tokens.
_SIGLIP = EncoderShape(
    channels=3,
    patch=14,
    grid=64,
    hidden=1152,
    heads=16,
    head_size=72,
    feed_forward=4304,
    layers=27,
    pooling=4,
    features=2560,
    epsilon=1e-6,
    pooled_epsilon=1e-6,
    scale=72**-0.5,
)
ENCODERS: dict[str, EncoderShape] = {"siglip": _SIGLIP}
# Models with experts have no designs of their own: their layers are decode layers of other sizes. So have layers with
# states, but for what their mixers are on the host. Layers of several forms have none.
_WITHOUT_DESIGNS = {
    "num_experts", "num_local_experts", "linear_num_key_heads", "conv_L_cache", "hidden_size_per_layer_input"
}  # fmt: skip
MODELS: dict[str, DecoderShape | EncoderShape] = {
    **{
        name: decoder_of_configuration(shape, name)
        for name, shape in SHAPES.items()
        if not _WITHOUT_DESIGNS & shape.keys()
    },
    **ENCODERS,
}

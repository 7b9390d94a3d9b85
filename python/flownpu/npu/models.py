# SPDX-License-Identifier: Apache-2.0
"""The sizes of the models that the NPU's designs are built for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flownpu.aie.designs.decode_layer.shape import LayerShape
from flownpu.aie.programs.encoder_shape import EncoderShape
from flownpu.model.shapes import SHAPES

__all__ = ["ENCODERS", "MODELS", "Decoder", "projections"]


@dataclass(frozen=True)
class Decoder:
    """The sizes that determine a decoder's calls: a layer's, the window that some layers have, and the vocabulary's."""

    shape: LayerShape
    window: int | None
    vocabulary: int


def projections(model: Decoder | EncoderShape) -> list[tuple[int, int, str]]:
    """(M, K, epilogue) of a layer's products: packed query, key and value; output; gate and up; down."""
    if isinstance(model, EncoderShape):
        return [(part.columns, part.inner, "gelu" if part.gelu else "none") for part in model.projections]
    shape = model.shape
    return [(part.rows, part.columns, shape.activation if part.gated else "none") for part in shape.projections]


def _decoder(shape: dict[str, Any]) -> Decoder:
    """The sizes of a decoder, from an entry of `flownpu.model.shapes.SHAPES`."""
    is_gemma = shape["model_type"] == "gemma3_text"
    layer = LayerShape(
        shape["hidden_size"],
        shape["num_attention_heads"],
        shape["num_key_value_heads"],
        shape["head_dim"],
        shape["intermediate_size"],
        "geglu" if is_gemma else "swiglu",
        post_norms=is_gemma,
        qk_norm=shape["model_type"] != "llama",
    )
    return Decoder(layer, shape.get("sliding_window"), shape["vocab_size"])


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
# The designs have no place for experts.
MODELS: dict[str, Decoder | EncoderShape] = {
    **{name: _decoder(shape) for name, shape in SHAPES.items() if "num_experts" not in shape},
    **ENCODERS,
}

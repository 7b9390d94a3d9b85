# SPDX-License-Identifier: Apache-2.0
"""The sizes of the models that the NPU's designs are built for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flownpu.aie.programs.encoder_shape import EncoderShape
from flownpu.model.shapes import SHAPES

__all__ = ["MODELS", "Model"]


@dataclass(frozen=True)
class Model:
    """The sizes that decide a model's calls: hidden D, feed-forward I, heads H of KV heads G, head size d, window W."""

    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    activation: str
    """geglu or swiglu of a decoder; gelu, without a gate, of an encoder."""
    window: int | None = None
    vocabulary: int = 0
    head_norms: bool = False
    """Queries and keys are normalised, head by head."""
    post_norms: bool = False
    """What attention and feed-forward yield is normalised before it is added."""
    encoder: EncoderShape | None = None
    """All sizes, if it is an encoder of images. Its attention is not causal, its projections have biases."""

    @property
    def is_decoder(self) -> bool:
        """Whether it makes tokens, one after the other."""
        return self.vocabulary > 0

    @property
    def projections(self) -> list[tuple[int, int, str]]:
        """(M, K, epilogue): packed query, key and value; output; feed-forward up, with its gate; down."""
        attention = self.heads * self.head_size
        packed = attention + 2 * self.kv_heads * self.head_size
        return [
            (packed, self.hidden, "none"),
            (self.hidden, attention, "none"),
            (self.feed_forward, self.hidden, self.activation),
            (self.hidden, self.feed_forward, "none"),
        ]


def _decoder(shape: dict[str, Any]) -> Model:
    """A decoder of `flownpu.model.shapes`."""
    is_gemma = shape["model_type"] == "gemma3_text"
    return Model(
        shape["hidden_size"],
        shape["intermediate_size"],
        shape["num_attention_heads"],
        shape["num_key_value_heads"],
        shape["head_dim"],
        "geglu" if is_gemma else "swiglu",
        shape.get("sliding_window"),
        shape["vocab_size"],
        head_norms=shape["model_type"] != "llama",
        post_norms=is_gemma,
    )


# The designs have no place for experts.
MODELS: dict[str, Model] = {name: _decoder(shape) for name, shape in SHAPES.items() if "num_experts" not in shape}
# Gemma3-4B's encoder of images, SigLIP so400m: 896 x 896 pixels in patches of 14 x 14; 256 tokens.
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
MODELS["siglip"] = Model(1152, 4304, 16, 16, 72, "gelu", encoder=_SIGLIP)

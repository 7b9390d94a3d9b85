# SPDX-License-Identifier: Apache-2.0
"""Describes a vision tower and the projector of its features to the decoder, without any model family's names.

`configuration.py` fills the class from a Hugging Face configuration; `graph.py` writes the ONNX graph.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class VisionTower:
    """A vision transformer without a class token: patches, positions, layers, pooling, projection.

    A layer is: layer norm, attention of all patches to all patches (NCA), residual; layer norm, GELU feed-forward,
    residual. All products have a bias. Features of `pool_size` x `pool_size` patches are averaged, RMS-normalised and
    projected to the decoder's hidden size.
    """

    image_size: int
    """I, the pixels of a side: pictures are scaled to I x I."""
    patch_size: int
    channels: int
    hidden_size: int
    feed_forward_size: int
    heads: int
    layers: int
    norm_epsilon: float
    tokens_per_image: int
    """F, the features of a picture: how many tokens it takes in a prompt."""
    output_size: int
    """D, the decoder's hidden size."""
    pooled_norm_offset: float
    """Added to the stored weight of the norm after pooling: Gemma stores w and multiplies by 1 + w."""

    @property
    def head_size(self) -> int:
        """The papers' d: how many dimensions a head has."""
        return self.hidden_size // self.heads

    @property
    def patches_per_side(self) -> int:
        """How many patches a row of a picture has, which is also how many rows there are."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """P, the patches of a picture, which are the tower's tokens."""
        return self.patches_per_side**2

    @property
    def pooled_per_side(self) -> int:
        """How many features a row of a picture has; the square is F."""
        return math.isqrt(self.tokens_per_image)

    @property
    def pool_size(self) -> int:
        """How many patches along a side are averaged to one feature."""
        return self.patches_per_side // self.pooled_per_side

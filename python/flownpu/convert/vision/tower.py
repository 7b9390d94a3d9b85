# SPDX-License-Identifier: Apache-2.0
"""What a vision tower is made of, free of any model family's names, with the projector that hands its features on.

`configuration.py` fills the class from a Hugging Face configuration; `graph.py` writes the ONNX graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["VisionTower"]


@dataclass(frozen=True)
class VisionTower:
    """A vision transformer without a class token: patches, positions, layers, pooling, projection.

    A layer is: layer norm, attention of all patches to all (NCA), residual; layer norm, GELU feed-forward, residual;
    each product with a bias. Features of `pool_size` x `pool_size` patches are averaged, RMS-normalised and projected
    to the decoder's hidden size.
    """

    image_size: int
    """Pixels of a side, I; pictures are scaled to I x I."""
    patch_size: int
    channels: int
    hidden_size: int
    feed_forward_size: int
    heads: int
    layers: int
    norm_epsilon: float
    tokens_per_image: int
    """Features of a picture, F: tokens that it takes in a prompt."""
    output_size: int
    """D of the decoder."""
    pooled_norm_offset: float
    """Added to the weight of the norm after pooling: Gemma stores w of (1 + w)."""

    @property
    def head_size(self) -> int:
        """The papers' d."""
        return self.hidden_size // self.heads

    @property
    def patches_per_side(self) -> int:
        """Patches in a row of a picture, and rows of them."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """P, the tokens of the tower."""
        return self.patches_per_side**2

    @property
    def pooled_per_side(self) -> int:
        """Features in a row of a picture; its square is F."""
        return math.isqrt(self.tokens_per_image)

    @property
    def pool_size(self) -> int:
        """Patches in a row of those that are averaged."""
        return self.patches_per_side // self.pooled_per_side

# SPDX-License-Identifier: Apache-2.0
"""How many bits a conversion gives the codes of a decoder's weights."""

from __future__ import annotations

from typing import NamedTuple


class WeightBits(NamedTuple):
    """Bits of a code, 4 or 8, by the weight's place in the decoder: 8/4/4 in the notation of the ML Drift paper.

    Attributes:
        attention: of the projections to queries, keys and values, and of the output projection; also of mixers that
            stand in the place of attention.
        embedding: of the table of embeddings and the LM head.
        feed_forward: of the projections of the feed-forward network, or of its experts.
    """

    attention: int
    embedding: int
    feed_forward: int

    @property
    def eight_bits(self) -> int:
        """Which weights of a layer have 8 bits, as `Layer.eight_bits` of `flownpu._native` says it."""
        return 3 * (self.attention == 8) + 12 * (self.feed_forward == 8)

    def of(self, name: str) -> int:
        """The bits of a weight, by its name in `weight_plan`."""
        if ".mlp." in name:
            return self.feed_forward
        return self.attention if name.startswith("layers.") else self.embedding


FOUR_BITS = WeightBits(4, 4, 4)

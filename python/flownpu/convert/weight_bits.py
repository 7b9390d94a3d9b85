# SPDX-License-Identifier: Apache-2.0
"""How many bits a conversion gives the codes of a decoder's weights."""

from __future__ import annotations

import re
from typing import NamedTuple

from flownpu.convert.average_bits import AverageBits
from flownpu.convert.errors import ConversionError

_MOST_BITS = 8
_NAMES = {"q4": "4/4/4", "q8": "8/8/8"}


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


def parse_weight_bits(text: str) -> WeightBits | AverageBits | None:
    """The bits that "q4", "q8" or a text such as "8/4/4" stands for, or an average such as "4.75"; None for "auto".

    The last means as many bits as the source has.

    Raises:
        ConversionError: the text is none of these.
    """
    if text == "auto":
        return None
    numbers = _NAMES.get(text, text)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", numbers) and 4 <= float(numbers) <= _MOST_BITS:
        return AverageBits(float(numbers))
    if not re.fullmatch("[48]/[48]/[48]", numbers):
        raise ConversionError(
            "expected weights of auto, q4, q8, an average from 4 to 8, or the bits of attention, embedding and "
            f'feed-forward, each 4 or 8, such as 8/4/4, got "{text}"'
        )
    return WeightBits(*map(int, numbers.split("/")))

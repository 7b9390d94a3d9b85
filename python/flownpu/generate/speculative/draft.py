# SPDX-License-Identifier: Apache-2.0
"""Candidates that a smaller model of the same tokenizer would write."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["Draft"]


class Draft:
    """What a draft model thinks likeliest, one token after another.

    It always takes the likeliest token, also where the text is sampled: a candidate is kept with the probability that
    the model gives it. (One that is sampled from the draft's distribution q would be kept with min(1, p / q), p and q
    being what top-k, top-p and penalties leave of them: GenAI keeps these to itself.)

    Args:
        make: makes a GenAI generator of the draft model, which takes the likeliest tokens.
        context: tokens that the draft's generator holds.
        known: tokens that the draft has. Of a text with others it proposes nothing.
        vocabulary: tokens of the model that verifies. Either may have more than their tokenizer, as padding.
    """

    def __init__(self, make: Callable[[], Any], context: int, known: int, vocabulary: int) -> None:
        self._make = make
        self._context = context
        self._known = known
        self._vocabulary = vocabulary
        self._generator: Any = None
        self._held: list[int] = []
        self._agreed = 0
        """Tokens of `_held` that surely are the text's."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See `Candidates.propose`."""
        count = min(count, self._context - len(tokens))
        if count < 1 or not self._read(tokens):
            return []
        found: list[int] = []
        while len(found) < count and not self._generator.is_done():
            self._generator.generate_next_token()
            # A token that ends the text is a candidate too, and the last; GenAI does not keep it in the sequence.
            found.append(int(self._generator.get_next_tokens()[0]))
        self._held.extend(found)
        return found if max(found) < self._vocabulary else []

    def rewound(self, length: int) -> None:
        """See `Candidates.rewound`."""
        self._agreed = min(self._agreed, length)

    def _read(self, tokens: Sequence[int]) -> bool:
        """Computes what of the text the draft's cache does not hold, at least its last token; false if it cannot."""
        common = self._agreed
        most = min(len(self._held), len(tokens)) - 1  # of what it wrote last, the last token is in no cache
        while common < most and self._held[common] == tokens[common]:
            common += 1
        common = max(0, min(common, most))
        if max(tokens[common:]) >= self._known:
            return False
        if self._generator is None:
            self._generator = self._make()
        elif common < len(self._held):
            self._generator.rewind_to(common)
        self._generator.append_tokens(np.asarray(tokens[common:], dtype=np.int32))
        self._held = list(tokens)
        self._agreed = len(tokens)
        return True

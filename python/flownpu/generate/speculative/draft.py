# SPDX-License-Identifier: Apache-2.0
"""Candidates from a smaller model with the same tokenizer."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Draft:
    """Candidates that a draft model generates, always the likeliest token.

    It takes the likeliest token even where the text is sampled: a candidate is then kept with the probability that the
    model gives it. (A candidate sampled from the draft's distribution q would be kept with min(1, p / q), where p and q
    are the distributions after top-k, top-p and penalties: GenAI does not expose these.)

    Args:
        make: makes a GenAI generator of the draft model, which takes the likeliest tokens.
        context: tokens that the draft's generator holds.
        known: size of the draft's vocabulary. For a text with tokens beyond it, nothing is proposed.
        vocabulary: size of the verifying model's vocabulary. Either size may include padding, tokens without text.
    """

    def __init__(self, make: Callable[[], Any], context: int, known: int, vocabulary: int) -> None:
        self._make = make
        self._context = context
        self._known = known
        self._vocabulary = vocabulary
        self._generator: Any = None
        self._held: list[int] = []
        self._agreed = 0
        """How many of the first tokens of `_held` certainly are those of the text."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See `Candidates.propose`."""
        count = min(count, self._context - len(tokens))
        if count < 1 or not self._read(tokens):
            return []
        found: list[int] = []
        while len(found) < count and not self._generator.is_done():
            self._generator.generate_next_token()
            # A token that ends the text is also a candidate, and the last one; GenAI does not add it to the sequence.
            found.append(int(self._generator.get_next_tokens()[0]))
        self._held.extend(found)
        return found if max(found) < self._vocabulary else []

    def rewound(self, length: int) -> None:
        """See `Candidates.rewound`."""
        self._agreed = min(self._agreed, length)

    def _read(self, tokens: Sequence[int]) -> bool:
        """Computes the tokens that the draft's cache does not hold, at least the last one; False if it cannot."""
        common = self._agreed
        most = min(len(self._held), len(tokens)) - 1  # the last generated token is not in the cache
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

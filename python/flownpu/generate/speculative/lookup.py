# SPDX-License-Identifier: Apache-2.0
"""Candidates that followed the same tokens earlier, in the prompt or in the generated text."""

from collections.abc import Sequence

# Lengths of the n-grams that are looked up, the longest first. Candidates are the tokens behind the latest earlier
# place of the same n-gram. Two tokens are often equal by chance; wrong candidates cost part of a step, and `budget.py`
# bounds this cost.
_LENGTHS = (4, 3, 2)


class Lookup:
    """Prompt lookup: an index from each n-gram of the sequence to the place behind its latest occurrence."""

    def __init__(self) -> None:
        self._known = 0
        self._ends: dict[tuple[int, ...], int] = {}

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See `Candidates.propose`."""
        self._index(tokens)
        for length in _LENGTHS:
            last = tuple(tokens[-length:])
            end = self._ends.get(last, 0)
            # The index may hold n-grams that a rewind has removed from the sequence.
            if 0 < end < len(tokens) and tuple(tokens[end - length : end]) == last:
                return _copied(tokens, end, count)
        return []

    def rewound(self, length: int) -> None:
        """See `Candidates.rewound`."""
        self._known = min(self._known, length)

    def _index(self, tokens: Sequence[int]) -> None:
        """Adds the new n-grams, except those at the very end of the sequence, which would find themselves."""
        for end in range(max(self._known, 1), len(tokens)):
            for length in _LENGTHS:
                if end >= length:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._known = len(tokens)


def _copied(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on; where the sequence ends, its tokens from `place` on repeat."""
    found: list[int] = []
    for index in range(place, place + count):
        found.append(tokens[index] if index < len(tokens) else found[index - len(tokens)])
    return found

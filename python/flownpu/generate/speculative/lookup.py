# SPDX-License-Identifier: Apache-2.0
"""Candidates that followed the same tokens before, in the prompt or in what was generated."""

from collections.abc import Sequence

__all__ = ["Lookup"]

# Tokens that have to be the same: of the longest of these that has been before, what followed it last. Two are often
# the same by chance; what is wrong then costs a part of a step, which `pace.py` bounds.
_LENGTHS = (4, 3, 2)


class Lookup:
    """Prompt lookup: an index of all n-grams of the sequence to where each last ended."""

    def __init__(self) -> None:
        self._known = 0
        self._ends: dict[tuple[int, ...], int] = {}

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See `Candidates.propose`."""
        self._index(tokens)
        for length in _LENGTHS:
            last = tuple(tokens[-length:])
            end = self._ends.get(last, 0)
            # The index may have what was gone back on, and is no longer there.
            if 0 < end < len(tokens) and tuple(tokens[end - length : end]) == last:
                return _copied(tokens, end, count)
        return []

    def rewound(self, length: int) -> None:
        """See `Candidates.rewound`."""
        self._known = min(self._known, length)

    def _index(self, tokens: Sequence[int]) -> None:
        """Adds the n-grams that are new, but for those at the very end, which would find themselves."""
        for end in range(max(self._known, 1), len(tokens)):
            for length in _LENGTHS:
                if end >= length:
                    self._ends[tuple(tokens[end - length : end])] = end
        self._known = len(tokens)


def _copied(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """What follows a place; behind the sequence's end, what it would be if the sequence went on like this."""
    found: list[int] = []
    for index in range(place, place + count):
        found.append(tokens[index] if index < len(tokens) else found[index - len(tokens)])
    return found

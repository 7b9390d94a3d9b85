# SPDX-License-Identifier: Apache-2.0
"""Choices from bytes that hypothesis draws.

A draw of hypothesis costs 0.15 ms, and a graph takes a hundred choices. So hypothesis draws one string of bytes for
each node, and choices are read from it. Smaller bytes mean earlier, simpler options. When the bytes have run out, the
first option is chosen. So hypothesis shrinks graphs when it shrinks bytes.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """A reader of choices."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, count: int) -> int:
        """A number in 0..count-1."""
        number = 0
        for _ in range(1 if count <= 256 else 2 if count <= 65536 else 4):
            number = number << 8 | self._byte()
        return number % count

    def between(self, first: int, last: int) -> int:
        """A number in first..last."""
        return first + self.below(last - first + 1)

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.below(len(options))]

    def chance(self, percent: float) -> bool:
        """Whether a rare event happens, in `percent` of all cases."""
        # Large bytes mean that it happens, so that in shrunk cases it does not.
        return self._byte() >= 256 - 2.56 * percent

    def weighted(self, options: Sequence[tuple[int, T]]) -> T:
        """One of the options, each as often as its weight says."""
        number = self.below(sum(weight for weight, _ in options))
        for weight, option in options:
            if number < weight:
                return option
            number -= weight
        raise AssertionError

    def seed(self) -> int:
        """The seed of an array's numbers."""
        return self.below(65536)

    def _byte(self) -> int:
        if self._at >= len(self._data):
            return 0
        self._at += 1
        return self._data[self._at - 1]

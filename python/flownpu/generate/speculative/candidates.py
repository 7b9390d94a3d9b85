# SPDX-License-Identifier: Apache-2.0
"""Where candidates for the next tokens come from."""

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Candidates"]


class Candidates(Protocol):
    """One sequence's candidates. How good they are changes the speed, never the text."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """What may follow.

        Args:
            tokens: the sequence so far: what it was at the last call, or what `rewound` left of that, and more.
            count: candidates at most, at least 1.
        """

    def rewound(self, length: int) -> None:
        """The sequence was gone back on: its first `length` tokens are left."""

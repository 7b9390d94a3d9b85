# SPDX-License-Identifier: Apache-2.0
"""The interface of sources of candidates for the next tokens."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Candidates(Protocol):
    """A source of candidates for one sequence. How good they are changes the speed, never the text."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow; none if it knows none.

        Args:
            tokens: the sequence so far. It begins with the sequence of the last call, or with what `rewound` has left
                of that.
            count: most candidates; at least 1.
        """

    def rewound(self, length: int) -> None:
        """Tells the source that only the first `length` tokens of the sequence are left."""


class FollowsModel(Candidates, Protocol):
    """A source that goes on from the model's hidden states."""

    def computed(self, first: int, states: npt.NDArray[np.float32]) -> None:
        """Takes the hidden states, float32 [S, D], of the S tokens from `first` on that the model has just computed."""

# SPDX-License-Identifier: Apache-2.0
"""The interface of sources of candidates for the next tokens."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

HIDDEN_STATES = "hidden_states"
"""The output with the hidden states of new tokens, float32 [B, N, D], as the LM head takes them: of all, or where only
the newest pass through the last layers, of these."""


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
    """A source that goes on from what the model has computed."""

    def computed(self, length: int, output: Callable[[str], npt.NDArray[Any]]) -> None:
        """Takes what it needs of the model's last run, before which the sequence's first `length` tokens are computed.

        `output` gives an output of that run by name, such as HIDDEN_STATES; a row for each new token, or for the last.
        """

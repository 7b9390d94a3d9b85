# SPDX-License-Identifier: Apache-2.0
"""Changes of a step's logits for which GenAI's search has no options: penalties, biases of tokens, and min-p.

Their order and meaning are those of vLLM, OpenAI's API reference and, with a window, llama.cpp. For a token i, with
x_i its logit, c_i how often it is among the tokens that count, and T the temperature:

1. `bias`: x_i + bias_i
2. `repetition` r, if c_i > 0: x_i / r where x_i > 0, else x_i * r
3. `frequency` f and `presence` p: x_i - f * c_i - p * [c_i > 0]
4. `min_p` m: tokens with exp(x_i / T) < m * exp(max(x) / T) are not chosen

Without a window, the frequency and presence of new tokens count, and repetitions of the prompt, too.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

FAR = 1e4
"""Subtracted from the logits of tokens that min-p excludes: exp(-FAR / T) is 0 in float32 for T up to 90. It is
finite, so that they keep their order where guidance then excludes all the others."""


@dataclass(frozen=True)
class Penalties:
    """The changes of logits that a request asks for; the default values change nothing."""

    bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to their logits."""
    repetition: float | None = None
    """None leaves repetitions to the model's genai_config.json."""
    frequency: float = 0.0
    presence: float = 0.0
    min_p: float = 0.0
    window: int | None = None
    """How many of the last tokens, of the prompt's and the new ones, count for all penalties, at least 1; None: see
    above."""

    @property
    def only_repetition(self) -> bool:
        """Whether nothing but `repetition` of all tokens is asked for, which GenAI's engine can compute."""
        return self == Penalties(repetition=self.repetition)

    def __bool__(self) -> bool:
        return not (self.repetition in {None, 1.0} and replace(self, window=None).only_repetition)


class ChangedLogits:
    """Changes the logits of one sequence, step by step.

    Args:
        penalties: the changes.
        prompt: the sequence's first tokens, int32 [tokens].
        temperature: the number by which GenAI divides the logits later; 0 if it takes the likeliest token.
    """

    def __init__(self, penalties: Penalties, prompt: "NDArray[np.int32]", temperature: float) -> None:
        self._wanted = penalties
        self._temperature = temperature
        self._biased = np.array([token for token, _ in penalties.bias], np.int64)
        self._biases = np.array([value for _, value in penalties.bias], np.float32)
        # The number of times that a token is among the counted tokens; never 0.
        self._last = deque(prompt[-(penalties.window or 0) :].tolist(), penalties.window)
        self._repeated = Counter(self._last)
        self._counted = self._repeated if penalties.window is not None else Counter()

    def add(self, token: int) -> None:
        """Appends a new token to the sequence."""
        if len(self._last) == self._wanted.window:
            leaving = self._last[0]
            self._repeated[leaving] -= 1
            if not self._repeated[leaving]:
                del self._repeated[leaving]
        self._last.append(token)
        self._repeated[token] += 1
        if self._counted is not self._repeated:
            self._counted[token] += 1

    def of(self, logits: "NDArray[np.float32]") -> "NDArray[np.float32]":
        """The logits from which the sequence's next token is chosen.

        Args:
            logits: the model's, float32 [V] or [1, 1, V].

        Returns:
            A changed copy, of the same shape.
        """
        wanted, changed = self._wanted, logits.copy()
        row = changed.reshape(-1)
        row[self._biased] += self._biases
        if wanted.repetition not in {None, 1.0}:
            tokens, _ = _arrays(self._repeated)
            values = row[tokens]
            row[tokens] = np.where(values > 0, values / wanted.repetition, values * wanted.repetition)
        if wanted.frequency or wanted.presence:
            tokens, counts = _arrays(self._counted)
            row[tokens] -= wanted.frequency * counts + wanted.presence
        if wanted.min_p and self._temperature:
            least = row.max() + self._temperature * math.log(wanted.min_p)
            np.subtract(row, FAR, out=row, where=row < least)
        return changed


def _arrays(counts: "Counter[int]") -> "tuple[NDArray[np.int64], NDArray[np.float32]]":
    """Tokens, and how often each counts."""
    return np.fromiter(counts, np.int64, len(counts)), np.fromiter(counts.values(), np.float32, len(counts))

# SPDX-License-Identifier: Apache-2.0
"""A generator that keeps the states of layers near a prompt's end, to which it can be rewound."""

from collections.abc import Callable
from typing import Any

import numpy as np

from flownpu.generate.tokenizer import Tokens

TAIL = 64
"""Tokens at a prompt's end before which states are kept.

The next prompt of a conversation often differs from the last one just before its end, where a template opens the reply
or a block of thoughts. These tokens are computed again then, in about the time of a few single ones.
"""


class StateGenerator:
    """GenAI's generator of a model whose layers have states; it has the same methods.

    A state depends on all tokens and cannot forget the last of them. GenAI copies it at one length at a time, and goes
    back to that length or to 0 only. The copy takes as much memory as the states themselves: 49 MiB for a model of the
    form of Qwen3.5-4B, whatever the number of tokens.

    Args:
        generator: GenAI's generator.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._kept = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def append_tokens(self, tokens: Tokens, computed: Callable[[], None] = lambda: None) -> None:
        """Computes given tokens, and keeps the states before the last TAIL of them.

        `computed` is called after each call of the model.
        """
        tokens = np.asarray(tokens, np.int32).reshape(-1)
        first = max(len(tokens) - TAIL, 0)
        if first:
            self._generator.append_tokens(tokens[:first])
            computed()
        self.keep()
        self._generator.append_tokens(tokens[first:])
        computed()

    def append_step(self, tokens: Tokens) -> None:
        """Computes tokens of a step, and keeps no states."""
        self._generator.append_tokens(tokens)

    def keep(self) -> None:
        """Keeps the states as they are, in the place of those that were kept before."""
        length = self._generator.token_count()
        if length and length != self._kept:
            self._generator.snapshot_state()
            self._kept = length

    def rewind_to(self, length: int) -> None:
        """Goes back to a length of which states were kept, or to 0."""
        self._generator.rewind_to(length)
        self._kept = min(self._kept, length)

    def kept_before(self, length: int) -> int:
        """The greatest length up to `length` to which the sequence can be rewound; 0: none, it begins anew."""
        return self._kept if self._kept <= length else 0

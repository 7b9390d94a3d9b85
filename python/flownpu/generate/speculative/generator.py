# SPDX-License-Identifier: Apache-2.0
"""A generator whose steps may give several tokens: the verifier of candidates."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flownpu.generate.speculative.candidates import Candidates
from flownpu.generate.speculative.choice import Choice
from flownpu.generate.speculative.pace import Pace, StepTimes

__all__ = ["SpeculativeGenerator", "Tally"]

Row = NDArray[np.float32]
"""Logits of one token, float32 [V]."""


@dataclass
class Tally:
    """What a generator's steps gave."""

    steps: int = 0
    """Runs of the model after prompts."""
    candidates: int = 0
    kept: int = 0


class SpeculativeGenerator:
    """Like GenAI's generator of one sequence, with the tokens that it would give.

    Two of GenAI's generators work together: the reader has the model and its KV cache, the choice has the sequence.
    A step has the reader compute the sequence's last token and the candidates after it; from the logits behind each
    the choice takes a token, as long as the token before was the candidate that these logits stand behind. The reader
    is then taken back to what was chosen. That is the rule of speculative sampling (Leviathan et al. 2023) for
    candidates without a distribution: x is kept with probability p(x), else a token comes from p without x. Because
    the choice draws once for each token, the same seed gives the same text as without candidates.

    Where nothing is drawn and no grammar has a state, steps without candidates are the reader's own, which copies no
    logits; the choice gets the tokens when it is asked again.

    Args:
        reader: GenAI's generator of the model.
        choice: with the sampling, and as many tokens at most.
        sources: candidates with their pace; the first that has any gives a step's.
        times: what the model's steps take.
        output: the model's output with the logits of all new tokens, of up to `most_rows`.
        most_rows: new tokens of a step at most.
        reader_chooses: whether the reader, with the choice's settings, always chooses what the choice would.
        reach: tokens up to which the reader can be taken back, and gets candidates; it has room for them all.
    """

    def __init__(
        self,
        reader: Any,
        choice: Choice,
        sources: Sequence[tuple[Candidates, Pace]],
        times: StepTimes,
        *,
        output: str,
        most_rows: int,
        reader_chooses: bool,
        reach: int,
    ) -> None:
        self.tally = Tally()
        self._reader, self._choice = reader, choice
        self._sources, self._times = sources, times
        self._output, self._most_rows, self._reach = output, most_rows, reach
        self._reader_chooses = reader_chooses
        self._last: Any = choice.generator
        """The generator that chose the last token, or would choose the next."""
        self._tokens: list[int] = []
        self._chosen = 0
        """Tokens that the choice has."""
        self._read = 0
        """Tokens that the reader's cache has."""
        self._reader_is_ahead = False
        """Whether its sequence has one more, which it chose and has not computed."""
        self._confirmed = 0
        """How many of these are the sequence's: then come candidates, wrong or not yet compared."""
        self._rows: deque[Row] = deque()
        """The logits behind the sequence's last token, then those behind the candidates to which they are."""
        self._candidates: deque[int] = deque()
        self._step: tuple[Pace, int, float] | None = None
        """The step that is being verified: its pace, how many candidates, and the seconds to find them."""

    def append_tokens(self, tokens: NDArray[np.int32]) -> None:
        """Computes tokens that are given."""
        self._drop_candidates()
        tokens = np.asarray(tokens, dtype=np.int32).reshape(-1)
        self._compute([*self._tokens[self._read :], *tokens.tolist()], 0)
        self._tokens.extend(tokens.tolist())
        self._last = self._reader
        if not self._reader_chooses:
            self._tell_choice()

    def generate_next_token(self) -> None:
        """Chooses the next token; computes, if the last step did not do that already."""
        if not self._rows and not self._next_step(self._reader_chooses):
            return
        self._tell_choice()
        token = self._choice.next(self._rows.popleft())
        self._last = self._choice.generator
        ended = self._last.token_count() == len(self._tokens)
        if not ended:
            self._tokens.append(token)
            self._chosen += 1
        if self._candidates and self._candidates.popleft() == token and not ended:
            self._confirmed += 1
            self.tally.kept += 1
            return
        self._end_step()

    def get_logits(self) -> Row:
        """The logits that the next token is chosen from, float32 [1, 1, V]."""
        if not self._rows:
            self._next_step(False)
        return self._rows[0].reshape(1, 1, -1)

    def get_next_tokens(self) -> NDArray[np.int32]:
        """The token that was chosen last."""
        tokens: NDArray[np.int32] = self._last.get_next_tokens()
        return tokens

    def get_sequence(self, index: int) -> NDArray[np.int32]:
        """The tokens so far."""
        return np.array([self._tokens][index], np.int32)

    def token_count(self) -> int:
        """How many tokens the sequence has."""
        return len(self._tokens)

    def is_done(self) -> bool:
        """Whether the sequence has ended, or has the most tokens."""
        return bool(self._last.is_done())

    def rewind_to(self, length: int) -> None:
        """Leaves the first tokens.

        Raises:
            RuntimeError: the model's KV cache cannot be taken back; the message is GenAI's.
        """
        self._drop_candidates()
        if self._read + self._reader_is_ahead > length:
            self._take_back(min(self._read, length))
        if self._chosen > length:
            self._choice.generator.rewind_to(length)
            self._chosen = length
        del self._tokens[length:]
        self._rows.clear()
        for source, _ in self._sources:
            source.rewound(length)

    def _next_step(self, reader_may_choose: bool) -> bool:
        """Computes the sequence's last token, with candidates after it where there are some.

        Returns:
            Whether there are logits; else there were no candidates, and the reader has chosen the next token.
        """
        if self._read == len(self._tokens):
            # It was gone back to here: its logits are no longer known.
            self._take_back(self._read - 1)
        new = self._tokens[self._read :]
        started = time.perf_counter()
        pace, candidates = self._propose(self._most_rows - len(new))
        found = time.perf_counter()
        chosen = pace is None and reader_may_choose
        if chosen:
            self._reader_chooses_next(new)
        else:
            self._compute([*new, *candidates], len(candidates))
        ended = time.perf_counter()
        self.tally.steps += 1
        self.tally.candidates += len(candidates)
        self._times.add(len(new) + len(candidates), ended - found)
        if pace is None:
            for _, each in self._sources:
                each.stepped()
        else:
            self._step = (pace, len(candidates), found - started)
            self._candidates.extend(candidates)
        return not chosen

    def _reader_chooses_next(self, new: list[int]) -> None:
        """A step of the reader alone, over the tokens that its cache does not have."""
        if not self._reader_is_ahead:
            self._reader.append_tokens(np.array(new, np.int32))
        self._reader.generate_next_token()
        self._read = self._confirmed = len(self._tokens)
        self._reader_is_ahead = self._reader.token_count() > len(self._tokens)
        self._last = self._reader
        if self._reader_is_ahead:
            self._tokens.append(int(self._reader.get_next_tokens()[0]))

    def _tell_choice(self) -> None:
        """Gives the choice the tokens that it does not have; the next ones come from the first row's logits."""
        if self._chosen < len(self._tokens):
            self._choice.append(np.array(self._tokens[self._chosen :], np.int32), self._rows[0])
            self._chosen = len(self._tokens)

    def _propose(self, room: int) -> tuple[Pace | None, list[int]]:
        room = min(room, self._reach - len(self._tokens))
        for source, pace in self._sources:
            count = min(pace.count(), room)
            if count > 0 and (candidates := source.propose(self._tokens, count)):
                return pace, candidates
        return None, []

    def _compute(self, tokens: list[int], candidates: int) -> None:
        """Has the reader compute tokens; takes the logits behind the last one and behind the candidates before it."""
        if self._reader_is_ahead and candidates:
            self._take_back(self._read)
        elif self._reader_is_ahead:
            # Computes the token that the reader chose, also where its cache cannot be taken back.
            self._reader.get_logits()
            self._reader_is_ahead = False
            self._read += 1
            tokens = tokens[1:]
        if tokens:
            self._reader.append_tokens(np.array(tokens, np.int32))
        self._read += len(tokens)
        self._confirmed = self._read - candidates
        self._rows.clear()
        if candidates:
            rows = self._reader.get_output(self._output)[0]
            self._rows.extend(rows[len(rows) - 1 - candidates :])
        else:
            self._rows.append(self._reader.get_logits().reshape(-1))

    def _take_back(self, length: int) -> None:
        self._reader.rewind_to(length)
        self._read = self._confirmed = length
        self._reader_is_ahead = False

    def _end_step(self) -> None:
        """All that a step gave is chosen: wrong candidates leave the KV cache, and the pace hears of it."""
        wrong = self._read - self._confirmed
        if wrong:
            self._take_back(self._confirmed)
        self._candidates.clear()
        self._rows.clear()
        if self._step is not None:
            pace, candidates, seconds = self._step
            pace.verified(candidates, candidates - wrong, seconds)
            self._step = None

    def _drop_candidates(self) -> None:
        """Before the sequence is changed by others: what is not chosen yet is forgotten."""
        if self._step is not None:
            self._step = None  # nobody knows whether they were right
            self._end_step()

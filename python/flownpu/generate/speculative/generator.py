# SPDX-License-Identifier: Apache-2.0
"""A generator that verifies candidates, so that a step may give several tokens."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flownpu.generate.speculative.budget import CandidateBudget, StepTimes
from flownpu.generate.speculative.candidates import Candidates, FollowsModel
from flownpu.generate.speculative.choice import Choice
from flownpu.generate.state_generator import StateGenerator

Row = NDArray[np.float32]
"""Logits of one token, float32 [V]."""


@dataclass
class Tally:
    """Counts of a generator's steps, of the candidates that they verified, and of those that were kept."""

    steps: int = 0
    """Runs of the model after prompts."""
    candidates: int = 0
    kept: int = 0


class SpeculativeGenerator:
    """Is used like GenAI's generator of one sequence, and gives the same tokens.

    Two of GenAI's generators work together: the reader has the model and its KV cache, the choice has the sequence. In
    a step the reader computes the sequence's last token and the candidates after it. The choice then takes a token from
    the logits behind the first of these, and from those behind a candidate if it has just chosen this candidate. The
    reader is then rewound to the tokens that were chosen. This is the rule of speculative sampling (Leviathan et al.
    2023) for candidates without a distribution: x is kept with probability p(x), else a token comes from p without x.
    Because the choice draws once for each token, the same seed gives the same text as without candidates.

    If tokens are chosen greedily and no grammar has a state, the reader itself chooses in steps without candidates,
    which saves a copy of the logits; the choice gets these tokens before it is next asked.

    A reader with states goes back to where they were kept, before a step's candidates. The next step computes the
    tokens behind again, and has fewer candidates.

    Args:
        reader: GenAI's generator of the model, or a `StateGenerator`.
        choice: the choice, with the wanted sampling and the same limit of tokens.
        sources: sources of candidates, each with its budget; the first that proposes any provides those of a step.
        times: measured times of the model's steps.
        output: name of the model's output with the logits of all new tokens, of up to `most_rows`.
        most_rows: most new tokens of a step.
        reader_chooses: whether the reader, with the choice's settings, always chooses what the choice would.
        reach: length of the sequence up to which the reader can be rewound, so that there are candidates.
        follower: the source among them that needs what the model computes, which the reader's model then has as
            outputs; the reader then chooses no token, since it computes it later.
    """

    def __init__(
        self,
        reader: Any,
        choice: Choice,
        sources: Sequence[tuple[Candidates, CandidateBudget]],
        times: StepTimes,
        *,
        output: str,
        most_rows: int,
        reader_chooses: bool,
        reach: int,
        follower: FollowsModel | None = None,
    ) -> None:
        self.tally = Tally()
        self._reader, self._choice = reader, choice
        self._states = reader if isinstance(reader, StateGenerator) else None
        self._sources, self._times = sources, times
        self._output, self._most_rows, self._reach = output, most_rows, reach
        self._reader_chooses, self._follower = reader_chooses and follower is None, follower
        self._last: Any = choice.generator
        """The generator that chose the last token, or that will choose the next."""
        self._tokens: list[int] = []
        self._chosen = 0
        """How many of the tokens the choice has."""
        self._read = 0
        """Tokens in the reader's KV cache."""
        self._reader_is_ahead = False
        """Whether the reader's sequence has one more token, which it has chosen but not computed."""
        self._confirmed = 0
        """How many tokens of the reader's cache are the sequence's; candidates follow, wrong or not yet compared."""
        self._rows: deque[Row] = deque()
        """The logits behind the sequence's last token, then those behind each of `_candidates`."""
        self._candidates: deque[int] = deque()
        self._step: tuple[CandidateBudget, int, float] | None = None
        """The step that is being verified: its budget, the number of candidates, and the seconds that finding them
        took."""

    def append_tokens(self, tokens: NDArray[np.int32]) -> None:
        """Computes given tokens and appends them to the sequence."""
        self._drop_candidates()
        tokens = np.asarray(tokens, dtype=np.int32).reshape(-1)
        self._compute([*self._tokens[self._read :], *tokens.tolist()], 0, is_prompt=True)
        self._tokens.extend(tokens.tolist())
        self._last = self._reader
        if not self._reader_chooses:
            self._tell_choice()

    def generate_next_token(self) -> None:
        """Chooses the next token; runs the model if no logits are left from the last step."""
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
        """The logits from which the next token is chosen, float32 [1, 1, V]."""
        if not self._rows:
            self._next_step(False)
        return self._rows[0].reshape(1, 1, -1)

    def set_logits(self, logits: Row) -> None:
        """Replaces the logits that `get_logits` has returned, float32 [1, 1, V]; candidates are compared with these."""
        self._rows[0] = logits.reshape(-1)

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
        """Whether the sequence has ended, or has reached its limit of tokens."""
        return bool(self._last.is_done())

    def rewind_to(self, length: int) -> None:
        """Drops all but the first `length` tokens.

        Raises:
            RuntimeError: the model's KV cache cannot be rewound; the message is GenAI's.
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
            # The sequence was rewound to its present end, so the logits behind its last token are not known.
            self._take_back(self._read - 1)
        new = self._tokens[self._read :]
        started = time.perf_counter()
        budget, candidates = self._propose(self._most_rows - len(new))
        found = time.perf_counter()
        chosen = budget is None and reader_may_choose
        if chosen:
            self._reader_chooses_next(new)
        else:
            self._compute([*new, *candidates], len(candidates))
        ended = time.perf_counter()
        self.tally.steps += 1
        self.tally.candidates += len(candidates)
        self._times.add(len(new) + len(candidates), ended - found)
        if budget is None:
            for _, each in self._sources:
                each.stepped()
        else:
            self._step = (budget, len(candidates), found - started)
            self._candidates.extend(candidates)
        return not chosen

    def _reader_chooses_next(self, new: list[int]) -> None:
        """A step in which the reader computes the tokens that its cache lacks, and itself chooses the next one."""
        if not self._reader_is_ahead:
            self._reader.append_tokens(np.array(new, np.int32))
        self._reader.generate_next_token()
        self._read = self._confirmed = len(self._tokens)
        self._reader_is_ahead = self._reader.token_count() > len(self._tokens)
        self._last = self._reader
        if self._reader_is_ahead:
            self._tokens.append(int(self._reader.get_next_tokens()[0]))

    def _tell_choice(self) -> None:
        """Gives the choice the tokens that it lacks, with the logits behind the last of them."""
        if self._chosen < len(self._tokens):
            self._choice.append(np.array(self._tokens[self._chosen :], np.int32), self._rows[0])
            self._chosen = len(self._tokens)

    def _propose(self, room: int) -> tuple[CandidateBudget | None, list[int]]:
        room = min(room, self._reach - len(self._tokens))
        for source, budget in self._sources:
            count = min(budget.count(), room)
            if count > 0 and (candidates := source.propose(self._tokens, count)):
                return budget, candidates
        return None, []

    def kept_before(self, length: int) -> int:
        """The greatest length up to `length` to which the reader can go back; 0: none, it begins anew."""
        return length if self._states is None else self._states.kept_before(length)

    def _compute(self, tokens: list[int], candidates: int, *, is_prompt: bool = False) -> None:
        """Has the reader compute `tokens`, of which the last `candidates` are candidates; takes their logits.

        These are the logits behind the last token before the candidates, and those behind each candidate.
        """
        if self._reader_is_ahead and candidates:
            self._take_back(self._read)
        elif self._reader_is_ahead:
            # Computes the token that the reader chose; unlike a rewind, this works with every cache.
            self._reader.get_logits()
            self._reader_is_ahead = False
            self._read += 1
            tokens = tokens[1:]
        if tokens:
            self._append(np.array(tokens, np.int32), candidates, is_prompt=is_prompt)
        self._read += len(tokens)
        self._confirmed = self._read - candidates
        self._rows.clear()
        if candidates:
            rows = self._reader.get_output(self._output)[0]
            self._rows.extend(rows[len(rows) - 1 - candidates :])
        else:
            self._rows.append(self._reader.get_logits().reshape(-1))

    def _append(self, tokens: NDArray[np.int32], candidates: int, *, is_prompt: bool) -> None:
        if self._states is not None and is_prompt:
            self._states.append_tokens(tokens, self._tell_follower)
            return
        if self._states is not None and candidates:
            self._states.keep()
        (self._reader.append_tokens if self._states is None else self._states.append_step)(tokens)
        self._tell_follower()

    def _tell_follower(self) -> None:
        """Gives the source that needs it what the reader has just computed."""
        if self._follower is not None:
            self._follower.computed(self._reader.token_count(), self._reader.get_output)

    def _take_back(self, length: int) -> None:
        """Takes the reader back to the first `length` tokens, or to where its states were kept before."""
        length = self.kept_before(length)
        self._reader.rewind_to(length)
        self._read = self._confirmed = length
        self._reader_is_ahead = False

    def _end_step(self) -> None:
        """Ends a step: removes wrong candidates from the KV cache, and tells the budget how many were kept."""
        wrong = self._read - self._confirmed
        if wrong:
            self._take_back(self._confirmed)
        self._candidates.clear()
        self._rows.clear()
        if self._step is not None:
            budget, candidates, seconds = self._step
            budget.verified(candidates, candidates - wrong, seconds)
            self._step = None

    def _drop_candidates(self) -> None:
        """Drops candidates that are not compared yet, because the caller is about to change the sequence."""
        if self._step is not None:
            self._step = None  # whether these candidates were right is not known
            self._end_step()

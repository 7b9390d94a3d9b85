# SPDX-License-Identifier: Apache-2.0
"""The number of candidates that a step verifies, from the success of earlier ones and the times of steps.

A plain step is a step without candidates, so it has one row.
"""

from dataclasses import dataclass, field

# Weight of a new observation in the moving means: about the last ten count.
_WEIGHT = 0.1
# The cost of useless candidates is bounded by this fraction of the time of plain steps: decoding with candidates that
# are never right takes longer by this fraction, and once by the time of _FREE_STEPS plain steps.
_ALLOWANCE = 0.01
_FREE_STEPS = 1.5
# Gains are saved only for a few losses, not for the rest of a long text.
_MOST_CREDIT = 4.0
# First estimates: half of all candidates are right, and a further row costs a tenth of a plain step.
_FIRST_RATE = 0.5
_ROW_COST = 0.1


@dataclass
class StepTimes:
    """Seconds of a model's steps, by their number of rows (new tokens); all sources of candidates share them."""

    seconds: dict[int, float] = field(default_factory=dict)

    @property
    def plain(self) -> float | None:
        """Seconds of a step with one row; None if there was none yet."""
        return self.seconds.get(1)

    def add(self, rows: int, seconds: float) -> None:
        """Records the time of a step with `rows` rows."""
        if self.plain is None:
            if rows == 1:
                self.seconds[1] = seconds
            return
        known = self.seconds.get(rows)
        if known is None:  # the mean of the estimate and the observation
            known = self.cost(rows) * self.plain
            self.seconds[rows] = (known + min(seconds, 2 * known)) / 2
        else:
            self.seconds[rows] = _moved(known, seconds)

    def cost(self, rows: int) -> float:
        """Time of a step with `rows` rows, in plain steps: measured, or estimated from the nearest measured number."""
        if self.plain is None:
            return 1 + _ROW_COST * (rows - 1)
        nearest = min(self.seconds, key=lambda known: abs(known - rows))
        return max(1.0, self.seconds[nearest] / self.plain + _ROW_COST * (rows - nearest))


@dataclass
class CandidateBudget:
    """How many candidates of one source are worth verifying. Costs and credit are in times of plain steps."""

    times: StepTimes
    most: int
    """Most candidates of a step."""
    proposing: float
    """Cost to find one candidate; an estimate until it is measured."""
    rate: float = _FIRST_RATE
    """Probability that a candidate is kept if those before it are."""
    credit: float = _FREE_STEPS
    """The time that useless candidates may still cost."""

    def count(self) -> int:
        """Candidates of the next step: the number at which a token costs least, or none if credit is short."""
        if self.times.plain is None:
            return 0
        best = min(range(self.most + 1), key=self._cost_per_token)
        # If candidates do not pay, one is tried now and then, in case they do by now. Half of the initial credit is not
        # spent on such trials.
        wanted, left = (best, self.credit) if best else (1, self.credit - _FREE_STEPS / 2)
        return wanted if self._cost(wanted) - 1 <= left else 0

    def stepped(self) -> None:
        """Records a plain step."""
        self.credit = min(self.credit + _ALLOWANCE, _MOST_CREDIT)

    def verified(self, candidates: int, kept: int, seconds: float) -> None:
        """Records a step with candidates.

        Args:
            candidates: how many candidates it had.
            kept: how many of them the model chose.
            seconds: how long it took to find them.
        """
        for place in range(min(kept + 1, candidates)):
            self.rate += _WEIGHT * ((place < kept) - self.rate)
        if self.times.plain is not None:
            self.proposing = _moved(self.proposing, seconds / candidates / self.times.plain)
        self.credit = min(self.credit + 1 + kept - self._cost(candidates), _MOST_CREDIT)

    def _cost(self, candidates: int) -> float:
        return self.times.cost(1 + candidates) + candidates * self.proposing

    def _cost_per_token(self, candidates: int) -> float:
        """The cost divided by the expected number of tokens, 1 + r + .. + r^k (Leviathan et al. 2023, eq. 1)."""
        return self._cost(candidates) / sum(self.rate**power for power in range(candidates + 1))


def _moved(known: float, seen: float) -> float:
    """A moving mean after another observation. Longer times count less, because other work may cause them."""
    return known + (_WEIGHT if seen > known else 0.5) * (min(seen, 2 * known) - known)

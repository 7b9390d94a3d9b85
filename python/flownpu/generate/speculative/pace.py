# SPDX-License-Identifier: Apache-2.0
"""How many candidates a step verifies: by what was kept of earlier ones, and by what steps took."""

from dataclasses import dataclass, field

__all__ = ["Pace", "StepTimes"]

# A new observation's weight in the moving means: some ten count.
_WEIGHT = 0.1
# What candidates in vain may cost, of the time that plain steps take: decoding with candidates that are never right
# takes this much longer, and as long as FREE_STEPS, once.
_ALLOWANCE = 0.01
_FREE_STEPS = 1.5
# Gains are kept for a few losses, not for all of a long text.
_MOST_CREDIT = 4.0
# Before anything is known: a candidate is as often right as not, and a row beside others costs a tenth of a step.
_FIRST_RATE = 0.5
_ROW_COST = 0.1


@dataclass
class StepTimes:
    """What steps take, by their rows; one for all sources of a model's candidates."""

    seconds: dict[int, float] = field(default_factory=dict)

    @property
    def plain(self) -> float | None:
        """Seconds of a step of one row, if there was one."""
        return self.seconds.get(1)

    def add(self, rows: int, seconds: float) -> None:
        """A step with so many rows took so long."""
        if self.plain is None:
            if rows == 1:
                self.seconds[1] = seconds
            return
        known = self.seconds.get(rows)
        if known is None:  # only the estimate is: half of what is seen is believed
            known = self.cost(rows) * self.plain
            self.seconds[rows] = (known + min(seconds, 2 * known)) / 2
        else:
            self.seconds[rows] = _moved(known, seconds)

    def cost(self, rows: int) -> float:
        """What a step of so many rows takes, in plain steps: measured, or by the nearest that was."""
        if self.plain is None:
            return 1 + _ROW_COST * (rows - 1)
        nearest = min(self.seconds, key=lambda known: abs(known - rows))
        return max(1.0, self.seconds[nearest] / self.plain + _ROW_COST * (rows - nearest))


@dataclass
class Pace:
    """The candidates of one source. Costs and credit are in plain steps."""

    times: StepTimes
    most: int
    """Candidates of a step at most."""
    proposing: float
    """What it costs to find one candidate; until that is known, what it may be."""
    rate: float = _FIRST_RATE
    """How probable it is that a candidate is kept whose predecessors were."""
    credit: float = _FREE_STEPS
    """What candidates in vain may still cost."""

    def count(self) -> int:
        """How many candidates the next step may have: so many that a token costs least, none where credit is short."""
        if self.times.plain is None:
            return 0
        best = min(range(self.most + 1), key=self._cost_per_token)
        # Where it does not pay, one candidate now and then shows whether it has come to: not from what is for losses.
        wanted, left = (best, self.credit) if best else (1, self.credit - _FREE_STEPS / 2)
        return wanted if self._cost(wanted) - 1 <= left else 0

    def stepped(self) -> None:
        """There was a plain step."""
        self.credit = min(self.credit + _ALLOWANCE, _MOST_CREDIT)

    def verified(self, candidates: int, kept: int, seconds: float) -> None:
        """There was a step with candidates.

        Args:
            candidates: how many.
            kept: how many were what the model chose.
            seconds: to find them.
        """
        for place in range(min(kept + 1, candidates)):
            self.rate += _WEIGHT * ((place < kept) - self.rate)
        if self.times.plain is not None:
            self.proposing = _moved(self.proposing, seconds / candidates / self.times.plain)
        self.credit = min(self.credit + 1 + kept - self._cost(candidates), _MOST_CREDIT)

    def _cost(self, candidates: int) -> float:
        return self.times.cost(1 + candidates) + candidates * self.proposing

    def _cost_per_token(self, candidates: int) -> float:
        """The cost over 1 + r + .. + r^k, the tokens to be expected (Leviathan et al. 2023, eq. 1)."""
        return self._cost(candidates) / sum(self.rate**power for power in range(candidates + 1))


def _moved(known: float, seen: float) -> float:
    """A moving mean after another observation; one that other work or a first allocation made longer counts less."""
    return known + (_WEIGHT if seen > known else 0.5) * (min(seen, 2 * known) - known)

# SPDX-License-Identifier: Apache-2.0
"""Reports how far a conversion has come."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class Progress:
    """How far a stage has come: `done` of `total` units. The display computes rate and remaining time."""

    stage: str
    """The work of the stage, such as "quantise", or "sum" for computing checksums."""
    done: int
    total: int
    unit: Literal["weights", "B"]


ProgressCallback: TypeAlias = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """A callback that ignores the progress."""


class Stage:
    """Counts the units of one stage."""

    def __init__(self, report: ProgressCallback, stage: str, total: int, unit: Literal["weights", "B"]) -> None:
        self._report, self._stage, self._total, self._unit = report, stage, total, unit
        self._done = 0
        self.advance(0)

    def advance(self, units: int) -> None:
        """Adds finished units and reports."""
        self._done += units
        self._report(Progress(self._stage, self._done, self._total, self._unit))

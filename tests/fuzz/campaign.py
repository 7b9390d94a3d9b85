# SPDX-License-Identifier: Apache-2.0
"""Many cases in a row: hypothesis makes and shrinks them, in short runs of its own, so that one finding ends none.

A run's seed follows from the campaign's and from its number: the same command runs the same cases.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

    from tests.fuzz.oracle import Finding, Verdict

# Cases of one run of hypothesis, which keeps all that it made in a tree, and shrinks what it found at a run's end.
CASES_OF_A_RUN = 200
# hypothesis shrinks for five minutes; what it has by then is small enough.
SHRINK_SECONDS = 60.0


class _FoundError(Exception):
    pass


@dataclass
class Campaign:
    """Runs cases and keeps what came of them.

    `judge`: of a case. `report`: hears of each shrunk finding. `advance`: hears how many cases have been run.
    """

    strategy: SearchStrategy[Any]
    judge: Callable[[Any], Verdict]
    report: Callable[[Any, Finding], None]
    advance: Callable[[int], None] = lambda _: None
    counts: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    cases: int = 0

    def run(self, cases: int, seed: int, minutes: float | None = None) -> None:
        """Runs that many cases, or until time is up."""
        end = None if minutes is None else time.monotonic() + 60 * minutes
        number = 0
        while self.cases < cases and (end is None or time.monotonic() < end):
            self._one_run(min(CASES_OF_A_RUN, cases - self.cases), seed * 1_000_003 + number)
            number += 1

    def _one_run(self, cases: int, seed: int) -> None:
        target: list[str] = []
        failing: list[tuple[Any, Finding]] = []

        shrink_until = math.inf

        def check(case: Any) -> None:
            nonlocal shrink_until
            if time.monotonic() > shrink_until:
                return
            verdict = self.judge(case)
            if not target:
                self.cases += 1
                self.counts["finding" if verdict.finding else verdict.category] += 1
                self.advance(self.cases)
            finding = verdict.finding
            if finding is None:
                return
            known = finding.signature in self.findings
            if not target:
                self.findings[finding.signature] += 1
                if not known:
                    target.append(finding.signature)
                    shrink_until = time.monotonic() + SHRINK_SECONDS
            # While one is shrunk, others do not count.
            if target and finding.signature == target[0]:
                failing.append((case, finding))
                raise _FoundError

        test = settings(
            max_examples=cases,
            database=None,
            deadline=None,
            derandomize=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            print_blob=False,
        )(hypothesis.given(self.strategy)(check))
        try:
            hypothesis.seed(seed)(test)()
        except (_FoundError, hypothesis.errors.Flaky):
            if not failing:  # flaky is what no case of ours should raise
                raise
            # The last one that failed is the smallest. Flaky: it does not always fail, or time was up.
            self.report(*failing[-1])

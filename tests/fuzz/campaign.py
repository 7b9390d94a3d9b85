# SPDX-License-Identifier: Apache-2.0
"""Runs many cases, which hypothesis makes and shrinks, in short runs of hypothesis, so that a finding does not end all.

A run's seed follows from the campaign's seed and the run's number: the same command runs the same cases.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy

from tests.fuzz.oracle import Finding, Verdict

# Cases of one run of hypothesis, which keeps all cases of a run in a tree, and shrinks a finding at the run's end.
CASES_OF_A_RUN = 200
# hypothesis would shrink for up to five minutes; what it has after this time is small enough.
SHRINK_SECONDS = 60.0


class _FoundError(Exception):
    pass


@dataclass
class Campaign:
    """Runs cases, and counts verdicts and findings.

    `judge` judges a case. `report` is called with each shrunk finding, `advance` with the number of cases so far.
    """

    strategy: SearchStrategy[Any]
    judge: Callable[[Any], Verdict]
    report: Callable[[Any, Finding], None]
    advance: Callable[[int], None] = lambda _: None
    counts: Counter[str] = field(default_factory=Counter)
    findings: Counter[str] = field(default_factory=Counter)
    cases: int = 0

    def run(self, cases: int, seed: int, minutes: float | None = None) -> None:
        """Runs `cases` cases, or stops when the time is up."""
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
            # While a finding is shrunk, findings with another signature do not count.
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
            if not failing:  # Flaky without a finding: an error in the strategy
                raise
            # The last failing case is the smallest. Flaky is raised if it does not always fail, or if time was up.
            self.report(*failing[-1])

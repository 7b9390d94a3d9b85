# SPDX-License-Identifier: Apache-2.0
"""The result of a stage, or of a GPU kernel's variant, and its form in a report."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from flownpu.selftest.reference.case import Deviation


class Outcome(StrEnum):
    """The outcome of a stage, or of a kernel's variant."""

    PASSED = "passed"
    WRONG = "wrong"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NOT_BUILT = "not built"


@dataclass(frozen=True)
class Result:
    """The result of a stage, or of a kernel's variant.

    Attributes:
        name: the name of the stage or variant.
        outcome: how it ended.
        text: what went wrong; "": nothing.
        share: the largest error as a multiple of its tolerance; None: nothing was compared.
        error: the largest error.
    """

    name: str
    outcome: Outcome
    text: str = ""
    share: float | None = None
    error: float | None = None

    @property
    def passed(self) -> bool:
        """Whether its numbers are right."""
        return self.outcome is Outcome.PASSED

    def compared(self, deviations: Mapping[str, Deviation]) -> Self:
        """The result after its outputs were compared; `deviations` has at least one, by the outputs' names."""
        wrong = [f"{output}: {deviation.text}" for output, deviation in deviations.items() if deviation.beyond]
        return replace(
            self, outcome=Outcome.WRONG if wrong else Outcome.PASSED, text="; ".join(wrong),
            share=max(deviation.share for deviation in deviations.values()),
            error=max(deviation.error for deviation in deviations.values()),
        )  # fmt: skip

    def record(self, key: str) -> dict[str, Any]:
        """The result for a JSON report, with its name under `key`.

        None replaces numbers that are not finite, which JSON lacks; `text` names them.
        """
        record = asdict(self)
        infinite = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
        return {key: record.pop("name")} | record | dict.fromkeys(infinite)

# SPDX-License-Identifier: Apache-2.0
"""A violation of the hardware's limits, as the checker reports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One broken limit: the place, the resource, how much of it is needed and how much there is."""

    place: str
    resource: str
    need: object
    have: object
    detail: str = ""

    def __str__(self) -> str:
        text = f"[{self.place}] {self.resource}: need {self.need}, have {self.have}"
        return f"{text} ({self.detail})" if self.detail else text


class PlanError(ValueError):
    """A plan breaks limits: `violations` holds them, and the message has a line for each."""

    def __init__(self, name: str, violations: list[Violation]) -> None:
        self.violations = violations
        super().__init__(f"[plan {name}] breaks the hardware's limits:\n" + "\n".join(map(str, violations)))

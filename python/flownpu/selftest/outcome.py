# SPDX-License-Identifier: Apache-2.0
"""What became of something that was tried, and how a report writes it."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

__all__ = ["Outcome", "finite"]


class Outcome(StrEnum):
    """What became of a rung of the ladder, or of a kernel's variant."""

    PASSED = "passed"
    WRONG = "wrong"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NOT_BUILT = "not built"


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: what is infinitely far off is null, and `text` says what came."""
    infinite = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
    return record | dict.fromkeys(infinite)

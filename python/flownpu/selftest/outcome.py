# SPDX-License-Identifier: Apache-2.0
"""How a trial ended, and how a report writes it."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

__all__ = ["Outcome", "finite"]


class Outcome(StrEnum):
    """How a rung of the ladder, or a kernel's variant, ended."""

    PASSED = "passed"
    WRONG = "wrong"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NOT_BUILT = "not built"


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """A record with None for numbers that are not finite, which JSON lacks; the record's `text` says what came."""
    infinite = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
    return record | dict.fromkeys(infinite)

# SPDX-License-Identifier: Apache-2.0
"""What the checks of `flownpu doctor` are made of."""

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

__all__ = ["Check", "Host", "Status"]


class Status(StrEnum):
    """What a check found."""

    GOOD = "good"
    NOTE = "note"
    """Something optional is absent; what needs it is named."""
    BAD = "bad"


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """The command that mends it; empty if there is nothing to mend."""


@dataclass(frozen=True)
class Host:
    """The machine that is looked at; tests make one up."""

    root: Path = Path("/")
    """Where /dev, /proc and /sys are."""
    may_use: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    memlock: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    """Bytes that a process may lock in memory; -1: any number."""
    has_plugin: Callable[[], bool] = lambda: True
    """Whether this FlowNPU was built with XRT's headers."""

# SPDX-License-Identifier: Apache-2.0
"""The parts of the checks of `flownpu doctor`."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

# The group `render` may open the device files of NPUs and GPUs.
JOIN_THE_GROUP = 'sudo usermod -aG render "$USER", then log in again'


class Status(StrEnum):
    """The result of a check."""

    GOOD = "good"
    NOTE = "note"
    """Something optional is absent; the text names what needs it."""
    BAD = "bad"


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """The command that mends it; empty if there is nothing to mend."""


def _kernel_log() -> str:
    """The kernel's log; empty where only root may read it."""
    try:
        return subprocess.run(["dmesg"], check=False, capture_output=True, text=True, errors="replace").stdout
    except OSError:
        return ""


@dataclass(frozen=True)
class Host:
    """The machine that is examined; tests pass one that they made up."""

    root: Path = Path("/")
    """The folder that holds /dev, /etc, /opt, /proc, /sys and /usr."""
    may_use: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    kernel_log: Callable[[], str] = _kernel_log
    load_plugin: Callable[[], str | None] = lambda: ""
    """Loads FlowNPU's plugin for XRT: "" if it loads, the loader's message if not, None if this build has none."""

    def read(self, path: str) -> str:
        """A small text file below the root; "" if it is missing or this user may not read it."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

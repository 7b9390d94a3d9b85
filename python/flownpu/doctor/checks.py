# SPDX-License-Identifier: Apache-2.0
"""What the checks of `flownpu doctor` are made of."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

__all__ = ["JOIN_THE_GROUP", "Check", "Host", "Status"]

# Who may open the device files of NPUs and GPUs.
JOIN_THE_GROUP = 'sudo usermod -aG render "$USER", then log in again'


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


def _kernel_log() -> str:
    """What the kernel said; nothing where only root may read it."""
    try:
        return subprocess.run(["dmesg"], check=False, capture_output=True, text=True, errors="replace").stdout
    except OSError:
        return ""


@dataclass(frozen=True)
class Host:
    """The machine that is looked at; tests make one up."""

    root: Path = Path("/")
    """Where /dev, /etc, /opt, /proc, /sys and /usr are."""
    may_use: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    kernel_log: Callable[[], str] = _kernel_log
    load_plugin: Callable[[], str | None] = lambda: ""
    """Loads what of this FlowNPU talks to XRT: the loader's words if it cannot; None: this build has none."""

    def read(self, path: str) -> str:
        """A small text file below the root; empty where there is none, or none that this user may read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

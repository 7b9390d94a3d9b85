# SPDX-License-Identifier: Apache-2.0
"""How this FlowNPU was built: what a report of a bug needs beside the version."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BuildInfo", "build_info"]


@dataclass(frozen=True)
class BuildInfo:
    """What the build wrote down (CMakeLists.txt); a field is empty where it did not know."""

    commit: str = ""
    """With `-dirty` if files differed from it."""
    compiler: str = ""
    """Name and version: "GNU 12.2.0"."""
    platform: str = ""
    """What it was built for: "manylinux_2_28_x86_64", or "this machine"."""
    xrt: str = ""
    """Version of XRT's headers; empty if it cannot drive an NPU."""

    def __str__(self) -> str:
        if not self.compiler:
            return "of a source tree"
        commit = self.commit or "unknown"
        return f"commit {commit}, {self.compiler} for {self.platform}, {f'XRT {self.xrt}' if self.xrt else 'no XRT'}"


def build_info() -> BuildInfo:
    """Reads what the build wrote; of a source tree that was not installed, nothing is known."""
    # As of the library's file: an editable install spreads the package over two folders.
    for folder in sys.modules["flownpu"].__path__:
        file = Path(folder) / "build.json"
        if file.is_file():
            return BuildInfo(**json.loads(file.read_text(encoding="utf-8")))
    return BuildInfo()

# SPDX-License-Identifier: Apache-2.0
"""The facts of this FlowNPU's build that a bug report needs besides the version."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BuildInfo:
    """The facts that the build recorded in build.json (CMakeLists.txt); one that it could not determine is empty."""

    commit: str = ""
    """The commit's hash, with `-dirty` appended if files differed from it."""
    compiler: str = ""
    """Name and version: "GNU 12.2.0"."""
    platform: str = ""
    """The platform that it was built for: "manylinux_2_28_x86_64", or "this machine"."""
    xrt: str = ""
    """Version of XRT's headers; empty if this build cannot drive an NPU."""

    def __str__(self) -> str:
        if not self.compiler:
            return "of a source tree"
        commit = self.commit or "unknown"
        return f"commit {commit}, {self.compiler} for {self.platform}, {f'XRT {self.xrt}' if self.xrt else 'no XRT'}"


def build_info() -> BuildInfo:
    """Reads build.json; all fields are empty if there is none, as in a source tree that was not installed."""
    # An editable install spreads the package over the source tree and site-packages: look in both.
    for folder in sys.modules["flownpu"].__path__:
        file = Path(folder) / "build.json"
        if file.is_file():
            return BuildInfo(**json.loads(file.read_text(encoding="utf-8")))
    return BuildInfo()

# SPDX-License-Identifier: Apache-2.0
"""The clang in Zig's package on PyPI: it compiles for other systems, whose C libraries it has, and links libc++ in."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.release.building import ROOT

TOOLCHAIN = ROOT / "scripts" / "release" / "zig.cmake"


@dataclass(frozen=True)
class Zig:
    """The Zig of a Python environment.

    Attributes:
        program: path of Zig.
        target: Zig's name of the system for which it compiles: "x86_64-windows-gnu".
        work: gets the archiver's script and Zig's cache.
    """

    program: str
    target: str
    work: Path

    @classmethod
    def of(cls, environment: Path, work: Path, target: str) -> Zig:
        """The Zig in a Python's environment."""
        find = "import ziglang, pathlib; print(pathlib.Path(ziglang.__file__).with_name('zig'))"
        said = subprocess.run([environment, "-c", find], check=True, capture_output=True, text=True).stdout
        zig = cls(said.strip(), target, work)
        work.mkdir(parents=True, exist_ok=True)
        zig.archiver.write_text(f'#!/bin/sh\nexec "{zig.program}" ar "$@"\n', encoding="utf-8")
        zig.archiver.chmod(0o755)
        return zig

    @property
    def archiver(self) -> Path:
        """A script that runs `zig ar`, for tools that take an archiver as one word."""
        return self.work / "zig-ar"

    def variables(self) -> dict[str, str]:
        """Environment variables for Zig, and for CMake with TOOLCHAIN."""
        caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(self.work / "zig"))
        # CCC_OVERRIDE_OPTIONS adds options to every run of clang, also when Zig compiles libc++ at its first link.
        # Without these options the debug information would name the folders of Zig and of that link.
        names = f"# +-ffile-prefix-map={Path(self.program).parent}=zig +-fdebug-compilation-dir=build"
        mine = {"ZIG": self.program, "ZIG_AR": str(self.archiver), "ZIG_TARGET": self.target}
        return caches | mine | {"CCC_OVERRIDE_OPTIONS": names}

    def link(self, *arguments: str | Path) -> None:
        """Compiles and links one file without CMake."""
        command = [self.program, "c++", f"--target={self.target}", *arguments]
        subprocess.run(command, env=os.environ | self.variables(), check=True)

# SPDX-License-Identifier: Apache-2.0
"""clang as Zig brings it, from PyPI: it compiles for other systems, whose C libraries it has, and links libc++ in."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.release.building import ROOT

__all__ = ["TOOLCHAIN", "Zig"]

TOOLCHAIN = ROOT / "scripts" / "release" / "zig.cmake"


@dataclass(frozen=True)
class Zig:
    """Zig of an environment.

    Attributes:
        program: its path.
        target: what it compiles for, as Zig names it: "x86_64-windows-gnu".
        work: gets its archiver, and what it has compiled, to be found again.
    """

    program: str
    target: str
    work: Path

    @classmethod
    def of(cls, environment: Path, work: Path, target: str) -> Zig:
        """That of the environment of a Python."""
        find = "import ziglang, pathlib; print(pathlib.Path(ziglang.__file__).with_name('zig'))"
        said = subprocess.run([environment, "-c", find], check=True, capture_output=True, text=True).stdout
        zig = cls(said.strip(), target, work)
        work.mkdir(parents=True, exist_ok=True)
        zig.archiver.write_text(f'#!/bin/sh\nexec "{zig.program}" ar "$@"\n', encoding="utf-8")
        zig.archiver.chmod(0o755)
        return zig

    @property
    def archiver(self) -> Path:
        """A program for what takes one word for it."""
        return self.work / "zig-ar"

    def variables(self) -> dict[str, str]:
        """Variables of the environment, for Zig and for CMake, to which TOOLCHAIN is given."""
        caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(self.work / "zig"))
        # clang's own way to be given options behind others' backs: Zig compiles libc++ when it first links, in whatever
        # folder that is, and the debug information would name it.
        names = f"# +-ffile-prefix-map={Path(self.program).parent}=zig +-fdebug-compilation-dir=build"
        mine = {"ZIG": self.program, "ZIG_AR": str(self.archiver), "ZIG_TARGET": self.target}
        return caches | mine | {"CCC_OVERRIDE_OPTIONS": names}

    def link(self, *arguments: str | Path) -> None:
        """Compiles and links one thing that is not CMake's."""
        command = [self.program, "c++", f"--target={self.target}", *arguments]
        subprocess.run(command, env=os.environ | self.variables(), check=True)

# SPDX-License-Identifier: Apache-2.0
"""clang as Zig brings it, from PyPI: it compiles for other systems, whose C libraries it has, and links libc++ in."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.release.building import ROOT

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TOOLCHAIN", "Zig"]

TOOLCHAIN = ROOT / "scripts" / "release" / "zig.cmake"
# Programs for what takes one word for them.
TOOLS = {
    "ar": 'exec "{zig}" ar "$@"',
    "objcopy": 'exec "{zig}" objcopy "$@"',
    "strip": '"{zig}" objcopy --strip-all "$1" "$1.stripped" && mv "$1.stripped" "$1"',
}


@dataclass(frozen=True)
class Zig:
    """Zig of an environment.

    Attributes:
        program: its path.
        target: what it compiles for, as Zig names it: "x86_64-windows-gnu".
        work: gets its tools, and what it has compiled, to be found again.
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
        for name, command in TOOLS.items():
            program = zig.tool(name)
            program.write_text(f"#!/bin/sh\n{command.format(zig=zig.program)}\n", encoding="utf-8")
            program.chmod(0o755)
        return zig

    def tool(self, name: str) -> Path:
        """A program that is one of TOOLS."""
        return self.work / f"zig-{name}"

    def variables(self) -> dict[str, str]:
        """Variables of the environment, for Zig and for CMake, to which TOOLCHAIN is given."""
        caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(self.work / "zig"))
        tools = {f"ZIG_{name.upper()}": str(self.tool(name)) for name in TOOLS}
        return caches | tools | {"ZIG": self.program, "ZIG_TARGET": self.target}

    def link(self, *arguments: str | Path) -> None:
        """Compiles and links one thing that is not CMake's."""
        command = [self.program, "c++", f"--target={self.target}", *arguments]
        subprocess.run(command, env=os.environ | self.variables(), check=True)

# SPDX-License-Identifier: Apache-2.0
"""Builds wheels for Linux on Arm, by Zig's clang with the functions of glibc 2.28 (zig.cmake).

None of it has run on such a processor: emulated.py tries it where there is only an emulator.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from scripts.debian_packages import UnavailableError
from scripts.release.building import ROOT, commit, pip_wheel, prefix_maps
from scripts.release.zig import TOOLCHAIN

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.release.zig import Zig

__all__ = ["FOLDER", "PLATFORM", "TARGET", "build_wheel", "find_objcopy"]

TARGET = "aarch64-linux-gnu.2.28"
PLATFORM = "manylinux_2_28_aarch64"
FOLDER = "cmake-aarch64"
"""CMake's, below the one in which wheels are built."""


def find_objcopy() -> str:
    """The program that takes Arm's files apart; `aarch64-linux-gnu-strip` is of the same package (zig.cmake).

    Raises:
        UnavailableError: there is none.
    """
    program = shutil.which("aarch64-linux-gnu-objcopy")
    if program is None:
        raise UnavailableError("expected aarch64-linux-gnu-objcopy, found none: apt install binutils-aarch64-linux-gnu")
    return program


def build_wheel(python: Path, pythons: list[Path], source: Path, zig: Zig, work: Path, dist: Path) -> Path:
    """Builds one wheel, with this machine's headers of Python: they say nothing that is otherwise on Arm.

    Args:
        python: builds it, and is the one that it is for, but for its processor.
        pythons: all that build.
        source: the folder of sources.
        zig: compiles.
        work: FOLDER in it gets what is compiled.
        dist: gets the wheel.
    """
    folders: dict[Path | str, str] = {
        ROOT: source.name,
        work / FOLDER: "build",
        source: source.name,
    }
    script = "import sysconfig; print(sysconfig.get_path('include'))"
    headers = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.strip()
    defines: dict[str, object] = {
        "CMAKE_TOOLCHAIN_FILE": TOOLCHAIN,
        "CMAKE_CXX_FLAGS": f"-g1 {prefix_maps(folders, pythons)}",
        "FLOWNPU_COMMIT": commit()[0],
        "FLOWNPU_PLATFORM": PLATFORM,
        "Python_INCLUDE_DIR": headers,
    }
    return pip_wheel(python, source, work / FOLDER, dist, platform=PLATFORM, defines=defines, **zig.variables())

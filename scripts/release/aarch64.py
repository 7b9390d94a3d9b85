# SPDX-License-Identifier: Apache-2.0
"""Builds wheels for Linux on Arm, by Zig's clang with the functions of glibc 2.28 (zig.cmake).

None of it has run on such a processor: emulated.py tries it where there is only an emulator.
"""

from __future__ import annotations

import os
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
        "CMAKE_CXX_STANDARD_LIBRARIES": _compiler_rt(zig, work / "compiler-rt"),
        "CMAKE_TOOLCHAIN_FILE": TOOLCHAIN,
        "CMAKE_CXX_FLAGS": f"-g1 {prefix_maps(folders, pythons)}",
        "FLOWNPU_COMMIT": commit()[0],
        "FLOWNPU_PLATFORM": PLATFORM,
        "Python_INCLUDE_DIR": headers,
    }
    return pip_wheel(python, source, work / FOLDER, dist, platform=PLATFORM, defines=defines, **zig.variables())


def _compiler_rt(zig: Zig, work: Path) -> Path:
    """The functions that clang's code calls, as Zig compiles them when it first links, without debug information.

    That names Zig's folder, which no option of clang's changes: they are in Zig. A link that finds them here takes none
    of those that Zig adds.
    """
    library = work / "libcompiler_rt.a"
    if library.is_file():
        return library
    work.mkdir(parents=True, exist_ok=True)
    nothing, cache = work / "nothing.c", work / "cache"
    nothing.write_text("", encoding="utf-8")
    variables = os.environ | dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(cache))
    link: list[str | Path] = [
        zig.program,
        "cc",
        f"--target={zig.target}",
        "-g1",
        "-shared",
        nothing,
        "-o",
        work / "nothing.so",
    ]
    subprocess.run(link, env=variables, check=True)
    (theirs,) = cache.glob("o/*/libcompiler_rt.a")
    functions = work / "compiler_rt.o"  # one file is all of it
    functions.write_bytes(subprocess.run([zig.program, "ar", "p", theirs], check=True, stdout=subprocess.PIPE).stdout)
    subprocess.run([find_objcopy(), "--strip-debug", functions], check=True)
    subprocess.run([zig.program, "ar", "crs", library, functions], check=True)
    return library

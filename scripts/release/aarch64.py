# SPDX-License-Identifier: Apache-2.0
"""Builds wheels for Linux on Arm, with Zig's clang, for glibc 2.28 (zig.cmake).

The wheels have not run on such a processor: emulated.py tries them with an emulator.
"""

import os
import shutil
import subprocess
from pathlib import Path

from scripts.debian_packages import UnavailableError
from scripts.release.building import ROOT, commit, pip_wheel, prefix_maps
from scripts.release.zig import TOOLCHAIN, Zig

TARGET = "aarch64-linux-gnu.2.28"
PLATFORM = "manylinux_2_28_aarch64"
FOLDER = "cmake-aarch64"
"""Name of CMake's folder, below the folder in which wheels are built."""


def find_objcopy() -> str:
    """The objcopy for Arm's files; `aarch64-linux-gnu-strip`, which zig.cmake uses, is in the same package.

    Raises:
        UnavailableError: there is none.
    """
    program = shutil.which("aarch64-linux-gnu-objcopy")
    if program is None:
        raise UnavailableError("expected aarch64-linux-gnu-objcopy, found none: apt install binutils-aarch64-linux-gnu")
    return program


def build_wheel(python: Path, pythons: list[Path], source: Path, zig: Zig, work: Path, dist: Path) -> Path:
    """Builds one wheel, with this machine's headers of Python, which are the same on Arm.

    Args:
        python: the Python that builds it; the wheel is for the same version.
        pythons: all Pythons that build wheels, see `prefix_maps`.
        source: the folder of sources.
        zig: the compiler.
        work: FOLDER in it gets what is compiled.
        dist: gets the wheel.
    """
    folders: dict[Path | str, str] = {ROOT: source.name, work / FOLDER: "build", source: source.name}
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
    """compiler-rt, the functions that clang's code calls, without debug information.

    Zig compiles it when it first links. Its debug information names Zig's folder, which no option of clang changes. A
    link that is given this library takes none of the functions that Zig adds.
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
    functions = work / "compiler_rt.o"  # the library has this one file
    functions.write_bytes(subprocess.run([zig.program, "ar", "p", theirs], check=True, stdout=subprocess.PIPE).stdout)
    subprocess.run([find_objcopy(), "--strip-debug", functions], check=True)
    subprocess.run([zig.program, "ar", "crs", library, functions], check=True)
    return library

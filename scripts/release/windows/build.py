# SPDX-License-Identifier: Apache-2.0
"""Compiles for Windows x64, with clang as Zig brings it from PyPI (toolchain.cmake)."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.release import wheels
from scripts.release.wheels import ROOT

if TYPE_CHECKING:
    from scripts.release.windows.python import Python

__all__ = ["LIBRARIES", "Compiler", "build_wheel"]

LIBRARIES = ("flownpu_ep.dll", "flownpu_aie_xdna.dll", "flownpu_aie_xdna2.dll")
TAG = "win_amd64"


@dataclass(frozen=True)
class Compiler:
    """Zig of an environment.

    Attributes:
        zig: its program.
        work: gets what it has compiled, to be found again.
    """

    zig: str
    work: Path

    @classmethod
    def of(cls, environment: Path, work: Path) -> Compiler:
        """That of the environment of a Python."""
        find = "import ziglang, pathlib; print(pathlib.Path(ziglang.__file__).with_name('zig'))"
        said = subprocess.run([environment, "-c", find], check=True, capture_output=True, text=True).stdout
        return cls(said.strip(), work)

    def variables(self) -> dict[str, str]:
        """The environment's variables, for CMake and this compiler."""
        archiver = self.work / "zig-ar"
        self.work.mkdir(parents=True, exist_ok=True)
        archiver.write_text(f'#!/bin/sh\nexec "{self.zig}" ar "$@"\n', encoding="utf-8")
        archiver.chmod(0o755)
        caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(self.work / "zig"))
        found = os.environ | caches | {"ZIG": self.zig, "ZIG_AR": str(archiver)}
        for name in ("CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_C_COMPILER_LAUNCHER"):  # Zig keeps what it has compiled
            found.pop(name, None)
        return found

    def link(self, *arguments: str | Path) -> None:
        """Compiles and links one thing that is not CMake's."""
        subprocess.run([self.zig, "c++", "--target=x86_64-windows-gnu", *arguments], env=self.variables(), check=True)


def build_wheel(environment: Path, python: Python, compiler: Compiler, work: Path, dist: Path) -> Path:
    """Builds the wheel of one Python; all are built in one folder, so that only what calls Python is compiled again.

    Args:
        environment: the Python that builds, with what is needed for that.
        python: the one that it is for.
        compiler: compiles.
        work: `cmake` in it gets what is compiled, also the programs of tests/windows.
        dist: gets the wheel.

    Raises:
        subprocess.CalledProcessError: a step failed; it has said why.
    """
    defines = {
        "CMAKE_TOOLCHAIN_FILE": ROOT / "scripts" / "release" / "windows" / "toolchain.cmake",
        "FLOWNPU_COMMIT": wheels.commit()[0],
        "FLOWNPU_PLATFORM": TAG,
        "FLOWNPU_TESTING": "ON",
        "FLOWNPU_WERROR": "ON",
        "Python_INCLUDE_DIR": python.headers(),
        "Python_LIBRARY": python.import_library(),
        "Python_SABI_LIBRARY": python.stable_import_library(),
    }
    settings = {f"cmake.define.{name}": value for name, value in defines.items()} | {"build-dir": work / "cmake"}
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    # What was found of another Python would be taken for this one's.
    (work / "cmake" / "CMakeCache.txt").unlink(missing_ok=True)
    plain = work / "plain"
    shutil.rmtree(plain, ignore_errors=True)
    variables = compiler.variables()
    variables["PATH"] = f"{environment.parent}{os.pathsep}{variables['PATH']}"
    command = [str(environment), "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(plain), *options, str(ROOT)], env=variables, check=True)
    (wheel,) = plain.iterdir()
    retag = [str(environment), "-m", "wheel", "tags", "--platform-tag", TAG, str(wheel)]
    said = subprocess.run(retag, check=True, stdout=subprocess.PIPE, text=True).stdout
    dist.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(plain / said.split()[-1], dist / said.split()[-1]))

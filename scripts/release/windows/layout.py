# SPDX-License-Identifier: Apache-2.0
"""Lays out what was built as a user of Windows has it, for the tests that run it under Wine."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.release.wheels import tools
from scripts.release.windows.build import LIBRARIES
from scripts.release.windows.python import download
from scripts.release.windows.wine import RUN_TIME

if TYPE_CHECKING:
    from scripts.release.windows.build import Compiler
    from scripts.release.windows.python import Python

__all__ = ["install", "lay_out_program"]

REDISTRIBUTABLE = "msvc-runtime==14.51.36231"
# What else Wine 8 lacks (tests/windows).
LACKING = "bcryptprimitives.dll"
# Microsoft's packages; all of them have wheels for this Python.
RUNTIMES = ("onnxruntime", "onnxruntime-genai")
ANY_PYTHON = 12
EXTRAS = "genai,convert,embed,serve"
# click and tqdm ask for it on Windows, which pip, run elsewhere, does not see.
OF_WINDOWS = ("colorama", "tzdata")


def _pinned() -> dict[str, str]:
    """The versions of what tests pin (pyproject.toml), by name."""
    pairs = (line.partition("==") for line in tools("test"))
    return {name: version for name, equals, version in pairs if equals}


def _runtimes(work: Path) -> list[Path]:
    """Microsoft's libraries, unpacked from the wheels for Windows."""
    wanted = [*(f"{name}=={_pinned()[name]}" for name in RUNTIMES), REDISTRIBUTABLE]
    found = []
    for wheel in download(work / "wheels", wanted, ANY_PYTHON):
        with zipfile.ZipFile(wheel) as archive:
            for name in (name for name in archive.namelist() if name.endswith(".dll")):
                found.append(work / "runtimes" / Path(name).name)
                found[-1].parent.mkdir(parents=True, exist_ok=True)
                found[-1].write_bytes(archive.read(name))
    return found


def lay_out_program(work: Path) -> None:
    """Puts tests/windows/generate.cc into `work`/program, with all the libraries that it loads."""
    folder = work / "program"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in [*_runtimes(work), *(work / "cmake" / name for name in (*LIBRARIES, "generate.exe", LACKING))]:
        shutil.copy(file, folder)


def install(python: Python, wheel: Path, compiler: Compiler, work: Path) -> None:
    """Puts a Python for Windows into `work`/python3.N, with a wheel of FlowNPU and what that requires."""
    folder = work / f"python3.{python.version}"
    python.install(folder, work / "cmake" / "python.exe", compiler)
    tags = ["--platform", "win_amd64", "--python-version", f"3.{python.version}", "--only-binary=:all:"]
    place = ["--target", str(folder / "Lib" / "site-packages")]
    wanted = [f"{wheel}[{EXTRAS}]", *(f"{name}=={_pinned()[name]}" for name in RUNTIMES), *OF_WINDOWS]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *tags, *place, *wanted], check=True)
    # Beside the program libraries are looked for first.
    for file in [*_runtimes(work), work / "cmake" / LACKING]:
        if file.stem in RUN_TIME or file.name == LACKING:
            shutil.copy(file, folder)

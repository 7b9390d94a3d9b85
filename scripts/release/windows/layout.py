# SPDX-License-Identifier: Apache-2.0
"""Lays out the built files as on a user's Windows, for the tests that run them under Wine."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from scripts.release.building import ROOT, tools
from scripts.release.windows.build import LIBRARIES
from scripts.release.windows.python import Python, download, exported
from scripts.release.windows.wine import RUN_TIME
from scripts.release.zig import Zig

REDISTRIBUTABLE = "msvc-runtime==14.51.36231"
# A library that Wine 8 lacks; tests/windows has a substitute.
LACKING = "bcryptprimitives.dll"
# Microsoft's packages; all of them have wheels for this Python.
RUNTIMES = ("onnxruntime", "onnxruntime-genai")
ANY_PYTHON = 12
EXTRAS = "genai,convert,embed,serve"
# Packages that click and tqdm need only on Windows, which pip does not see on other systems.
OF_WINDOWS = ("colorama", "tzdata")


def _pinned() -> dict[str, str]:
    """The versions of the packages that tests pin (pyproject.toml), by name."""
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


def _c_run_time(folder: Path, zig: Zig, work: Path) -> None:
    """Puts a ucrtbase.dll into `folder` with functions that Wine 8's lacks (tests/windows/ucrtbase.cc).

    It forwards all other functions to Wine's library, which is put beside it under another name. The mark of Wine's own
    libraries is removed, because Wine would otherwise load its own library of that name.
    """
    source = ROOT / "tests" / "windows" / "ucrtbase.cc"
    theirs = work / "prefix" / "drive_c" / "windows" / "system32" / "ucrtbase.dll"
    (folder / "ucrtwine.dll").write_bytes(theirs.read_bytes().replace(b"Wine builtin DLL", bytes(16), 1))
    ours = work / "ucrtbase.dll"
    zig.link("-shared", "-O2", source, "-o", ours)
    here = exported(ours)
    lines = [name if name in here else f"{name}=ucrtwine.{name}" for name in exported(theirs)]
    definitions = work / "ucrtbase.def"
    definitions.write_text("\n".join(["LIBRARY ucrtbase.dll", "EXPORTS", *lines, ""]), encoding="utf-8")
    zig.link("-shared", "-O2", source, definitions, "-o", ours)
    shutil.copy(ours, folder)


def install(python: Python, wheel: Path, work: Path) -> None:
    """Puts a Python for Windows into `work`/python3.N, with a wheel of FlowNPU and its requirements."""
    folder = work / f"python3.{python.version}"
    python.install(folder, work / "cmake" / "python.exe")
    tags = ["--platform", "win_amd64", "--python-version", f"3.{python.version}", "--only-binary=:all:"]
    place = ["--target", str(folder / "Lib" / "site-packages")]
    wanted = [f"{wheel}[{EXTRAS}]", *(f"{name}=={_pinned()[name]}" for name in RUNTIMES), *OF_WINDOWS]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *tags, *place, *wanted], check=True)
    # Libraries are searched beside the program first.
    for file in [*_runtimes(work), work / "cmake" / LACKING]:
        if file.stem in RUN_TIME or file.name == LACKING:
            shutil.copy(file, folder)
    _c_run_time(folder, python.zig, work)

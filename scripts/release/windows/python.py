# SPDX-License-Identifier: Apache-2.0
"""CPython for Windows, made from files on PyPI and on this machine: to link a module to, and to run it under Wine.

Panda3D's wheels hold the interpreter's library and its modules in C, from python.org's build, for programs that are
frozen on other systems. The headers and the modules in Python are those of this machine's Python of the same version:
except for `pyconfig.h`, they are the same on all systems.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import abi3info
import pefile

from scripts.release.building import ROOT
from scripts.release.zig import Zig

PANDA3D = "panda3d==1.10.16"
# A module since Python 3.12 that calls VariantToString, at which Wine 8 ends the process; `platform` works without it.
NOT_UNDER_WINE = "_wmi.pyd"
# Parts of the standard library that no program here needs.
LEFT_OUT = (
    "__pycache__",
    "site-packages",
    "lib-dynload",
    "test",
    "tests",
    "idlelib",
    "ensurepip",
    "turtledemo",
    "config-*",
)


@dataclass(frozen=True)
class Python:
    """A Python of this machine, and the same version for Windows.

    Attributes:
        here: this machine's interpreter.
        version: N of its version 3.N.
        folder: gets the files that are made.
        zig: the compiler, which makes import libraries and what Panda3D's wheel lacks.
    """

    here: Path
    version: int
    folder: Path
    zig: Zig

    @classmethod
    def of(cls, here: Path, work: Path, zig: Zig) -> Python:
        """The same version as an interpreter of this machine, with a folder in `work`."""
        version = int(_ask(here, "import sys; print(sys.version_info.minor)"))
        return cls(here, version, work / f"cpython3.{version}", zig)

    @property
    def library(self) -> str:
        """Name of the interpreter's library on Windows, without its extension."""
        return f"python3{self.version}"

    def headers(self) -> Path:
        """The folder of the headers for Windows."""
        theirs = _ask(self.here, "import sysconfig; print(sysconfig.get_path('include'))")
        folder = self.folder / "include"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(theirs, folder)
        shutil.copyfile(ROOT / "scripts" / "release" / "windows" / "pyconfig.h", folder / "pyconfig.h")
        return folder

    def import_library(self) -> Path:
        """The import library for a module for this version of Python only: all exports of Python's library."""
        return self._import_library(self.library, self._exported(), set())

    def stable_import_library(self) -> Path:
        """The import library for a module for this Python and all later ones: python3.dll with the stable ABI."""
        functions, data = self._stable(abi3info.FUNCTIONS), self._stable(abi3info.DATAS)
        return self._import_library("python3", sorted(functions | data), data)

    def stable_library(self) -> Path:
        """python3.dll, which Panda3D's wheel lacks: it forwards all its names to this version's library."""
        names = sorted((self._stable(abi3info.FUNCTIONS) | self._stable(abi3info.DATAS)) & set(self._exported()))
        definitions = self.folder / "forwards.def"
        lines = [f"{name}={self.library}.{name}" for name in names]
        definitions.write_text("\n".join(["LIBRARY python3.dll", "EXPORTS", *lines, ""]), encoding="utf-8")
        nothing = self.folder / "nothing.c"
        nothing.write_text("", encoding="utf-8")
        made = self.folder / "python3.dll"
        self.zig.link("-shared", nothing, definitions, "-o", made)
        return made

    def _exported(self) -> list[str]:
        return exported(self._unpacked() / f"{self.library}.dll")

    def _stable(self, items: Mapping[Any, Any]) -> set[str]:
        """The names of the stable ABI that this Python has."""
        return {
            item.symbol.name for item in items.values() if (item.added.major, item.added.minor) <= (3, self.version)
        }

    def _import_library(self, name: str, symbols: list[str], data: set[str]) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        definitions = self.folder / f"{name}.def"
        lines = [f"{symbol} DATA" if symbol in data else symbol for symbol in symbols]
        definitions.write_text("\n".join([f"LIBRARY {name}.dll", "EXPORTS", *lines, ""]), encoding="utf-8")
        library = self.folder / f"{name}.lib"
        subprocess.run([self.zig.program, "dlltool", "-m", "i386:x86-64", "-d", definitions, "-l", library], check=True)
        return library

    def _unpacked(self) -> Path:
        """The folder with the files of Python from Panda3D's wheel."""
        folder = self.folder / "panda3d"
        if folder.is_dir():
            return folder
        wheels = download(self.folder / "wheels", [PANDA3D], self.version)
        partial = self.folder / "panda3d.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with zipfile.ZipFile(next(wheel for wheel in wheels if wheel.name.startswith("panda3d-"))) as archive:
            for name in archive.namelist():
                path = Path(name)
                if path.parent.name == "deploy_libs" and not path.name.startswith("api-ms-win-"):
                    (partial / path.name).write_bytes(archive.read(name))
        partial.rename(folder)
        return folder

    def install(self, folder: Path, program: Path) -> None:
        """Lays out an interpreter like python.org's installer does.

        Args:
            folder: made anew; gets python.exe and its files.
            program: the program that becomes python.exe (tests/windows/python.cc).
        """
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "DLLs").mkdir(parents=True)
        library = _ask(self.here, "import sysconfig; print(sysconfig.get_path('stdlib'))")
        shutil.copytree(library, folder / "Lib", ignore=shutil.ignore_patterns(*LEFT_OUT))
        (folder / "Lib" / "site-packages").mkdir()
        for file in (file for file in self._unpacked().iterdir() if file.name != NOT_UNDER_WINE):
            beside = file.stem.lower() in (self.library, "vcruntime140", "vcruntime140_1")
            shutil.copy(file, folder if beside else folder / "DLLs")
        shutil.copy(program, folder / "python.exe")
        shutil.copy(self.stable_library(), folder)


def _ask(python: Path, script: str) -> str:
    return subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.strip()


def exported(library: Path) -> list[str]:
    """The names that a library exports."""
    with pefile.PE(library, fast_load=True) as file:
        file.parse_data_directories(pefile.DIRECTORY_ENTRY["IMAGE_DIRECTORY_ENTRY_EXPORT"])
        return [symbol.name.decode() for symbol in file.DIRECTORY_ENTRY_EXPORT.symbols if symbol.name]


def download(folder: Path, wanted: list[str], version: int) -> list[Path]:
    """Wheels for Windows from PyPI, without their requirements.

    Args:
        folder: gets the wheels.
        wanted: requirements.
        version: N of the version 3.N of Python that they are for.
    """
    tags = ["--platform", "win_amd64", "--python-version", f"3.{version}", "--only-binary=:all:"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *tags, "--no-deps", "--dest", str(folder), *wanted]
    subprocess.run(command, check=True)
    return sorted(folder.glob("*.whl"))

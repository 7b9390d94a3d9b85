# SPDX-License-Identifier: Apache-2.0
"""Debian's XRT as scripts/tools.py unpacks it: commands that run programs with its libraries and its C library."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from scripts import tools

FOLDER = tools.folder_of("xrt")


def libraries() -> Path | None:
    """The folder of XRT's libraries; None if they are not there."""
    driver = tools.find("xrt")
    return Path(driver).parent if driver else None


def command(program: Iterable[str | Path], *, using: Path | None = None, without: Iterable[str] = ()) -> list[str]:
    """The command that runs a program with XRT's libraries.

    Args:
        program: the program's file, and its arguments.
        using: another copy of the C library's loader; XRT looks for xrt.ini beside it.
        without: beginnings of the names of libraries that must not be found.
    """
    folder = libraries()
    assert folder is not None, tools.reason("xrt")
    loader = using or next(iter(sorted(folder.glob("ld-linux-*.so.*"))))
    if tuple(without):
        folder = _copy_without(folder, tuple(without))
    return [str(loader), "--library-path", str(folder), *map(str, program)]


def xclbinutil() -> Path | None:
    """A script that runs XRT's xclbinutil, which makes xclbins; None if XRT is not there."""
    if libraries() is None:
        return None
    script = FOLDER / "xclbinutil"
    if not script.is_file():
        line = " ".join(f'"{part}"' for part in command([FOLDER / "root/usr/bin/xclbinutil"]))
        script.write_text(f'#!/bin/sh\nexec {line} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return script


def _copy_without(folder: Path, without: tuple[str, ...]) -> Path:
    """A folder with all libraries except some."""
    # Hard links, not symbolic ones: XRT looks for its parts where it was loaded, and doctor asks the kernel for that.
    copy = FOLDER / ("lacking_" + "_".join(without)) / folder.relative_to(FOLDER / "root")
    copy.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and not file.name.startswith(without):
            with contextlib.suppress(FileExistsError):  # another test may make it at the same time
                (copy / file.name).hardlink_to(file)
    return copy

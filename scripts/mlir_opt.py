# SPDX-License-Identifier: Apache-2.0
"""Finds an mlir-opt, with which the tests parse the emitted MLIR; if there is none, gets Debian's or Ubuntu's.

It is unpacked into build/mlir-opt/. Run it as `python -m scripts.mlir_opt`.
"""

import re
import shutil
import subprocess
from pathlib import Path

from scripts import debian_packages
from scripts.debian_packages import Apt, UnavailableError

FOLDER = Path(__file__).resolve().parent.parent / "build" / "mlir-opt"
SYSTEM = Path("/usr/lib")
OLDEST = 17  # the first release of LLVM that reads properties, `<{...}>`


def ours() -> Path:
    """The path of the mlir-opt that `fetch` unpacks."""
    return FOLDER / "mlir-opt"


def find() -> str | None:
    """An mlir-opt that is new enough: on PATH, in Debian's folders, or the fetched one, the newest first; or None."""
    names = ["mlir-opt", *(f"mlir-opt-{version}" for version in range(40, OLDEST - 1, -1))]
    folders = sorted(SYSTEM.glob("llvm-*/bin/mlir-opt"), key=lambda path: path.parts[3], reverse=True)
    found = [shutil.which(name) for name in names] + [str(path) for path in (*folders, ours()) if path.is_file()]
    return next((path for path in found if path and version_of(path) >= OLDEST), None)


def reason() -> str:
    """Why there is no mlir-opt, or how to get one."""
    return debian_packages.reason(
        FOLDER, "there is no mlir-opt of LLVM 17 or newer: python -m scripts.mlir_opt gets Debian's"
    )


def version_of(path: str) -> int:
    """An mlir-opt's release of LLVM; 0 if it does not run."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r"LLVM version (\d+)", done.stdout)
    return int(match[1]) if match and done.returncode == 0 else 0


def fetch() -> None:
    """Gets the newest release that apt knows, with the libraries that are not installed.

    Raises:
        UnavailableError: that cannot be done here; the message says why.
    """
    apt = Apt(FOLDER, "mlir-opt")
    apt.run("apt-get", "update", "-q")
    listed = apt.run("apt-cache", "search", "--names-only", r"^mlir-[0-9]+-tools$")
    releases = sorted((int(number) for number in re.findall(r"^mlir-(\d+)-tools", listed, re.MULTILINE)), reverse=True)
    if not releases or releases[0] < OLDEST:
        raise UnavailableError(f"mlir-opt is not installed, and apt knows none of LLVM {OLDEST} or newer")
    apt.unpack(*apt.missing(f"mlir-{releases[0]}-tools"))
    for program in (FOLDER / "root" / "usr" / "lib" / f"llvm-{releases[0]}" / "bin").iterdir():
        if program.name != "mlir-opt":  # ten more programs, all of them large
            program.unlink()
    write_wrapper(releases[0])
    apt.finish()
    if version_of(str(ours())) != releases[0]:
        raise UnavailableError(f"Debian's mlir-opt of LLVM {releases[0]} was unpacked, and does not run here")


def write_wrapper(release: int) -> None:
    """Writes a script that runs the unpacked mlir-opt with the libraries beside it."""
    root = FOLDER / "root"
    libraries = [path for path in (*root.glob("usr/lib/*-linux-gnu*"), *root.glob("lib/*-linux-gnu*")) if path.is_dir()]
    libraries.append(root / "usr" / "lib" / f"llvm-{release}" / "lib")
    search = ":".join(map(str, libraries))
    ours().write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH="{search}" exec "{root}/usr/lib/llvm-{release}/bin/mlir-opt" "$@"\n',
        encoding="utf-8",
    )
    ours().chmod(0o755)


def main() -> None:
    """Gets an mlir-opt unless there is one, or says why it cannot be had."""
    debian_packages.make_sure(
        "mlir-opt", "for the tests of the emitted MLIR: about 70 MB", FOLDER, find=find, fetch=fetch
    )


if __name__ == "__main__":
    main()

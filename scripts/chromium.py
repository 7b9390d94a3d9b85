# SPDX-License-Identifier: Apache-2.0
"""Gets Debian's Chromium, with which the tests use the server's chat page and scripts/figures/chat_page.py draws it.

A browser that is installed is used. Otherwise the packages are unpacked into build/chromium/ and run from there with
their own libraries and font, so root is not needed. Run it as `python -m scripts.chromium`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from scripts import debian_packages
from scripts.debian_packages import Apt, UnavailableError

FOLDER = Path(__file__).resolve().parent.parent / "build" / "chromium"
INSTALLED = ("chromium-headless-shell", "chromium", "google-chrome", "google-chrome-stable")
# Without a font the page would show no text.
PACKAGES = ("chromium-headless-shell", "fonts-dejavu-core")
PROGRAM = "chromium-headless-shell"
STARTER = FOLDER / "chromium"


def find() -> str | None:
    """The path of a browser; None if there is none."""
    installed = (shutil.which(name) for name in INSTALLED)
    return next((path for path in installed if path), str(STARTER) if STARTER.is_file() else None)


def reason() -> str:
    """Why there is no browser, or how to get one."""
    return debian_packages.reason(FOLDER, "there is no Chromium: python -m scripts.chromium gets Debian's")


def fetch() -> None:
    """Gets Chromium and those of its dependencies that are not installed.

    Raises:
        UnavailableError: that cannot be done here; the message says why.
    """
    apt = Apt(FOLDER, "Chromium")
    apt.run("apt-get", "update", "-q")
    if not apt.candidate(PACKAGES[0]):
        raise UnavailableError(f"Chromium is not installed, and apt knows no {PACKAGES[0]}")
    missing = {name for package in PACKAGES for name in apt.missing(package)}
    apt.unpack(*sorted(name for name in missing if name in PACKAGES or name.startswith(("lib", "zlib", "chromium"))))
    apt.finish()
    _write_starter()


def _write_starter() -> None:
    """A script that runs the program wherever this folder is."""
    root = FOLDER / "root"
    program = next((file for file in root.rglob(PROGRAM) if file.is_file() and file.stat().st_size > 2**20), None)
    if program is None:
        raise UnavailableError(f"Debian's {PACKAGES[0]} was unpacked, and there is no program {PROGRAM} in it")
    libraries = sorted({file.parent.relative_to(FOLDER) for file in root.rglob("*.so*") if file.parent.name != "gconv"})
    paths = ":".join(f"$here/{path}" for path in libraries)
    (FOLDER / "fonts.conf").write_text(
        '<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig><dir>'
        f"{root}/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{FOLDER}/font-cache</cachedir>"
        "<alias><family>system-ui</family><prefer><family>DejaVu Sans</family></prefer></alias></fontconfig>",
        encoding="utf-8",
    )
    STARTER.write_text(
        f"""#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
export LD_LIBRARY_PATH="{paths}" FONTCONFIG_FILE="$here/fonts.conf"
exec "$here/{program.relative_to(FOLDER)}" "$@"
""",
        encoding="utf-8",
    )
    STARTER.chmod(0o755)


def main() -> None:
    """Gets Chromium unless there is one, or says why it cannot be had."""
    debian_packages.make_sure("Chromium", "for tests of the chat page: 100 MB", FOLDER, find=find, fetch=fetch)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Gets the C library to which wheels are linked: Debian 11's glibc 2.31, with its headers and the kernel's.

The machine's own g++ compiles with it (`--sysroot`), so that a wheel's kernels are the ones that were tested here; only
the libraries to which they are linked are older. The functions of a newer glibc that g++'s C++ run-time library needs
are in old_glibc.cc, and contents.py refuses wheels with symbols newer than 2.28. Run it as
`python -m scripts.release.sysroot`.
"""

from __future__ import annotations

from pathlib import Path

from scripts import debian_packages
from scripts.debian_packages import Apt, UnavailableError

__all__ = ["FOLDER", "ROOT", "SUITE", "fetch", "find", "reason"]

FOLDER = Path(__file__).resolve().parent.parent.parent / "build" / "release" / "sysroot"
ROOT = FOLDER / "root"
# Debian 10, whose glibc is 2.28, is not on the mirrors.
SUITE = "bullseye"
PACKAGES = ("libc6", "libc6-dev", "linux-libc-dev", "libuuid1")


def find() -> str | None:
    """The folder for g++'s --sysroot; None if it is not there."""
    return str(ROOT) if (ROOT / "usr/include/stdio.h").is_file() else None


def reason() -> str:
    """Why there is no old C library, or how to get it."""
    return debian_packages.reason(FOLDER, "there is no old C library: python -m scripts.release.sysroot gets Debian's")


def fetch() -> None:
    """Gets the C library.

    Raises:
        UnavailableError: that cannot be done here; the message says why.
    """
    apt = Apt(FOLDER, "glibc 2.31")
    apt.run("apt-get", "update", "-q")
    apt.use_suite(SUITE)
    apt.unpack(*(f"{package}/{SUITE}" for package in PACKAGES))
    apt.finish()
    for link in ROOT.rglob("*"):
        # Links to /lib would lead out of the folder, to the machine's own library.
        if link.is_symlink() and (target := link.readlink()).is_absolute():
            link.unlink()
            link.symlink_to(ROOT / target.relative_to("/"))
    if find() is None:
        raise UnavailableError("Debian's libc6-dev was unpacked, and there is no stdio.h in it")


def main() -> None:
    """Gets the C library unless it is there, or says why it cannot be had."""
    debian_packages.make_sure("glibc 2.31", "for wheels that old systems load: 6 MB", FOLDER, find=find, fetch=fetch)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Gets the C library that wheels are linked to: Debian 11's, of glibc 2.31, with its headers and the kernel's.

The machine's own g++ compiles with it (`--sysroot`), so that a wheel's kernels are the ones that were tested here; only
what they are linked to is older. What g++'s own C++ run time wants of a newer glibc is in old_glibc.cc, and no symbol
newer than 2.28 is let through (contents.py). Run it as `python -m scripts.release.sysroot`.
"""

from __future__ import annotations

from pathlib import Path

from scripts import debian_packages
from scripts.debian_packages import Apt, UnavailableError

__all__ = ["FOLDER", "ROOT", "SUITE", "fetch", "find", "reason"]

FOLDER = Path(__file__).resolve().parent.parent.parent / "build" / "release" / "sysroot"
ROOT = FOLDER / "root"
# Debian 10's glibc is 2.28 itself, but is no longer on the mirrors.
SUITE = "bullseye"
PACKAGES = ("libc6", "libc6-dev", "linux-libc-dev", "libuuid1")


def find() -> str | None:
    """The folder that g++'s --sysroot is to be."""
    return str(ROOT) if (ROOT / "usr/include/stdio.h").is_file() else None


def reason() -> str:
    """What to say where there is none."""
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
    """Makes sure of the C library, or says why there is none."""
    debian_packages.make_sure("glibc 2.31", "for wheels that old systems load: 6 MB", FOLDER, find=find, fetch=fetch)


if __name__ == "__main__":
    main()

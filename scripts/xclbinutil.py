# SPDX-License-Identifier: Apache-2.0
"""Gets Debian's xclbinutil of XRT, which packs xclbins, so that the tests can ask it what it makes of ours.

It is of a newer Debian than the machine may be, so the C library and all else that it needs come along, into
build/xclbinutil/, and a script there starts it with them. Run it as `python -m scripts.xclbinutil`.
"""

import re
import shutil
from pathlib import Path

from scripts import debian_packages, xrt_headers
from scripts.debian_packages import Apt, UnavailableError

FOLDER = Path(__file__).resolve().parent.parent / "build" / "xclbinutil"
TOOL = FOLDER / "xclbinutil"
# The suites of xrt_headers.py, each with what its packages stand on.
SUITES = {"stable-backports": "stable stable-backports", "testing": "testing", "unstable": "unstable"}
# What xclbinutil is not linked with, and what libcrypto is besides.
UNUSED, OF_LIBCRYPTO = {"libxrt2"}, ("libzstd1", "zlib1g")


def find() -> str | None:
    """The installed one, or that which was fetched."""
    if installed := shutil.which("xclbinutil"):
        return installed
    return str(TOOL) if TOOL.is_file() else None


def reason() -> str:
    """What to say where there is none."""
    return debian_packages.reason(FOLDER, "there is no xclbinutil: python -m scripts.xclbinutil gets Debian's")


def fetch() -> None:
    """Gets xclbinutil and the libraries that it is linked with.

    Raises:
        UnavailableError: that cannot be done here; the message says why.
    """
    apt = Apt(FOLDER, "xclbinutil")
    apt.run("apt-get", "update", "-q")
    apt.unpack(*_packages(apt))
    apt.finish()
    loaders = sorted((FOLDER / "root").rglob("ld-linux*.so*"))
    libraries = sorted((FOLDER / "root" / "usr" / "lib").glob("*-linux-gnu"))
    if not loaders or not libraries:
        raise UnavailableError("Debian's libc6 was unpacked, and there is no loader in it")
    loader, folder = (path.relative_to(FOLDER) for path in (loaders[0], libraries[0]))
    TOOL.write_text(
        f'#!/bin/sh\nhere=$(dirname "$0")\n'
        f'exec "$here/{loader}" --library-path "$here/{folder}" "$here/root/usr/bin/xclbinutil" "$@"\n',
        encoding="utf-8",
    )
    TOOL.chmod(0o755)


def _packages(apt: Apt) -> list[str]:
    """The package with xclbinutil, of the first suite that has an XRT for NPUs, and those of its libraries."""
    problem = f"none of Debian's suites {', '.join(SUITES)} has an XRT for NPUs"
    for suite, sources in SUITES.items():
        package = f"libxrt-utils/{suite}"
        try:
            apt.use_suite(sources)
            record = apt.run("apt-cache", "show", package)
        except UnavailableError as error:  # a mirror need not have them all
            problem = str(error)
            continue
        fields = dict(re.findall(r"^(Version|Depends): (.*)$", record, re.MULTILINE))
        if xrt_headers.is_new_enough(fields.get("Version", "")):
            libraries = set(re.findall(r"\blib[a-z0-9.+-]+", fields["Depends"])) - UNUSED
            return [package, *sorted(libraries), *OF_LIBCRYPTO]
    raise UnavailableError(problem)


def main() -> None:
    """Makes sure of it, or says why there is none."""
    debian_packages.make_sure("xclbinutil", "for the tests of xclbins: about 10 MB", FOLDER, find=find, fetch=fetch)


if __name__ == "__main__":
    main()

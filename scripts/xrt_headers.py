# SPDX-License-Identifier: Apache-2.0
"""Gets Debian's headers of XRT, against which the tests build the XRT runtime (ops/npu/xrt/), and its library.

The headers of a Debian that is older than trixie's backports are of an XRT without NPUs; so where the machine's own
sources have none that is new enough, a newer suite of its Debian mirror is looked at. All is unpacked into build/xrt/,
where CMake looks for it. XRT as it is run in tests is scripts/xrt_runtime.py's. Run it as `python -m
scripts.xrt_headers`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from scripts import debian_packages
from scripts.debian_packages import Apt, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).resolve().parent.parent / "build" / "xrt"
OLDEST = (2, 19)  # what ops/npu/xrt/ is written for: xrt::ext::bo and runlists of NPUs
# From the one with the smallest list of packages to the largest.
SUITES = ("stable-backports", "testing", "unstable")  # backports with the suite that they are for


def find() -> str | None:
    """The folder of headers that was fetched."""
    folder = FOLDER / "root" / "usr" / "include"
    return str(folder) if (folder / "xrt" / "xrt_device.h").is_file() else None


def reason() -> str:
    """What to say where there are none."""
    return debian_packages.reason(FOLDER, "there are no headers of XRT: python -m scripts.xrt_headers gets Debian's")


def version_of(package_version: str) -> str:
    """The XRT that a package is of: "2.25". One of 2022, and without NPUs, has 202210.2.13, and gives nothing."""
    match = re.match(r"(?:\d+:)?(\d{1,2}\.\d+)", package_version)
    return match[1] if match else ""


def is_new_enough(version: str) -> bool:
    """Whether a package's version is of an XRT for NPUs."""
    return tuple(map(int, version_of(version).split("."))) >= OLDEST if version_of(version) else False


def _is_wanted(apt: Apt) -> bool:
    return is_new_enough(apt.candidate("libxrt-dev"))


def fetch() -> None:
    """Gets the headers of XRT and of libuuid, which they include.

    Raises:
        UnavailableError: that cannot be done here; the message says why.
    """
    apt = Apt(FOLDER, "XRT")
    apt.run("apt-get", "update", "-q")
    apt.unpack("uuid-dev")
    if not _is_wanted(apt):
        use_suite_where(apt, _is_wanted, ".".join(map(str, OLDEST)))
    apt.unpack("libxrt-dev", "libxrt2")
    apt.finish()
    if find() is None:
        raise UnavailableError("Debian's libxrt-dev was unpacked, and there is no xrt/xrt_device.h in it")
    (FOLDER / "root").touch()  # newer than what was built without it


def use_suite_where(apt: Apt, is_wanted: Callable[[Apt], bool], what: str) -> None:
    """Looks at the first suite of Debian's that has a wanted XRT.

    Args:
        apt: is to look there afterwards.
        is_wanted: whether what it looks at has it.
        what: is wanted, for messages: "2.25".

    Raises:
        UnavailableError: none has it.
    """
    problem = f"XRT is not installed, and none of Debian's suites {', '.join(SUITES)} has {what}"
    for suite in SUITES:
        try:
            apt.use_suite(suite)
        except UnavailableError as error:  # a mirror need not have them all
            problem = str(error)
            continue
        if is_wanted(apt):
            return
    raise UnavailableError(problem)


def main() -> None:
    """Makes sure of the headers, or says why there are none."""
    debian_packages.make_sure(
        "headers of XRT", "for the tests of the XRT runtime: about 25 MB", FOLDER, find=find, fetch=fetch
    )


if __name__ == "__main__":
    main()

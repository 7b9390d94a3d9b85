# SPDX-License-Identifier: Apache-2.0
"""Gets Debian's XRT headers and library, against which the tests build the XRT runtime (ops/npu/xrt/).

Before trixie's backports, Debian's XRT does not support NPUs; so if the machine's own package sources have none that is
new enough, newer suites of its Debian mirror are tried. The files are unpacked into build/xrt/, where CMake looks for
them. scripts/xrt_runtime.py gets the XRT on which tests run. Run it as `python -m scripts.xrt_headers`.
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
OLDEST = (2, 19)  # ops/npu/xrt/ needs xrt::ext::bo and runlists of NPUs
# From the suite with the shortest list of packages to the one with the longest.
SUITES = ("stable-backports", "testing", "unstable")  # backports are used together with their suite


def find() -> str | None:
    """The folder of the headers that were fetched; None if there are none."""
    folder = FOLDER / "root" / "usr" / "include"
    return str(folder) if (folder / "xrt" / "xrt_device.h").is_file() else None


def reason() -> str:
    """Why there are no headers, or how to get them."""
    return debian_packages.reason(FOLDER, "there are no headers of XRT: python -m scripts.xrt_headers gets Debian's")


def version_of(package_version: str) -> str:
    """The version of XRT in a package's version: "2.25". For 202210.2.13, an XRT of 2022 without NPUs, it is ""."""
    match = re.match(r"(?:\d+:)?(\d{1,2}\.\d+)", package_version)
    return match[1] if match else ""


def is_new_enough(version: str) -> bool:
    """Whether a package's version is that of an XRT for NPUs."""
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
    (FOLDER / "root").touch()  # so that it is newer than what was built without it


def use_suite_where(apt: Apt, is_wanted: Callable[[Apt], bool], what: str) -> None:
    """Makes apt use the first of Debian's suites that has a wanted XRT.

    Args:
        apt: the apt.
        is_wanted: whether the suite that apt uses has it.
        what: the wanted version for messages: "2.25".

    Raises:
        UnavailableError: no suite has it.
    """
    problem = f"XRT is not installed, and none of Debian's suites {', '.join(SUITES)} has {what}"
    for suite in SUITES:
        try:
            apt.use_suite(suite)
        except UnavailableError as error:  # a mirror may lack some suites
            problem = str(error)
            continue
        if is_wanted(apt):
            return
    raise UnavailableError(problem)


def main() -> None:
    """Gets the headers unless they are there, or says why they cannot be had."""
    debian_packages.make_sure(
        "headers of XRT", "for the tests of the XRT runtime: about 25 MB", FOLDER, find=find, fetch=fetch
    )


if __name__ == "__main__":
    main()

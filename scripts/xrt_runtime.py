# SPDX-License-Identifier: Apache-2.0
"""Gets Debian's XRT, with which the tests run the XRT runtime (ops/npu/xrt/), and the C library that it needs.

All is unpacked into build/xrt/run/ and runs from there under its own loader, so neither root nor a Debian as new as
the packages is needed; only their glibc must be as new as that of the tests' Python. Run it as
`python -m scripts.xrt_runtime`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from scripts import debian_packages, xrt_headers
from scripts.debian_packages import Apt, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FOLDER = xrt_headers.FOLDER / "run"
# The tests' double of the kernel's driver (tests/npu/xdna_driver/) answers the requests of this version's NPU part, and
# tests compare messages of XRT. To use another version, try it by hand first.
VERSION = "2.25"
# The runtime, its part for NPUs, and xclbinutil.
PACKAGES = ("libxrt2", "libxrt-npu2", "libxrt-utils")


def _library_folder() -> Path | None:
    return next((file.parent for file in (FOLDER / "root" / "usr" / "lib").glob("*/libxrt_driver_xdna.so.2")), None)


def find() -> str | None:
    """The folder of XRT's libraries that were fetched; None if there are none."""
    folder = _library_folder()
    return str(folder) if folder and loader(folder) and xclbinutil() else None


def loader(folder: Path) -> Path | None:
    """The C library's program loader, which is also a program: it runs others with the libraries of a folder."""
    return next(iter(sorted(folder.glob("ld-linux-*.so.*"))), None)


def xclbinutil() -> Path | None:
    """The script that runs XRT's xclbinutil, which makes xclbins; None if it was not fetched."""
    file = FOLDER / "xclbinutil"
    return file if file.is_file() else None


def command(program: Iterable[str | Path], *, using: Path | None = None, without: Iterable[str] = ()) -> list[str]:
    """The command that runs a program with XRT's libraries.

    Args:
        program: the program's file, and its arguments.
        using: another copy of the loader; XRT looks for xrt.ini beside it.
        without: beginnings of the names of libraries that must not be found.

    Raises:
        UnavailableError: there is no XRT here.
    """
    folder = _library_folder()
    if folder is None or find() is None:
        raise UnavailableError(reason())
    libraries = folder
    if tuple(without):
        libraries = _copy_without(folder, tuple(without))
    return [str(using or loader(folder)), "--library-path", str(libraries), *map(str, program)]


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


def reason() -> str:
    """Why there is no XRT to run on, or how to get it."""
    return debian_packages.reason(FOLDER, "there is no XRT to run on: python -m scripts.xrt_runtime gets Debian's")


def fetch() -> None:
    """Gets XRT and the libraries that it needs, the C library among them.

    Raises:
        UnavailableError: that cannot be done here; the message says why.
    """
    apt = Apt(FOLDER, "XRT")
    apt.run("apt-get", "update", "-q")
    if not _is_wanted(apt):
        xrt_headers.use_suite_where(apt, _is_wanted, VERSION)
    apt.unpack(*apt.libraries(*PACKAGES))
    apt.finish()
    _write_starter()
    if find() is None:
        raise UnavailableError("Debian's libxrt-npu2 was unpacked, and there is no libxrt_driver_xdna.so.2 in it")


def _write_starter() -> None:
    """A script that runs xclbinutil wherever this folder is."""
    folder = _library_folder()
    if folder is None or (start := loader(folder)) is None:
        return
    libraries, program = folder.relative_to(FOLDER), start.relative_to(FOLDER)
    file = FOLDER / "xclbinutil"
    file.write_text(
        f"""#!/bin/sh
here=$(dirname "$0")
exec "$here/{program}" --library-path "$here/{libraries}" "$here/root/usr/bin/xclbinutil" "$@"
""",
        encoding="utf-8",
    )
    file.chmod(0o755)


def _is_wanted(apt: Apt) -> bool:
    return xrt_headers.version_of(apt.candidate("libxrt-npu2")) == VERSION


def main() -> None:
    """Gets XRT unless it is there, or says why it cannot be had."""
    debian_packages.make_sure("XRT", "for the tests over it: about 20 MB", FOLDER, find=find, fetch=fetch)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Gets tools for the tests and the releases from Debian's packages, each unpacked below build/, without root.

    python -m scripts.tools mlir-opt chromium xrt-headers xrt onnxruntime-headers glibc rusticl vulkan lavapipe

Only missing ones are fetched. If one cannot be had, the reason is kept, and tests that need it are skipped with it.
"""

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.debian_packages import Apt, UnavailableError

BUILD = Path(__file__).resolve().parent.parent / "build"
# Debian 11, whose glibc is 2.31: Debian 10 (2.28) is not on the mirrors. The wheels of releases are linked to it.
OLD_SUITE = "bullseye"
# tests/npu/xdna_driver/ answers the requests of this version's NPU part, and tests compare messages of XRT. Try another
# version by hand first.
XRT_VERSION = "2.25"
# ops/npu/xrt/ needs xrt::ext::bo and runlists of NPUs. Debian's XRT does not support NPUs before trixie's backports, so
# newer suites are tried where the machine's own sources have none, those with the shortest lists of packages first.
_OLDEST_XRT = (2, 19)
_NEWER_SUITES = ("stable-backports", "testing", "unstable")
# The first release of LLVM whose mlir-opt reads properties, `<{...}>`, and the newest for which this looks.
_OLDEST_LLVM, _NEWEST_LLVM = 17, 40
# The first release of Mesa of which this project knows that lavapipe has cooperative matrices.
_OLDEST_MESA = 25
_VULKAN = ("libvulkan1", "libvulkan-dev", "mesa-vulkan-drivers", "spirv-tools")


@dataclass(frozen=True)
class Tool:
    """A tool that Debian's packages have.

    Attributes:
        note: its use, and how much is downloaded.
        packages: chooses the packages, and the suite that has them; may raise UnavailableError.
        file: pattern of the tool's file in the unpacked packages.
        starter: name of a script that runs this file with the unpacked libraries; "": none is written.
        installed: names of the programs on PATH that do as well.
        folder: the folder below build/; "": the tool's name.
    """

    note: str
    packages: Callable[[Apt], list[str]]
    file: str
    starter: str = ""
    installed: tuple[str, ...] = ()
    folder: str = ""


def _mlir_opt(apt: Apt) -> list[str]:
    listed = apt.run("apt-cache", "search", "--names-only", r"^mlir-[0-9]+-tools$")
    newest = max(map(int, re.findall(r"^mlir-(\d+)-tools", listed, re.MULTILINE)), default=0)
    if newest < _OLDEST_LLVM:
        raise UnavailableError(f"mlir-opt is not installed, and apt knows none of LLVM {_OLDEST_LLVM} or newer")
    return apt.missing(f"mlir-{newest}-tools")


def _chromium(apt: Apt) -> list[str]:
    # Without a font the page would show no text.
    wanted = ("chromium-headless-shell", "fonts-dejavu-core")
    if not apt.candidate(wanted[0]):
        raise UnavailableError(f"Chromium is not installed, and apt knows no {wanted[0]}")
    missing = {name for package in wanted for name in apt.missing(package)}
    return sorted(name for name in missing if name in wanted or name.startswith(("lib", "zlib", "chromium")))


def _xrt_headers(apt: Apt) -> list[str]:
    apt.unpack("uuid-dev")  # of the machine's own suite
    _use_xrt(apt, lambda: xrt_version(apt.candidate("libxrt-dev")) >= _OLDEST_XRT, _OLDEST_XRT)
    return ["libxrt-dev", "libxrt2"]


def _xrt(apt: Apt) -> list[str]:
    wanted = xrt_version(XRT_VERSION)
    _use_xrt(apt, lambda: xrt_version(apt.candidate("libxrt-npu2")) == wanted, wanted)
    # The runtime, its part for NPUs and xclbinutil, with the C library: neither root nor a Debian as new is needed.
    return apt.libraries("libxrt2", "libxrt-npu2", "libxrt-utils")


def _lavapipe(apt: Apt) -> list[str]:
    def is_new() -> bool:
        release = re.match(r"\d+", apt.candidate("mesa-vulkan-drivers"))
        return release is not None and int(release[0]) >= _OLDEST_MESA

    _use_newer(apt, is_new, f"Mesa {_OLDEST_MESA} or newer")
    return apt.libraries("mesa-vulkan-drivers", "libvulkan1", "libvulkan-dev", "spirv-tools", "libc6", "libstdc++6")


def _onnxruntime_headers(apt: Apt) -> list[str]:
    apt.use_suite("unstable")  # has the newest version
    return ["libonnxruntime-dev"]


def _glibc(apt: Apt) -> list[str]:
    apt.use_suite(OLD_SUITE)
    return [f"{package}/{OLD_SUITE}" for package in ("libc6", "libc6-dev", "linux-libc-dev", "libuuid1")]


TOOLS = {
    "mlir-opt": Tool(
        "for the tests of the emitted MLIR: about 70 MB",
        _mlir_opt,
        "usr/lib/llvm-*/bin/mlir-opt",
        starter="mlir-opt",
        installed=tuple(
            path
            for release in range(_NEWEST_LLVM, _OLDEST_LLVM - 1, -1)
            for path in (f"mlir-opt-{release}", f"/usr/lib/llvm-{release}/bin/mlir-opt")
        ),
    ),
    "chromium": Tool(
        "for the tests of the chat page: 100 MB",
        _chromium,
        "usr/lib/chromium/*chromium-headless-shell",
        starter="chromium",
        installed=("chromium-headless-shell", "chromium", "google-chrome", "google-chrome-stable"),
    ),
    # CMake looks for these headers in build/xrt/root.
    "xrt-headers": Tool(
        "for the tests of the XRT runtime: about 25 MB", _xrt_headers, "usr/include/xrt/xrt_device.h", folder="xrt"
    ),
    "xrt": Tool("for the tests over it: about 20 MB", _xrt, "usr/lib/*/libxrt_driver_xdna.so.2", folder="xrt/run"),
    "onnxruntime-headers": Tool(
        "for the test of the ABI: less than 1 MB", _onnxruntime_headers, "usr/include/**/onnxruntime_c_api.h"
    ),
    "glibc": Tool("for wheels that old systems load: 6 MB", _glibc, "usr/include/stdio.h", folder="release/sysroot"),
    # It also needs libclc, which Mesa finds only where Debian installs it.
    "rusticl": Tool(
        "an OpenCL for `flownpu selftest --device gpu`: 150 MB",
        lambda apt: apt.missing("mesa-opencl-icd"),
        "usr/lib/*/libRusticlOpenCL.so.1",
    ),
    # The loader and its headers, Mesa's drivers, of which lavapipe needs no GPU, and spirv-val.
    "vulkan": Tool(
        "for the tests of the Vulkan dialect: about 55 MB",
        lambda apt: sorted({name for one in _VULKAN for name in apt.missing(one)}),
        "usr/lib/*/libvulkan.so.1",
    ),
    # Newer ones than Debian 12's, with the C library that they need, for cooperative matrices.
    "lavapipe": Tool("for the tests of matrix units: about 90 MB", _lavapipe, "usr/lib/*/libvulkan_lvp.so"),
}


def folder_of(name: str) -> Path:
    """The folder of a tool below build/; `root/` in it has the packages' files."""
    return BUILD / (TOOLS[name].folder or name)


def find(name: str) -> str | None:
    """The path of a tool: one that is installed, its starter, or its file; None if it is not there."""
    tool = TOOLS[name]
    installed = next((path for path in map(shutil.which, tool.installed) if path), None)
    if installed:
        return installed
    if tool.starter:
        starter = folder_of(name) / tool.starter
        return str(starter) if starter.is_file() else None
    return next((str(path) for path in (folder_of(name) / "root").glob(tool.file)), None)


def reason(name: str) -> str:
    """The reason why a tool is missing, or the command that gets it."""
    file = folder_of(name) / "reason"
    return file.read_text("utf-8") if file.is_file() else f"there is no {name}: python -m scripts.tools {name} gets it"


def fetch(name: str) -> None:
    """Gets a tool unless it is there, or prints why it cannot be had."""
    if find(name) is None:
        sys.stdout.write(f"Getting Debian's {name}, {TOOLS[name].note}, once\n")
        try:
            _unpack(name, TOOLS[name])
        except UnavailableError as error:
            folder_of(name).mkdir(parents=True, exist_ok=True)
            (folder_of(name) / "reason").write_text(str(error), encoding="utf-8")
            sys.stdout.write(f"{error}. The tests that need it are skipped\n")
            return
    sys.stdout.write(f"{name}: {find(name)}\n")


def xrt_version(version: str) -> tuple[int, ...]:
    """Major and minor version of XRT in a package's version; () for 202210.2.13, an XRT of 2022 without NPUs."""
    match = re.match(r"(?:\d+:)?(\d{1,2})\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else ()


def _use_xrt(apt: Apt, is_wanted: Callable[[], bool], version: tuple[int, ...]) -> None:
    """Makes apt use the first suite with a wanted XRT."""
    _use_newer(apt, is_wanted, f"XRT {'.'.join(map(str, version))}")


def _use_newer(apt: Apt, is_wanted: Callable[[], bool], wanted: str) -> None:
    """Makes apt use the first suite with what is wanted: the machine's own, or one of _NEWER_SUITES."""
    if is_wanted():
        return
    problem = f"{wanted} is not installed, and none of Debian's suites {', '.join(_NEWER_SUITES)} has it"
    for suite in _NEWER_SUITES:
        try:
            apt.use_suite(suite)
        except UnavailableError as error:  # a mirror may lack some suites
            problem = str(error)
            continue
        if is_wanted():
            return
    raise UnavailableError(problem)


def _unpack(name: str, tool: Tool) -> None:
    folder = folder_of(name)
    apt = Apt(folder, name)
    apt.run("apt-get", "update", "-q")
    apt.unpack(*tool.packages(apt))
    apt.finish()
    root = folder / "root"
    for link in root.rglob("*"):
        # An absolute link leads out of the folder, to the machine's own file.
        if link.is_symlink() and (target := link.readlink()).is_absolute():
            link.unlink()
            link.symlink_to(root / target.relative_to("/"))
    file = next(root.glob(tool.file), None)
    if file is None:
        raise UnavailableError(f"Debian's packages of {name} were unpacked, and there is no {tool.file} in them")
    if tool.starter:
        _write_starter(folder, file, tool.starter)
    root.touch()  # so that it is newer than builds without it


def _write_starter(folder: Path, program: Path, name: str) -> None:
    """Writes a script that runs a program with the libraries and fonts beside it."""
    root = folder / "root"
    libraries = sorted({str(file.parent) for file in root.rglob("*.so*") if file.parent.name != "gconv"})
    (folder / "fonts.conf").write_text(
        '<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig><dir>'
        f"{root}/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{folder}/font-cache</cachedir>"
        "<alias><family>system-ui</family><prefer><family>DejaVu Sans</family></prefer></alias></fontconfig>",
        encoding="utf-8",
    )
    starter = folder / name
    starter.write_text(
        f'#!/bin/sh\nexport LD_LIBRARY_PATH="{":".join(libraries)}" FONTCONFIG_FILE="{folder}/fonts.conf"\n'
        f'exec "{program}" "$@"\n',
        encoding="utf-8",
    )
    starter.chmod(0o755)


def main() -> None:
    """Gets the tools that the command line names."""
    for name in sys.argv[1:]:
        if name not in TOOLS:
            sys.exit(f"expected some of {', '.join(TOOLS)}, got {name!r}")
        fetch(name)


if __name__ == "__main__":
    main()

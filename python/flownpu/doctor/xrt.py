# SPDX-License-Identifier: Apache-2.0
"""The check of `flownpu doctor` for XRT: its libraries, their versions, and FlowNPU's plugin that calls them."""

import ctypes
import re
from pathlib import Path

from flownpu.aie.artifacts.toolchain import OLDEST_XRT
from flownpu.doctor.checks import Check, Host, Status
from flownpu.doctor.libraries import REINSTALL
from flownpu.doctor.npu_packages import release_of
from flownpu.registration import get_library_path
from flownpu.system import library_file

# FlowNPU's plugin that calls XRT (ops/npu/xrt): beside the provider's library, if it was built.
PLUGIN = library_file("flownpu_xrt")
# Where Debian and Ubuntu, other distributions, and AMD's own packages put XRT's libraries.
_FOLDERS = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/lib", "opt/xilinx/xrt/lib*")
_AMD = Path("opt/xilinx/xrt")
# FlowNPU calls libxrt_coreutil, which loads libxrt_core, which loads libxrt_driver_xdna (the shim) for NPUs.
_COREUTIL, _CORE, _SHIM = "libxrt_coreutil", "libxrt_core", "libxrt_driver_xdna"

_Version = tuple[int, int]


def diagnose_xrt(host: Host) -> Check:
    """Whether XRT is installed, complete and new enough, and whether this FlowNPU can call it."""
    release = release_of(host.root)
    folder = next((found for found in _folders(host.root) if _versions(found, _COREUTIL)), None) or _loaded_from(host)
    if folder is None or not _versions(folder, _COREUTIL):
        return Check("xrt", Status.NOTE, "not installed; the npu device needs it", release.runtime)
    place = f"/{folder.relative_to(host.root)}"
    version = max(_versions(folder, _COREUTIL))
    if version < OLDEST_XRT:
        old = f"{_text(version)} in {place}, which is too old: {_text(OLDEST_XRT)} or newer is needed"
        return Check("xrt", Status.BAD, old, release.runtime)
    for library, what in ((_CORE, "a library of its own"), (_SHIM, "its part for NPUs")):
        others = _versions(folder, library)
        if not others:
            missing = f"{_text(version)} in {place}, but {what}, {library}.so.2, is missing"
            return Check("xrt", Status.BAD, missing, release.runtime)
        if version not in others:
            mixed = f"{_text(version)} in {place}, but {what}, {library}.so.2, is of {_text(max(others))}"
            return Check("xrt", Status.BAD, mixed, release.runtime)
    return _diagnose_plugin(host, f"{_text(version)} in {place}", folder, release.headers)


def _diagnose_plugin(host: Host, found: str, folder: Path, headers: str) -> Check:
    """Whether FlowNPU's plugin for XRT was built and loads."""
    problem = host.load_plugin()
    if problem is None:
        missing = f"{found}, but this FlowNPU was built without XRT's headers: it has no {PLUGIN}"
        return Check("xrt", Status.NOTE, missing, f"{headers} && {REINSTALL}")
    if "cannot open shared object file" in problem and folder.is_relative_to(host.root / _AMD):
        unseen = f"{found}, which the loader does not look into: {problem}"
        return Check("xrt", Status.BAD, unseen, f"source /{_AMD}/setup.sh")
    if problem:
        return Check("xrt", Status.BAD, f"{found}, which {PLUGIN} was not built for: {problem}", REINSTALL)
    return Check("xrt", Status.GOOD, found)


def load_plugin() -> str | None:
    """Loads FlowNPU's plugin for XRT.

    Returns:
        "" if it loads, the loader's message if not; None if this build has no plugin.
    """
    file = Path(get_library_path()).parent / PLUGIN
    if not file.is_file():
        return None
    try:
        ctypes.CDLL(str(file))
    except OSError as error:
        return str(error)
    return ""


def _loaded_from(host: Host) -> Path | None:
    """The folder of an XRT that is elsewhere: the one that the loader mapped when it loaded FlowNPU's plugin."""
    if host.load_plugin() != "":
        return None
    found = re.search(rf"\s/(\S*)/{_COREUTIL}\.so", host.read("proc/self/maps"))
    return host.root / found[1] if found else None


def _folders(root: Path) -> list[Path]:
    return [folder for pattern in _FOLDERS for folder in sorted(root.glob(pattern))]


def _versions(folder: Path, library: str) -> set[_Version]:
    """A library's versions, from the ends of its files' names: libxrt_core.so.2.25.00 is version 2.25."""
    names = [file.name for file in folder.glob(f"{library}.so.*")]
    matches = [re.fullmatch(rf"{library}\.so\.(\d+)\.(\d+)(\..*)?", name) for name in names]
    return {(int(match[1]), int(match[2])) for match in matches if match}


def _text(version: _Version) -> str:
    return f"XRT {version[0]}.{version[1]}"

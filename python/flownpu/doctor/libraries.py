# SPDX-License-Identifier: Apache-2.0
"""The checks of `flownpu doctor` for FlowNPU's own libraries: whether this system loads them, and if not, why."""

import ctypes
import importlib
import platform
import re
import struct
from pathlib import Path

from flownpu.build_info import build_info
from flownpu.doctor.checks import Check, Status
from flownpu.errors import FlowNPUError
from flownpu.registration import get_library_path
from flownpu.system import IS_WINDOWS

REINSTALL = "pip install --force-reinstall --no-deps flownpu (built from source: . in FlowNPU's source folder)"
# Wheels are for this glibc or newer (scripts/release/wheels.py).
OLDEST_GLIBC = (2, 28)
BUILD_HERE = "pip install --force-reinstall --no-deps --no-binary flownpu flownpu, which takes g++ 12 or newer"
NEWER_SYSTEM = "a system with glibc 2.28 or newer (Debian 10, Ubuntu 20.04, RHEL 8), or a container of one"
# Linux's names (platform.machine()) of the values of ELF's e_machine, and of the machine field in Windows' PE files.
ARCHITECTURES = {3: "i686", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
ARCHITECTURES_OF_WINDOWS = {0x14C: "i686", 0x8664: "x86_64", 0xAA64: "aarch64"}
# Linux's names for what platform.machine() says on Windows.
NAMES = {"AMD64": "x86_64", "ARM64": "aarch64", "x86": "i686"}


def diagnose_provider() -> Check:
    """Whether the library that ONNX Runtime loads, the execution provider, can be loaded."""
    name = "provider library"
    try:
        path = get_library_path()
    except FlowNPUError as error:
        return Check(name, Status.BAD, str(error).rpartition(": ")[0], REINSTALL)
    try:
        # The dynamic linker's message names the missing symbol or library.
        ctypes.CDLL(path)
    except OSError as error:
        return _refused(name, Path(path), str(error))
    return Check(name, Status.GOOD, f"{path}, {build_info()}")


def diagnose_module() -> Check:
    """Whether `flownpu._native`, through which Python calls the provider's code, can be imported."""
    name = "native module"
    try:
        module = importlib.import_module("flownpu._native")
    except ImportError as error:
        # The error names the file only if the loader refused an existing file. On Linux the message begins with the
        # file; on Windows `error.path` has it, and the message is in the user's language.
        said = re.match(r"(/\S+\.so)", str(error))
        file = said[1] if said else error.path
        if file is None:
            found = f"{error}: it was built for another Python than {platform.python_version()}, or not at all"
            return Check(name, Status.BAD, found, REINSTALL)
        return _refused(name, Path(file), str(error))
    return Check(name, Status.GOOD, str(module.__file__))


def _refused(name: str, library: Path, said: str) -> Check:
    """The reason why the loader refuses a library, from its message `said`."""
    made_for, here = _architecture(library), _own_architecture()
    if made_for and made_for != here:
        found = f"is for {made_for}, and this Python is of {here}"
        remedy = f"a Python for {made_for}" + ("" if IS_WINDOWS else f", or {BUILD_HERE}")
        return Check(name, Status.BAD, found, remedy)
    wanted = [tuple(map(int, version.split("."))) for version in re.findall(r"version [`']GLIBC_([\d.]+)' not", said)]
    if wanted:
        have = platform.libc_ver()[1] or "none"
        found = f"needs glibc {'.'.join(map(str, max(wanted)))}, and this system has {have}"
        is_old = have == "none" or tuple(map(int, have.split("."))) < OLDEST_GLIBC
        return Check(name, Status.BAD, found, NEWER_SYSTEM if is_old else REINSTALL)
    if "cannot allocate memory" in said.lower() or "failed to map segment" in said:
        return Check(name, Status.BAD, f"there was no memory to load it: {said}", "ulimit -v unlimited")
    return Check(name, Status.BAD, f"does not load: {said}", REINSTALL)


def _architecture(library: Path) -> str:
    """The architecture that a library is for; empty if it is unknown."""
    try:
        with library.open("rb") as file:
            header = file.read(1024)
    except OSError:
        return ""
    if header[:2] == b"MZ":  # the offset of the PE header is at 0x3c, and the machine follows its "PE\0\0"
        place = int.from_bytes(header[0x3C:0x40], "little") + 4
        return ARCHITECTURES_OF_WINDOWS.get(int.from_bytes(header[place : place + 2], "little"), "")
    if len(header) < 20 or header[:4] != b"\x7fELF":
        return ""
    # The sixth byte of e_ident is 2 in a big-endian file.
    return ARCHITECTURES.get(struct.unpack_from(">H" if header[5] == 2 else "<H", header, 18)[0], "")


def _own_architecture() -> str:
    """This Python's architecture, which may have fewer bits than the machine."""
    machine = NAMES.get(platform.machine(), platform.machine())
    if struct.calcsize("P") == 4:
        return {"x86_64": "i686", "aarch64": "armv7l"}.get(machine, machine)
    return machine

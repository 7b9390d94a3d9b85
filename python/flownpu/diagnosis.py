# SPDX-License-Identifier: Apache-2.0
"""The checks of `flownpu doctor`: what is there, what is missing, and the command that mends it."""

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from flownpu.errors import FlowNPUError
from flownpu.machine import describe_machine, module_versions
from flownpu.registration import check_onnxruntime_version, get_ep_name, get_library_path, register

__all__ = ["Check", "Host", "Status", "diagnose", "diagnose_npu", "diagnose_software"]

# PCI devices of AMD (vendor 1022) that the amdxdna driver drives, from the driver's table of devices.
AMD = "0x1022"
NPUS = {"0x1502": "XDNA NPU (Phoenix, Hawk Point)", "0x17f0": "XDNA2 NPU (Strix, Strix Halo, Krackan)"}
# Bytes that the driver's user part maps and locks when it opens the NPU; amd/xdna-driver issue 903 shows it failing.
DRIVER_HEAP = 64 * 2**20


class Status(StrEnum):
    """What a check found."""

    GOOD = "good"
    NOTE = "note"
    """Something optional is absent; what needs it is named."""
    BAD = "bad"


@dataclass(frozen=True)
class Check:
    """One line of the diagnosis."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """The command that mends it; empty if there is nothing to mend."""


@dataclass(frozen=True)
class Host:
    """The machine that is looked at; tests make one up."""

    root: Path = Path("/")
    """Where /dev, /proc and /sys are."""
    may_use: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    memlock: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    """Bytes that a process may lock in memory; -1: any number."""


def diagnose(host: Host) -> Iterator[Check]:
    """All checks, in the order in which one thing needs another."""
    yield from diagnose_software()
    yield from diagnose_machine(host)
    yield from diagnose_npu(host)


def diagnose_software() -> Iterator[Check]:
    """Python, onnxruntime, GenAI, and whether the provider's library loads and registers."""
    yield Check("python", Status.GOOD, f"{sys.version.split()[0]} in {sys.prefix}")
    onnxruntime = _diagnose_onnxruntime()
    yield onnxruntime
    yield _diagnose_genai()
    library = _diagnose_library()
    yield library
    if Status.BAD not in (onnxruntime.status, library.status):
        yield _diagnose_registration()


def _diagnose_onnxruntime() -> Check:
    name = "onnxruntime"
    flavours = module_versions("onnxruntime")
    found = ", ".join(f"{flavour} {version}" for flavour, version in flavours.items())
    if not flavours:
        return Check(name, Status.BAD, "not installed", "pip install onnxruntime")
    if len(flavours) > 1:
        # All of them write into the same folder, and the one that was installed last has overwritten the others.
        spare = " ".join(flavour for flavour in flavours if flavour != "onnxruntime")
        remedy = f"pip uninstall -y {spare} onnxruntime && pip install onnxruntime"
        return Check(name, Status.BAD, f"{found}: several flavours overwrite one another", remedy)
    try:
        check_onnxruntime_version(next(iter(flavours.values())))
    except FlowNPUError as error:
        return Check(name, Status.BAD, str(error).partition(":")[0], f"pip install --upgrade {next(iter(flavours))}")
    return Check(name, Status.GOOD, found)


def _diagnose_genai() -> Check:
    found = ", ".join(f"{flavour} {version}" for flavour, version in module_versions("onnxruntime_genai").items())
    if found:
        return Check("onnxruntime-genai", Status.GOOD, found)
    missing = "not installed; flownpu run, chat and bench need it"
    return Check("onnxruntime-genai", Status.NOTE, missing, 'pip install "flownpu[genai]"')


def _diagnose_library() -> Check:
    again = "pip install --force-reinstall --no-deps . (in FlowNPU's source folder)"
    try:
        path = get_library_path()
    except FlowNPUError as error:
        return Check("provider library", Status.BAD, str(error).rpartition(": ")[0], again)
    try:
        # The dynamic linker's own words say which symbol or library is missing.
        ctypes.CDLL(path)
    except OSError as error:
        return Check("provider library", Status.BAD, f"does not load: {error}", again)
    return Check("provider library", Status.GOOD, path)


def _diagnose_registration() -> Check:
    import onnxruntime  # noqa: PLC0415 optional, and the check before this one has seen it

    try:
        register()
    except Exception as error:  # noqa: BLE001 whatever ORT raises is what this check reports
        return Check("registration", Status.BAD, str(error), "pip install --upgrade onnxruntime")
    devices = [device.device for device in onnxruntime.get_ep_devices() if device.ep_name == get_ep_name()]
    kinds = [device.type.name.lower() for device in devices]
    if not kinds:
        return Check(
            "registration", Status.BAD, f"{get_ep_name()} offers no device", "pip install --upgrade onnxruntime"
        )
    return Check("registration", Status.GOOD, f"{get_ep_name()} on {', '.join(kinds)}")


def diagnose_machine(host: Host) -> Iterator[Check]:
    """Processor and memory."""
    machine = describe_machine(host.root)
    kernels = Status.NOTE if machine.isa == "generic" else Status.GOOD
    slow = "; the CPU kernels are slow without AVX2" if kernels is Status.NOTE else ""
    yield Check("processor", kernels, f"{machine.cpu}, {machine.isa}, {machine.cores} cores{slow}")
    memory = psutil.virtual_memory()
    yield Check("memory", Status.GOOD, f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available")


def diagnose_npu(host: Host) -> Iterator[Check]:
    """The NPU: absent, without its driver, without permission, or ready. None of these hinders the cpu device."""
    hardware = _npu_on_the_bus(host)
    nodes = [node for node in sorted(host.root.glob("dev/accel/accel*")) if _is_amd(host, node)]
    module = (host.root / "sys/module/amdxdna").is_dir()
    if not nodes:
        if hardware is None:
            yield Check("npu", Status.NOTE, "none in this machine; the cpu device is used")
        elif not module:
            yield Check("npu", Status.BAD, f"{hardware}, but its driver amdxdna is not loaded", "sudo modprobe amdxdna")
        else:
            found = f"{hardware}; the driver amdxdna is loaded but made no /dev/accel/accel*"
            yield Check("npu", Status.BAD, found, "sudo dmesg | grep amdxdna")
        return
    for node in nodes:
        shown = f"/{node.relative_to(host.root)}"
        if host.may_use(node):
            yield Check("npu", Status.GOOD, f"{hardware or 'NPU'} at {shown}")
        else:
            found = f"{hardware or 'NPU'} at {shown}, which this user may not open"
            yield Check("npu", Status.BAD, found, 'sudo usermod -aG render "$USER", then log in again')
    if 0 <= host.memlock() < DRIVER_HEAP:
        found = f"{host.memlock() // 1024} KiB may be locked; the NPU's driver locks {DRIVER_HEAP // 2**20} MiB"
        yield Check("memory lock", Status.BAD, found, "ulimit -l unlimited")
    # In Ubuntu's and Debian's place, and in that of AMD's own packages.
    libraries = [
        *host.root.glob("usr/lib/*/libxrt_coreutil.so*"),
        *host.root.glob("opt/xilinx/xrt/lib/libxrt_coreutil.so*"),
    ]
    if libraries:
        yield Check("xrt", Status.GOOD, f"/{libraries[0].relative_to(host.root)}")
    else:
        yield Check("xrt", Status.NOTE, "not installed; the npu device needs it", "sudo apt install libxrt-npu2")
    yield Check("npu device", Status.NOTE, "not built into this version of FlowNPU; the cpu device is used")


def _npu_on_the_bus(host: Host) -> str | None:
    """What the PCI bus says of an NPU, whether or not a driver has taken it."""
    for device in sorted(host.root.glob("sys/bus/pci/devices/*")):
        if _read(device / "vendor") == AMD and (name := NPUS.get(_read(device / "device"))):
            return name
    return None


def _is_amd(host: Host, node: Path) -> bool:
    """Other vendors' accelerators are numbered in /dev/accel as well."""
    return _read(host.root / "sys/class/accel" / node.name / "device/vendor") in (AMD, "")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""

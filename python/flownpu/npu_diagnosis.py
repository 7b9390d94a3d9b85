# SPDX-License-Identifier: Apache-2.0
"""The checks of `flownpu doctor` for the NPU: its hardware, its driver, XRT, a model's artifacts, a call that ran."""

import gc
from collections.abc import Iterator
from pathlib import Path

from flownpu.checks import Check, Host, Status
from flownpu.generation import LanguageModel, Sampling, Timing
from flownpu.registration import get_library_path

__all__ = ["PLUGIN", "diagnose_model", "diagnose_npu"]

# PCI devices of AMD (vendor 1022) that the amdxdna driver drives, from the driver's table of devices.
AMD = "0x1022"
NPUS = {"0x1502": "XDNA NPU (Phoenix, Hawk Point)", "0x17f0": "XDNA2 NPU (Strix, Strix Halo, Krackan)"}
# Bytes that the driver's user part maps and locks when it opens the NPU; amd/xdna-driver issue 903 shows it failing.
DRIVER_HEAP = 64 * 2**20
# What talks to XRT, beside the provider's library where it was built (ops/npu/xrt).
PLUGIN = "libflownpu_xrt.so"


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
            yield Check("npu", Status.GOOD, f"{hardware or 'NPU'} at {shown}{_versions(host, node)}")
        else:
            found = f"{hardware or 'NPU'} at {shown}, which this user may not open"
            yield Check("npu", Status.BAD, found, 'sudo usermod -aG render "$USER", then log in again')
    if 0 <= host.memlock() < DRIVER_HEAP:
        found = f"{host.memlock() // 1024} KiB may be locked; the NPU's driver locks {DRIVER_HEAP // 2**20} MiB"
        yield Check("memory lock", Status.BAD, found, "ulimit -l unlimited")
    yield _diagnose_xrt(host)


def _versions(host: Host, node: Path) -> str:
    """What the driver says of itself and of the NPU's firmware; whether they are too old, only XRT can say."""
    device = host.root / "sys/class/accel" / node.name / "device"
    driver, firmware = _read(host.root / "sys/module/amdxdna/version"), _read(device / "fw_version")
    return (f", driver {driver}" if driver else "") + (f", firmware {firmware}" if firmware else "")


def _diagnose_xrt(host: Host) -> Check:
    """XRT's library, and ours that calls it."""
    # In Ubuntu's and Debian's place, and in that of AMD's own packages.
    libraries = [
        *host.root.glob("usr/lib/*/libxrt_coreutil.so*"),
        *host.root.glob("opt/xilinx/xrt/lib/libxrt_coreutil.so*"),
    ]
    if not libraries:
        return Check("xrt", Status.NOTE, "not installed; the npu device needs it", "sudo apt install libxrt-npu2")
    found = f"/{libraries[0].relative_to(host.root)}"
    if not host.has_plugin():
        missing = f"{found}, but this FlowNPU was built without XRT's headers: it has no {PLUGIN}"
        again = "sudo apt install libxrt-dev && pip install --force-reinstall --no-deps . (in FlowNPU's source folder)"
        return Check("xrt", Status.NOTE, missing, again)
    return Check("xrt", Status.GOOD, found)


def has_plugin() -> bool:
    """Whether this FlowNPU can talk to XRT."""
    return (Path(get_library_path()).parent / PLUGIN).is_file()


def diagnose_model(folder: Path, *, emulated: bool) -> Iterator[Check]:
    """Whether a model's artifacts are there, and whether the device computes a token with them.

    Args:
        folder: the model's.
        emulated: look at the emulated NPU rather than at this machine's.
    """
    device, kind = ("emulate", "emulate") if emulated else ("npu", "xclbin")
    artifacts = folder / "artifacts" / ("emulate" if emulated else "npu2")
    build = f"flownpu build {folder} --for {kind}"
    if not (artifacts / "index.words").is_file():
        plans = " (the plans are: the toolchain was missing)" if (artifacts / "manifest.json").is_file() else ""
        yield Check("artifacts", Status.BAD, f"none for device={device} in {artifacts}{plans}", build)
        return
    yield Check("artifacts", Status.GOOD, str(artifacts))
    try:
        model = LanguageModel(folder, options={"device": device})
        list(model.complete(model.tokens_of_text("a"), 1, Sampling(temperature=0), Timing()))
        found = model.placement["summary"]
    except Exception as error:  # noqa: BLE001 (whatever GenAI raises is what this check reports)
        remedy = build if emulated else "sudo dmesg | grep amdxdna"
        yield Check("a token", Status.BAD, str(error), remedy)
        return
    finally:
        gc.collect()  # a model that failed is kept by its traceback
    yield Check("a token", Status.GOOD, found)


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

# SPDX-License-Identifier: Apache-2.0
"""The checks of `flownpu doctor` for the NPU: hardware, driver, XRT, a model's artifacts, a token computed by it."""

import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flownpu.doctor.checks import JOIN_THE_GROUP, Check, Host, Status
from flownpu.doctor.npu_packages import Release, release_of
from flownpu.doctor.xrt import diagnose_xrt
from flownpu.generate.language_model import LanguageModel, Sampling, Timing

# AMD's PCI devices (vendor 1022) that the driver amdxdna supports, from its table of devices (Linux 7).
AMD = "0x1022"
NPUS = {"0x1502": "XDNA NPU (Phoenix, Hawk Point)", "0x17f0": "XDNA2 NPU (Strix, Strix Halo, Krackan)"}
# A later generation, which the driver calls NPU3: FlowNPU has no designs for it.
LATER_NPUS = {f"0x{device}" for device in ("17f1", "17f2", "17f3", "1b0a", "1b0b", "1b0c")}
# Bytes that the driver's user part maps and locks when it opens the NPU; amd/xdna-driver issue 903 shows it failing.
DRIVER_HEAP = 64 * 2**20
# The number of the capability with which a process may lock any amount of memory (capabilities(7)).
CAP_IPC_LOCK = 14
ALL_USERS = "0 0 4294967295"
"""/proc/self/uid_map outside of containers: the kernel asks for the capability there, not for one in a container."""
DRIVER_LOG = "sudo dmesg | grep amdxdna"
# The driver's log messages about firmware whose protocol it does not know: words up to Linux 6.19 (aie2_pci.c), later
# only the error number EOPNOTSUPP (aie.c), which no other failure of its start has.
REFUSED_FIRMWARE = r"amdxdna.*\b(Incompatible firmware.*|Firmware minor version.*|start npu failed, ret -95)"
# Texts that a session's errors contain too (ops/npu/driver/xrt_plugin.cc): the driver or the firmware does not know a
# request; the NPU has no room; memory cannot be locked. For pam_limits `*` is everybody but root.
TOO_OLD = "a firmware of the NPU of its age"
FULL = "close other programs that use the NPU"
MORE_LOCKED_MEMORY = "echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.conf, then log in again"
MORE_LOCKED_MEMORY_OF_ROOT = "start the container with --ulimit memlock=-1, or the service with LimitMEMLOCK=infinity"


@dataclass(frozen=True)
class _Npu:
    """An NPU on the PCI bus, whether or not a driver is bound to it."""

    device: str
    revision: str

    @property
    def is_known(self) -> bool:
        """Whether FlowNPU has designs for it."""
        return self.device in NPUS

    @property
    def name(self) -> str:
        return NPUS.get(self.device, f"NPU of a generation after XDNA2 (PCI {self.device[2:]})")


def diagnose_npu(host: Host) -> Iterator[Check]:
    """The NPU: absent, without its driver, without permission, or ready. The cpu device works in any of these cases."""
    npus = _npus_on_the_bus(host)
    nodes = [node for node in sorted(host.root.glob("dev/accel/accel*")) if _is_amd(host, node)]
    if not nodes:
        yield (
            _diagnose_driver(host, npus[0])
            if npus
            else Check("npu", Status.NOTE, "none in this machine; the cpu device is used")
        )
        return
    for node in nodes:
        yield _diagnose_node(host, node, npus)
    if len(nodes) > 1:
        yield Check("npus", Status.NOTE, f"{len(nodes)}; FlowNPU uses the first that XRT finds", "xrt-smi examine")
    if "amd_iommu=off" in host.read("proc/cmdline").split():
        found = "off (amd_iommu=off): the NPU's driver refuses every program, as it shares their addresses"
        yield Check("iommu", Status.BAD, found, "remove amd_iommu=off from the kernel's command line, then restart")
    locked = _lockable(host)
    if locked is not None and locked < DRIVER_HEAP:
        found = f"{locked // 1024} KiB may be locked; the NPU's driver locks {DRIVER_HEAP // 2**20} MiB"
        yield Check("memory lock", Status.BAD, found, _more_locked_memory(host))
    yield diagnose_xrt(host)


def _diagnose_driver(host: Host, npu: _Npu) -> Check:
    """The reason why an NPU has no device file."""
    if not npu.is_known:
        return Check("npu", Status.NOTE, f"{npu.name}, for which FlowNPU has no designs; the cpu device is used")
    release = release_of(host.root)
    if not (host.root / "sys/module/amdxdna").is_dir():
        kernel = host.read("proc/sys/kernel/osrelease")
        modules = host.root / "lib/modules" / kernel
        if modules.is_dir() and not any(modules.rglob("amdxdna.ko*")):
            found = f"{npu.name}, but Linux {kernel} of {release.name} has no driver amdxdna for it"
            return Check("npu", Status.BAD, found, release.driver)
        return Check("npu", Status.BAD, f"{npu.name}, but its driver amdxdna is not loaded", "sudo modprobe amdxdna")
    folder = f"lib/firmware/amdnpu/{npu.device[2:]}_{npu.revision[2:]}"
    if npu.revision and not any((host.root / folder).glob("*.sbin*")):
        found = f"{npu.name}; its driver amdxdna is loaded, and finds no firmware in /{folder}"
        return Check("npu", Status.BAD, found, release.firmware)
    refused = re.search(REFUSED_FIRMWARE, host.kernel_log())
    if refused:
        files = ", ".join([*_firmware_files(host.root / folder), refused[1]])
        found = f"{npu.name}; its driver amdxdna does not take the firmware in /{folder} ({files})"
        return Check("npu", Status.BAD, found, _other_versions(release))
    return Check("npu", Status.BAD, f"{npu.name}; its driver amdxdna is loaded, and could not start it", DRIVER_LOG)


def _firmware_files(folder: Path) -> list[str]:
    """The firmware's links by the names that the driver asks for: "npu.sbin is npu.sbin.1.0.0.63"."""
    links = [(file, file.readlink().name) for file in sorted(folder.glob("*.sbin*")) if file.is_symlink()]
    return [f"{file.name.removesuffix('.zst')} is {target.removesuffix('.zst')}" for file, target in links]


def _other_versions(release: Release) -> str:
    """The commands that install a firmware and a driver that work together."""
    if release.firmware == release.driver:
        return release.driver
    return f"{release.firmware}, and if that changes nothing {release.driver}"


def _diagnose_node(host: Host, node: Path, npus: list[_Npu]) -> Check:
    """Whether this user may open an NPU's device file."""
    shown = f"/{node.relative_to(host.root)}"
    own = _npu_at(host, f"sys/class/accel/{node.name}/device")
    npu = own if own.device else next(iter(npus), None)
    name = npu.name if npu else "NPU"
    if npu and not npu.is_known:
        return Check("npu", Status.NOTE, f"{name} at {shown}, for which FlowNPU has no designs")
    if host.may_use(node):
        return Check("npu", Status.GOOD, f"{name} at {shown}{_versions(host, node)}")
    return Check("npu", Status.BAD, f"{name} at {shown}, which this user may not open", JOIN_THE_GROUP)


def _versions(host: Host, node: Path) -> str:
    """The versions of the driver and of the NPU's firmware, as text; only XRT can say whether they are too old."""
    driver = host.read("sys/module/amdxdna/version")
    firmware = host.read(f"sys/class/accel/{node.name}/device/fw_version")
    return (f", driver {driver}" if driver else "") + (f", firmware {firmware}" if firmware else "")


def _lockable(host: Host) -> int | None:
    """Bytes of memory that this process may lock; None: no limit."""
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", host.read("proc/self/status"), re.MULTILINE)
    is_outside = host.read("proc/self/uid_map").split() == ALL_USERS.split()
    if capabilities and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1 and is_outside:
        return None
    limit = re.search(r"^Max locked memory\s+(\d+)", host.read("proc/self/limits"), re.MULTILINE)
    return int(limit[1]) if limit else None


def diagnose_model(host: Host, folder: Path, *, emulated: bool) -> Iterator[Check]:
    """Whether a model's artifacts exist, and whether the device computes a token with them.

    Args:
        host: this machine.
        folder: the model's folder.
        emulated: check the emulated NPU rather than this machine's.
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
        yield Check("a token", Status.BAD, str(error), build if emulated else _remedy_of_a_failure(host, str(error)))
        return
    finally:
        gc.collect()  # the traceback of a failure keeps the model alive until then
    yield Check("a token", Status.GOOD, found)


def _remedy_of_a_failure(host: Host, error: str) -> str:
    """The command that mends a session's error if it depends on the machine; else the one that shows the log."""
    release = release_of(host.root)
    remedies = {
        TOO_OLD: _other_versions(release),
        JOIN_THE_GROUP: JOIN_THE_GROUP,
        MORE_LOCKED_MEMORY: _more_locked_memory(host),
        FULL: "xrt-smi examine --report aie-partitions, which names the programs that use the NPU: close them",
    }
    return next((remedy for said, remedy in remedies.items() if said in error), DRIVER_LOG)


def _more_locked_memory(host: Host) -> str:
    is_root = re.search(r"^Uid:\s+\d+\s+0\s", host.read("proc/self/status"), re.MULTILINE)
    return MORE_LOCKED_MEMORY_OF_ROOT if is_root else MORE_LOCKED_MEMORY


def _npus_on_the_bus(host: Host) -> list[_Npu]:
    places = sorted(host.root.glob("sys/bus/pci/devices/*"))
    amds = [place for place in places if host.read(f"{place.relative_to(host.root)}/vendor") == AMD]
    found = [_npu_at(host, str(place.relative_to(host.root))) for place in amds]
    return [npu for npu in found if npu.is_known or npu.device in LATER_NPUS]


def _npu_at(host: Host, place: str) -> _Npu:
    return _Npu(host.read(f"{place}/device"), host.read(f"{place}/revision"))


def _is_amd(host: Host, node: Path) -> bool:
    """Whether a device file is AMD's: /dev/accel has other vendors' accelerators as well."""
    return host.read(f"sys/class/accel/{node.name}/device/vendor") in (AMD, "")

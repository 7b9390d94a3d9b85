# SPDX-License-Identifier: Apache-2.0
"""The check of `flownpu doctor` for Vulkan, on which the gpu device runs where OpenCL has no GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

from flownpu import _native
from flownpu.doctor.checks import JOIN_THE_GROUP, Check, Host, Status
from flownpu.doctor.npu_packages import release_of

_NAMES = ("mesa-vulkan-drivers", "vulkan-radeon")
_ANY = "install the GPU's driver: Mesa's for AMD and Intel, in packages such as " + " or ".join(_NAMES)


@dataclass(frozen=True)
class Vulkan:
    """The loader and devices of Vulkan on this machine.

    Attributes:
        problem: why Vulkan cannot be used: there is no loader, or no driver; "" where it can be used.
        devices: each device, and what kernels need that it lacks, or "".
        failure: the message of a call that failed; "" where none did.
    """

    problem: str = ""
    devices: Sequence[tuple[_native.GpuFacts, str]] = ()
    failure: str = ""


def find_vulkan() -> Vulkan:
    """Loads Vulkan and lists what this machine has of it."""
    try:
        if problem := _native.problem_of_vulkan():
            return Vulkan(problem)
        return Vulkan(devices=_native.vulkan_devices())
    except (RuntimeError, ValueError) as error:
        return Vulkan(failure=str(error))


def diagnose_vulkan(host: Host, found: Vulkan) -> Check:
    """Whether there is a GPU for device="gpu" with gpu_api=vulkan. As with OpenCL, without one this is a note."""
    name, needs = "vulkan", "the gpu device can use it in place of OpenCL"
    install = release_of(host.root).vulkan or _ANY
    if found.failure:
        return Check(name, Status.BAD, found.failure, f"update or remove the driver that fails; {install}")
    if found.problem:
        missing = "no driver" if "INCOMPATIBLE_DRIVER" in found.problem else "no loader (libvulkan.so.1) of 1.3"
        return Check(name, Status.NOTE, f"{missing}; {needs}", install)
    gpus = [(facts, lacks) for facts, lacks in found.devices if facts.kind == "gpu"]
    usable = [facts for facts, lacks in gpus if not lacks]
    if usable:
        shown = "; ".join(f"{one.title}, driver {one.driver}, {one.compute_units} compute units" for one in usable)
        return Check(name, Status.GOOD, shown)
    if gpus:
        lacking = "; ".join(f"{facts.title} without {lacks}" for facts, lacks in gpus)
        return Check(name, Status.NOTE, f"{lacking}, which kernels need", f"update the driver; {install}")
    titles = [facts.title for facts, _ in found.devices]
    text = f"{titles[0]}: a CPU's, which is there to test; no GPU" if titles else f"a driver, but no device; {needs}"
    nodes = sorted(host.root.glob("dev/dri/renderD*"))
    no_permission = bool(nodes) and not any(host.may_use(node) for node in nodes)
    return Check(name, Status.NOTE, text, JOIN_THE_GROUP if no_permission else install)

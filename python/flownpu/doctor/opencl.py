# SPDX-License-Identifier: Apache-2.0
"""The check of `flownpu doctor` for OpenCL, which the gpu device needs: loader, implementations, devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from flownpu import _native
from flownpu.doctor.checks import JOIN_THE_GROUP, Check, Host, Status
from flownpu.doctor.npu_packages import release_of
from flownpu.system.opencl_loader import use_installed_packages

# From pip, without the system's packages: PoCL, which computes on the CPU, and a loader, which pyopencl includes.
FROM_PIP = "pip install pocl-binary-distribution pyopencl"
ENABLE_RUSTICL = "export RUSTICL_ENABLE=radeonsi (Intel: iris), without which Mesa's OpenCL offers no device"


@dataclass(frozen=True)
class OpenCl:
    """The OpenCL loader and devices of this machine.

    Attributes:
        problem: why the loader could not be loaded; "": it was loaded.
        platforms: the names of the implementations.
        devices: the devices of all implementations.
        failure: the message of a call that failed; "": none failed.
        stored_type: the type in which a GPU's kernels store activations, and why; "": there is no GPU.
    """

    problem: str = ""
    platforms: Sequence[str] = ()
    devices: Sequence[_native.GpuFacts] = ()
    failure: str = ""
    stored_type: str = ""


def find_opencl() -> OpenCl:
    """Loads OpenCL and lists what this machine has of it."""
    use_installed_packages()
    if problem := _native.problem_of_opencl_loader():
        return OpenCl(problem)
    try:
        devices = _native.opencl_devices()
        has_gpu = any(device.kind == "gpu" for device in devices)
        # Depends on whether the driver converts to and from float16 correctly; the result of one test is kept.
        stored = cast("_native.GpuDevice", _native.make_device("gpu", {})).stored_type() if has_gpu else ""
        return OpenCl("", _native.opencl_platforms(), devices, stored_type=stored)
    except (RuntimeError, ValueError) as error:
        return OpenCl(failure=str(error))


def diagnose_opencl(host: Host, found: OpenCl) -> Check:
    """Whether there is a GPU for device="gpu". A GPU is optional: without one this is a note, not an error."""
    name, needs = "opencl", "the gpu device needs it"
    packages = release_of(host.root).opencl
    install = f"{packages}; or to try it {FROM_PIP}" if packages else FROM_PIP
    if found.problem:
        return Check(name, Status.NOTE, f"no loader (libOpenCL.so.1); {needs}", install)
    if found.failure:
        return Check(name, Status.BAD, found.failure, f"update or remove the driver that fails; {install}")
    if not found.platforms:
        return Check(name, Status.NOTE, f"a loader, but no implementation; {needs}", install)
    platforms = ", ".join(found.platforms)
    if not found.devices:
        return Check(name, Status.NOTE, f"{platforms}, but no device of it; {needs}", _remedy_of_no_gpu(host))
    gpus = [device for device in found.devices if device.kind == "gpu"]
    if not gpus:
        first = found.devices[0].title
        text = f"{first}: a CPU's, which is there to test; no GPU among {platforms}"
        remedy = _remedy_of_no_gpu(host)
        return Check(name, Status.NOTE, text, f"{packages}, and {remedy}" if packages else remedy)
    shown = "; ".join(f"{one.title}, driver {one.driver}, {one.compute_units} compute units" for one in gpus)
    stored = f"; activations are stored as {found.stored_type}" if found.stored_type else ""
    return Check(name, Status.GOOD, shown + stored)


def _remedy_of_no_gpu(host: Host) -> str:
    nodes: list[Path] = sorted(host.root.glob("dev/dri/renderD*"))
    if nodes and not any(host.may_use(node) for node in nodes):
        return JOIN_THE_GROUP
    return ENABLE_RUSTICL

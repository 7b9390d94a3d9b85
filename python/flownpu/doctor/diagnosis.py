# SPDX-License-Identifier: Apache-2.0
"""Runs the checks of `flownpu doctor`. Those of Python's packages are here, those of devices in the other modules."""

import sys
from collections.abc import Iterator
from pathlib import Path

from flownpu.doctor import windows
from flownpu.doctor.checks import Check, Host, Status
from flownpu.doctor.libraries import diagnose_module, diagnose_provider
from flownpu.errors import FlowNPUError
from flownpu.machine import module_folders, module_versions
from flownpu.registration import check_onnxruntime_version, get_ep_name, register
from flownpu.system import IS_WINDOWS


def diagnose(host: Host, model: Path | None = None) -> Iterator[Check]:
    """All checks in the order of their dependencies; with a model's folder also whether the NPU runs that model."""
    software = list(diagnose_software())
    yield from software
    if any(check.name == "native module" and check.status is Status.BAD for check in software):
        return  # all other checks need the native module
    from flownpu.doctor.hub import diagnose_hub  # noqa: PLC0415 imports the native module
    from flownpu.doctor.limits import diagnose_machine  # noqa: PLC0415 likewise
    from flownpu.doctor.npu import diagnose_model  # noqa: PLC0415 likewise

    yield from diagnose_machine(host)
    yield from diagnose_hub()
    devices = list(windows.diagnose_devices() if IS_WINDOWS else _diagnose_devices(host))
    yield from devices
    if model is None:
        return
    states = {check.status for check in devices if check.name == "npu"}
    if states == {Status.BAD}:
        yield Check("a token", Status.NOTE, f"not tried with {model}: the NPU is to be mended first")
        return
    yield from diagnose_model(host, model, emulated=Status.GOOD not in states)


def _diagnose_devices(host: Host) -> Iterator[Check]:
    from flownpu.doctor.compilers import diagnose_compilers  # noqa: PLC0415 other commands need not read the designs
    from flownpu.doctor.npu import diagnose_npu  # noqa: PLC0415 imports the native module
    from flownpu.doctor.opencl import diagnose_opencl, find_opencl  # noqa: PLC0415 likewise
    from flownpu.doctor.vulkan import diagnose_vulkan, find_vulkan  # noqa: PLC0415 likewise

    yield diagnose_opencl(host, find_opencl())
    yield diagnose_vulkan(host, find_vulkan())
    yield from diagnose_npu(host)
    yield from diagnose_compilers()


def diagnose_software() -> Iterator[Check]:
    """Python, onnxruntime, GenAI, and whether the provider's library loads and registers."""
    yield Check("python", Status.GOOD, f"{sys.version.split()[0]} in {sys.prefix}")
    onnxruntime = _diagnose_onnxruntime()
    yield onnxruntime
    yield _diagnose_genai()
    library = diagnose_provider()
    yield library
    yield diagnose_module()
    if Status.BAD not in (onnxruntime.status, library.status):
        yield _diagnose_registration()


def _diagnose_onnxruntime() -> Check:
    name = "onnxruntime"
    flavours = module_versions("onnxruntime")
    found = ", ".join(f"{flavour} {version}" for flavour, version in flavours.items())
    if not flavours:
        return Check(name, Status.BAD, "not installed", "pip install onnxruntime")
    if len(flavours) > 1:
        # All of them are installed into the same folder, where the last one has overwritten the others' files.
        spare = " ".join(flavour for flavour in flavours if flavour != "onnxruntime")
        remedy = f"pip uninstall -y {spare} onnxruntime && pip install onnxruntime"
        return Check(name, Status.BAD, f"{found}: several flavours overwrite one another", remedy)
    folders = module_folders(next(iter(flavours)))
    if len(folders) > 1:
        others = " and ".join(f"{version} in {folder}" for folder, version in folders.items())
        remedy = f"{' && '.join(['pip uninstall -y onnxruntime'] * len(folders))} && pip install onnxruntime"
        return Check(name, Status.BAD, f"{len(folders)} times: {others}; the first is imported", remedy)
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


def _diagnose_registration() -> Check:
    try:
        import onnxruntime  # noqa: PLC0415 optional: an earlier check has found it installed
    except ImportError as error:
        remedy = windows.RUN_TIME if IS_WINDOWS else "pip install --force-reinstall onnxruntime"
        return Check("registration", Status.BAD, f"onnxruntime does not load: {error}", remedy)
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

# SPDX-License-Identifier: Apache-2.0
"""Mesa's lavapipe, a Vulkan device that computes on the CPU, from Debian's packages (scripts/tools.py): that of the
machine's own release, which this process loads; and a newer one with matrix units, for processes with a C library of
its own.
"""

import contextlib
import ctypes
import json
import struct
from collections.abc import Iterator
from pathlib import Path

from scripts import tools
from tests import loader_double

ROOT = tools.folder_of("vulkan") / "root"
# The first words of a module of SPIR-V: magic, version 1.6, no generator.
HEAD = struct.pack("<III", 0x07230203, 0x00010600, 0)


class MissingError(Exception):
    """The packages are not there; the message says why, or what gets them."""


def variables(folder: Path) -> dict[str, str]:
    """The environment variables by which FlowNPU finds the loader, and the loader lavapipe only.

    Args:
        folder: gets the driver's description and FlowNPU's compiled kernels.

    Raises:
        MissingError: the packages were not fetched.
    """
    loader = tools.find("vulkan")
    drivers = sorted(ROOT.glob("usr/lib/*/libvulkan_lvp.so"))
    if loader is None or not drivers:
        raise MissingError(tools.reason("vulkan"))
    _load_libraries(drivers[0].parent)
    description = _described(drivers[0], folder)
    return {
        "FLOWNPU_VULKAN": str(loader_double.library_of("vulkan")),
        loader_double.loader_of("vulkan"): str(loader),
        "VK_ICD_FILENAMES": str(description),  # loaders before 1.3.207
        "VK_DRIVER_FILES": str(description),
        "FLOWNPU_GPU_CACHE": str(folder / "vulkan"),
    }


def newest(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The beginning of a command that runs a program beside the newest lavapipe, and its environment variables.

    Args:
        folder: as variables() has it.

    Raises:
        MissingError: likewise.
    """
    driver = tools.find("lavapipe")
    if driver is None:
        raise MissingError(tools.reason("lavapipe"))
    libraries = Path(driver).parent
    description = _described(Path(driver), folder)
    found = {name: str(description) for name in ("VK_ICD_FILENAMES", "VK_DRIVER_FILES")}
    found |= {"FLOWNPU_VULKAN": str(libraries / "libvulkan.so.1"), "FLOWNPU_GPU_CACHE": str(folder / "vulkan")}
    found["GALLIVM_PERF"] = "nopt"  # LLVM's passes take longer than the kernels of these tests
    (loader,) = libraries.glob("ld-linux-*.so.*")
    return [str(loader), "--library-path", str(libraries)], found


def newest_spirv_val() -> list[str]:
    """The command of the newest validator; it knows cooperative matrices."""
    libraries = Path(str(tools.find("lavapipe"))).parent
    (loader,) = libraries.glob("ld-linux-*.so.*")
    return [str(loader), "--library-path", str(libraries), str(libraries.parents[2] / "usr/bin/spirv-val")]


def _described(driver: Path, folder: Path) -> Path:
    """Writes the description by which the loader finds a driver."""
    description = folder / "lavapipe.json"
    named = {"library_path": str(driver), "api_version": "1.3.0"}
    description.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": named}), encoding="utf-8")
    return description


def spirv_val() -> Path:
    """The validator of SPIR-V, which the same packages have."""
    return ROOT / "usr/bin/spirv-val"


def modules_in(cache: Path) -> Iterator[bytes]:
    """The modules of kernels that FlowNPU's cache has: behind the text of the device, before the binary."""
    for file in cache.glob("*.bin"):
        content = file.read_bytes()
        begin = max(content.find(HEAD), 0)
        length = content[content.rfind(b"\n", 0, begin) + 1 : max(begin - 1, 0)]
        if length.isdigit():  # else it is what was found out about a kernel
            yield content[begin : begin + int(length)]


def _load_libraries(folder: Path) -> None:
    """Loads what the driver needs and the machine may lack: the linker then finds it by its name.

    A library may need another one, so that those that fail are tried once more.
    """
    drivers = ("libvulkan_", "libVkLayer_")
    libraries = [file for file in sorted(folder.glob("*.so.*")) if not file.name.startswith(drivers)]
    for _ in range(2):
        for library in libraries:
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(library))

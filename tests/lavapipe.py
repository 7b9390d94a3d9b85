# SPDX-License-Identifier: Apache-2.0
"""Mesa's lavapipe, a Vulkan device that computes on the CPU, from Debian's packages (scripts/tools.py)."""

import contextlib
import ctypes
import json
from pathlib import Path

from scripts import tools
from tests import loader_double

ROOT = tools.folder_of("vulkan") / "root"


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
    description = folder / "lavapipe.json"
    driver = {"library_path": str(drivers[0]), "api_version": "1.3.0"}
    description.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": driver}), encoding="utf-8")
    return {
        "FLOWNPU_VULKAN": str(loader_double.library_of("vulkan")),
        loader_double.loader_of("vulkan"): str(loader),
        "VK_ICD_FILENAMES": str(description),  # loaders before 1.3.207
        "VK_DRIVER_FILES": str(description),
        "FLOWNPU_GPU_CACHE": str(folder / "vulkan"),
    }


def spirv_val() -> Path:
    """The validator of SPIR-V, which the same packages have."""
    return ROOT / "usr/bin/spirv-val"


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

# SPDX-License-Identifier: Apache-2.0
"""Where OpenCL's loader is when the system has none: pyopencl's package brings one, and pocl-binary-distribution PoCL.

The C++ (ops/gpu/opencl/loader.h) takes the system's, or the file that FLOWNPU_OPENCL names.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

from flownpu.system import OPENCL_LOADER

__all__ = ["installed_packages", "use_installed_packages"]

_VENDORS = Path("/etc/OpenCL/vendors")


def installed_packages() -> dict[str, str]:
    """What the environment has to say for the loader and PoCL of packages to be found; nothing without pyopencl.

    pyopencl's loader reads PYOPENCL_HOME before anything else, and ends the process without it; PoCL has to be named
    by its path, for its own `.icd` file names it without.
    """
    spec = importlib.util.find_spec("pyopencl")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    loaders = sorted(folder.glob(".libs/libOpenCL*.so*"))
    if spec is None or not loaders:
        return {}
    found = {"FLOWNPU_OPENCL": str(loaders[0]), "PYOPENCL_HOME": str(folder)}
    if pocl := sorted(folder.glob(".libs/libpocl*.so*")):
        found["OCL_ICD_VENDORS"] = str(pocl[0])
    return found


def use_installed_packages() -> None:
    """Names packages' loader, and PoCL, in the environment if the system lacks a loader or an implementation.

    What the environment says already stays, and so do the system's implementations.
    """
    has_implementation = "OCL_ICD_VENDORS" in os.environ or any(_VENDORS.glob("*.icd"))
    if "FLOWNPU_OPENCL" in os.environ or (has_implementation and _has_loader()):
        return
    found = installed_packages()
    if found and has_implementation:
        found["OCL_ICD_VENDORS"] = str(_VENDORS)
    for name, value in found.items():
        os.environ.setdefault(name, value)


def _has_loader() -> bool:
    """Whether the linker finds the system's, which is then loaded for what follows."""
    try:
        ctypes.CDLL(OPENCL_LOADER)
    except OSError:
        return False
    return True

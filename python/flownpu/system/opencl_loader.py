# SPDX-License-Identifier: Apache-2.0
"""Finds OpenCL's loader (libOpenCL) and the implementation PoCL in Python packages, where the system has none.

The package pyopencl contains a loader, and pocl-binary-distribution adds PoCL to it. The C++ (ops/gpu/opencl/loader.h)
loads the system's loader, or the file that the environment variable FLOWNPU_OPENCL names.
"""

import ctypes
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

from flownpu.system import OPENCL_LOADER

_VENDORS = Path("/etc/OpenCL/vendors")


def installed_packages() -> dict[str, str]:
    """The environment variables by which the packages' loader and PoCL are found; empty without pyopencl.

    pyopencl's loader reads PYOPENCL_HOME before anything else, and ends the process if it is not set. PoCL must be
    named by its full path, since its own `.icd` file has only the file's name.
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
    """Sets these environment variables if the system lacks a loader or an implementation.

    Variables that are set already keep their values, and the system's implementations stay in use.
    """
    has_implementation = "OCL_ICD_VENDORS" in os.environ or any(_VENDORS.glob("*.icd"))
    if "FLOWNPU_OPENCL" in os.environ or (has_implementation and _has_loader()):
        return
    found = installed_packages()
    if found and has_implementation:
        found["OCL_ICD_VENDORS"] = str(_VENDORS)
    for name, value in found.items():
        os.environ.setdefault(name, value)


def use_packages_of(options: Mapping[str, str]) -> None:
    """As `use_installed_packages`, if options of the provider name the GPU or have a price of it."""
    if "gpu" in re.split(r"\W", f"{options.get('device', '')} {options.get('prices', '')}"):
        use_installed_packages()


def _has_loader() -> bool:
    """Whether the dynamic linker finds the system's loader, which stays loaded if it does."""
    try:
        ctypes.CDLL(OPENCL_LOADER)
    except OSError:
        return False
    return True

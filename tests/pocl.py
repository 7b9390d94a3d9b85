# SPDX-License-Identifier: Apache-2.0
"""PoCL and an OpenCL loader from the environment's Python packages, independent of the system's OpenCL."""

from pathlib import Path

from flownpu.system.opencl_loader import installed_packages
from tests import loader_double

COMPILED = Path(__file__).resolve().parent.parent / "build" / "pocl"
# Most of the time of a first run is compilation. PoCL compiles no kernel again for small launches, and optimises none:
# that takes up to 4 seconds of each, more than most then run in all tests.
QUICK_COMPILATION = {"POCL_WORK_GROUP_SPECIALIZATION": "0", "POCL_EXTRA_BUILD_FLAGS": "-cl-opt-disable"}


class MissingError(Exception):
    """One of the packages is not installed, or has nothing for this machine."""


def variables(folder: Path) -> dict[str, str]:
    """The environment variables by which FlowNPU finds PoCL, through the double of the loader (opencl_double.py).

    PoCL keeps compiled kernels, by source, options and its own version, for the next run of the tests.

    Args:
        folder: where FlowNPU keeps compiled kernels.

    Raises:
        MissingError: the loader or PoCL is not installed.
    """
    found = installed_packages()
    if "OCL_ICD_VENDORS" not in found:
        raise MissingError('PoCL or pyopencl is not installed: pip install "flownpu[test]"')
    COMPILED.mkdir(parents=True, exist_ok=True)
    loader = {
        "FLOWNPU_OPENCL": str(loader_double.library_of("opencl")),
        loader_double.loader_of("opencl"): found["FLOWNPU_OPENCL"],
    }
    return (
        found
        | loader
        | QUICK_COMPILATION
        | {"POCL_CACHE_DIR": str(COMPILED), "FLOWNPU_GPU_CACHE": str(folder / "flownpu")}
    )

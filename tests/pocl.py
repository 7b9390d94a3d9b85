# SPDX-License-Identifier: Apache-2.0
"""PoCL and an OpenCL loader out of the environment's packages, with nothing of the system."""

from pathlib import Path

from flownpu.ops.opencl_loader import installed_packages
from tests import opencl_double


class MissingError(Exception):
    """One of the packages is not installed, or has nothing for this machine."""


def variables(folder: Path) -> dict[str, str]:
    """What the environment has to say for FlowNPU to find PoCL, through the double of the loader (opencl_double.py).

    Args:
        folder: Where compiled kernels are kept.

    Raises:
        MissingError: The loader or PoCL is not there.
    """
    found = installed_packages()
    if "OCL_ICD_VENDORS" not in found:
        raise MissingError('PoCL or pyopencl is not installed: pip install "flownpu[test]"')
    loader = {"FLOWNPU_OPENCL": str(opencl_double.LIBRARY), opencl_double.LOADER: found["FLOWNPU_OPENCL"]}
    return found | loader | {"POCL_CACHE_DIR": str(folder / "pocl"), "FLOWNPU_GPU_CACHE": str(folder / "flownpu")}

# SPDX-License-Identifier: Apache-2.0
"""PoCL and an OpenCL loader out of the environment's packages, with nothing of the system."""

from pathlib import Path

from flownpu.ops.opencl_loader import installed_packages


class MissingError(Exception):
    """One of the packages is not installed, or has nothing for this machine."""


def variables(folder: Path) -> dict[str, str]:
    """What the environment has to say for FlowNPU to find PoCL; `folder`: where compiled kernels are kept.

    Raises:
        MissingError: The loader or PoCL is not there.
    """
    found = installed_packages()
    if "OCL_ICD_VENDORS" not in found:
        raise MissingError('PoCL or pyopencl is not installed: pip install "flownpu[test]"')
    return found | {"POCL_CACHE_DIR": str(folder / "pocl"), "FLOWNPU_GPU_CACHE": str(folder / "flownpu")}

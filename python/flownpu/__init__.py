# SPDX-License-Identifier: Apache-2.0
"""FlowNPU: an ONNX Runtime execution provider for 4-bit language models on AMD Ryzen AI NPUs, and on any CPU."""

from importlib.metadata import version

from flownpu.errors import FlowNPUError, MissingDependencyError
from flownpu.registration import get_ep_name, get_library_path, register

__all__ = [
    "FlowNPUError",
    "MissingDependencyError",
    "__version__",
    "get_ep_name",
    "get_library_path",
    "register",
]

__version__ = version("flownpu")

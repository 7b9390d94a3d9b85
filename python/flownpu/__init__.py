# SPDX-License-Identifier: Apache-2.0
"""FlowNPU: an ONNX Runtime execution provider for 4-bit language models on AMD Ryzen AI NPUs, and on any CPU."""

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

__version__: str


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # noqa: PLC0415 a tenth of a command's imports, which few commands need

    return version("flownpu")

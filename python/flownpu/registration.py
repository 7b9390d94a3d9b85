# SPDX-License-Identifier: Apache-2.0
"""Makes the execution provider known to ONNX Runtime, and to ORT GenAI when that is imported.

The two hold separate copies of ONNX Runtime: a provider registered with one is unknown to the other.
"""

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from flownpu.errors import FlowNPUError, require
from flownpu.system import library_file

__all__ = ["get_ep_name", "get_library_path", "register"]

LIBRARY_NAME = library_file("flownpu_ep")
# API 24 has the operator domains that `ai.flownpu` needs, but before 1.27 ONNX Runtime does not tell a provider that a
# session is ready: bad options and models that cannot run would then go to the CPU provider without a word.
MINIMUM_ONNXRUNTIME = (1, 27)

_lock = threading.Lock()
# GenAI cannot be asked which libraries it has; remembered by module, so that a reloaded module is registered anew.
_registered_with: set[ModuleType] = set()


def get_ep_name() -> str:
    """The provider's name in session options, `get_ep_devices()` and genai_config.json."""
    return "FlowNPUExecutionProvider"


def get_library_path() -> str:
    """The path of the provider's shared library.

    Raises:
        FlowNPUError: the package was installed without it; names the folders that were looked in.
    """
    # One folder in a wheel; an editable install spreads the package over the source tree and site-packages.
    folders = [Path(folder) for folder in sys.modules["flownpu"].__path__]
    for folder in folders:
        if (folder / LIBRARY_NAME).is_file():
            return str(folder / LIBRARY_NAME)
    looked_in = ", ".join(str(folder) for folder in folders)
    raise FlowNPUError(
        f"{LIBRARY_NAME} is not in the flownpu package (looked in {looked_in}): "
        "install it again with `pip install --force-reinstall --no-deps flownpu`"
    )


def register(*, emulated_npu: bool = False) -> None:
    """Registers the provider with onnxruntime, and with onnxruntime_genai if that is imported.

    Import onnxruntime_genai before calling, or call again after: calling twice does no harm.

    Args:
        emulated_npu: offer onnxruntime one more device, an NPU that the emulator stands in for: programs that choose
            a device by its type then find one. The option `device=emulate` needs no such device.

    Raises:
        FlowNPUError: the library is missing, or onnxruntime is older than the plug-in API that it needs.
        MissingDependencyError: onnxruntime is not installed.
    """
    library = get_library_path()
    onnxruntime = require("onnxruntime", extra="genai", purpose="FlowNPU's execution provider")
    check_onnxruntime_version(onnxruntime.__version__)
    with _lock:
        if all(device.ep_name != get_ep_name() for device in onnxruntime.get_ep_devices()):
            onnxruntime.register_execution_provider_library(get_ep_name(), library)
        if emulated_npu and not any(_is_emulated(device) for device in onnxruntime.get_ep_devices()):
            onnxruntime.register_execution_provider_library(f"{get_ep_name()}.virtual", library)
        genai = sys.modules.get("onnxruntime_genai")
        if genai is not None and genai not in _registered_with:
            genai.register_execution_provider_library(get_ep_name(), library)
            _registered_with.add(genai)


def _is_emulated(device: Any) -> bool:
    return bool(device.ep_name == get_ep_name() and device.device.metadata.get("is_virtual") == "1")


def check_onnxruntime_version(version: str) -> None:
    """Raises FlowNPUError if this version of onnxruntime lacks the plug-in API."""
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < MINIMUM_ONNXRUNTIME:
        needed = ".".join(map(str, MINIMUM_ONNXRUNTIME))
        raise FlowNPUError(
            f"FlowNPU needs onnxruntime {needed} or newer, found {version}: "
            f'pip install --upgrade "onnxruntime>={needed}"'
        )

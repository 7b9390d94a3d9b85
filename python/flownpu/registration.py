# SPDX-License-Identifier: Apache-2.0
"""Registers the execution provider with ONNX Runtime, and with ORT GenAI if that is imported.

The packages onnxruntime and onnxruntime_genai each carry their own copy of ONNX Runtime: a provider registered with one
is unknown to the other.
"""

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from flownpu.errors import FlowNPUError, require
from flownpu.system import library_file

LIBRARY_NAME = library_file("flownpu_ep")
# API version 24 has the operator domains that `ai.flownpu` needs, but before release 1.27 ONNX Runtime does not tell a
# provider that a session is ready: with bad options, or a model that the provider cannot run, all nodes would silently
# go to the CPU provider.
MINIMUM_ONNXRUNTIME = (1, 27)

_lock = threading.Lock()
# The onnxruntime_genai modules that have the provider, because GenAI does not list its registered libraries. Modules
# are kept by identity, so that a module that is imported again gets the provider again.
_registered_with: set[ModuleType] = set()


def get_ep_name() -> str:
    """The provider's name in session options, `get_ep_devices()` and genai_config.json: "FlowNPUExecutionProvider"."""
    return "FlowNPUExecutionProvider"


def get_library_path() -> str:
    """The path of the provider's shared library.

    Raises:
        FlowNPUError: the library is not in the package; the message names the folders that were searched.
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

    Import onnxruntime_genai before calling this, or call it again afterwards: repeated calls do no harm, from several
    threads too.

    Args:
        emulated_npu: also offer onnxruntime an NPU device that the emulator computes for, so that programs that choose
            a device by its type find one on a machine without an NPU. The provider option `device=emulate` works
            without it.

    Raises:
        FlowNPUError: the provider's library is missing, or onnxruntime is older than 1.27.
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
    if (genai := sys.modules.get("onnxruntime_genai")) is not None:
        register_with_genai(genai)


def register_with_genai(genai: ModuleType) -> None:
    """Registers the provider with onnxruntime_genai alone, whose own requirement is onnxruntime 1.31.

    A program that only generates texts is spared the import of onnxruntime, a quarter of its imports' time.

    Raises:
        FlowNPUError: the provider's library is missing.
    """
    library = get_library_path()
    with _lock:
        if genai not in _registered_with:
            genai.register_execution_provider_library(get_ep_name(), library)
            _registered_with.add(genai)


def _is_emulated(device: Any) -> bool:
    return bool(device.ep_name == get_ep_name() and device.device.metadata.get("is_virtual") == "1")


def check_onnxruntime_version(version: str) -> None:
    """Raises FlowNPUError if this version of onnxruntime ("1.27.0") is older than `MINIMUM_ONNXRUNTIME`."""
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < MINIMUM_ONNXRUNTIME:
        needed = ".".join(map(str, MINIMUM_ONNXRUNTIME))
        raise FlowNPUError(
            f"FlowNPU needs onnxruntime {needed} or newer, found {version}: "
            f'pip install --upgrade "onnxruntime>={needed}"'
        )

# SPDX-License-Identifier: Apache-2.0
"""Calls through the XRT runtime over XRT, in a process that tests/npu/machine.py starts: below XRT is a double of the
kernel's driver (tests/npu/xdna_driver/)."""

import ctypes
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from flownpu.aie.emulator import flatten_array
from flownpu.aie.plan.data import Plan
from tests.aie.emulation import ARCHITECTURES
from tests.built import BUILT
from tests.npu import xclbin
from tests.npu.arrays import Bench, npu
from tests.npu.firmware import DEVELOPED, Firmware

PLUGIN = BUILT / "libflownpu_xrt.so"
DRIVER = BUILT / "libxdna_driver.so"
# An environment variable: the folder with the machine's /sys and /dev.
ROOT = "XDNA_DRIVER_ROOT"
# An environment variable: the library with the kernels that arrays call.
KERNELS = "XDNA_DRIVER_KERNELS"
# An environment variable: settings of the driver for all tests of the process, such as "timelines=0 separate=1".
SETTINGS = "XDNA_DRIVER_SETTINGS"


class Driver:
    """Steers the double of the driver."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(DRIVER))
        self._library.xdna_driver_alive.restype = ctypes.c_int64
        self._library.xdna_driver_violations.restype = ctypes.c_int64
        self.reset()
        self.use_kernels("npu2")

    def use_kernels(self, target: str) -> None:
        """Take the kernels of this target for all arrays that are loaded."""
        self._library.xdna_driver_use_kernels(str(kernels_of(target)).encode())

    def reset(self) -> None:
        """Forget faults, violations and other firmware."""
        self._library.xdna_driver_reset()
        self.use_firmware(DEVELOPED)

    def use_firmware(self, firmware: Firmware) -> None:
        """Has the driver report this firmware, in sysfs and when asked, and keep to its protocol."""
        for device in Path(os.environ[ROOT]).glob("sys/bus/pci/drivers/amdxdna/*"):
            (device / "fw_version").write_text(firmware.version + "\n", encoding="utf-8")
        self.inject("protocol", setting_of(firmware))

    def inject(self, fault: str, amount: int = 0, *, after: int = 0) -> None:
        """Tells the driver to make a fault, or changes a setting (state.h)."""
        self._library.xdna_driver_inject(fault.encode(), ctypes.c_int64(after), ctypes.c_int64(amount))

    def end_hung_calls(self) -> None:
        """Ends all calls that hang, as the driver's watchdog does."""
        self._library.xdna_driver_end_hung_calls()

    def settle(self) -> None:
        """Waits until the driver has finished with ended commands, or fails if one does not end."""
        # Far more than it takes on a busy machine.
        assert self._library.xdna_driver_settle(ctypes.c_int64(60_000)), "a command has not ended within a minute"

    def alive(self, kind: str = "") -> int:
        """How many objects are open, of all kinds or of one (state.h)."""
        return int(self._library.xdna_driver_alive(kind.encode()))

    def violations(self) -> list[str]:
        """Descriptions of forbidden actions of XRT or the plugin."""
        text = ctypes.create_string_buffer(1 << 16)
        self._library.xdna_driver_violations(text, ctypes.c_size_t(len(text)))
        return text.value.decode().splitlines()


def setting_of(firmware: Firmware) -> int:
    """The driver's setting `protocol` (state.h)."""
    major, minor = firmware.protocol
    return 1000 * major + minor


def kernels_of(target: str) -> Path:
    """The library with the kernels of a target."""
    return BUILT / f"libflownpu_aie_{ARCHITECTURES[target]}.so"


def write_xclbin(path: Path, words: np.ndarray, buffers: int) -> Path:
    """An xclbin with an array's words; `buffers`: how many its kernel takes."""
    path.write_bytes(_xclbin(words.tobytes(), buffers))
    return path


@functools.cache
def _xclbin(words: bytes, buffers: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = xclbin.write_xclbin(Path(folder) / "array.xclbin", np.frombuffer(words, np.int64), buffers)
        return file.read_bytes()


def halves(words: np.ndarray) -> np.ndarray:
    """The emulator's words as instructions, which have 32 bits: of each word the low half first."""
    return words.astype("<i8").view("<u4").astype(np.int64)


class XrtBench(Bench):
    """A `Bench` over XRT and the driver's double; `buffers`: how many its kernel takes."""

    def __init__(self, plan: Plan, folder: Path, *, buffers: int | None = None) -> None:
        self.flat = flatten_array(plan.array)
        file = folder / f"{self.flat.identity}.xclbin"
        self.file = str(write_xclbin(file, self.flat.words, len(plan.sequence.buffers) if buffers is None else buffers))
        self.runtime = npu.open_xrt_runtime()
        self.array = self.runtime.load(self.file)

    def sequence(self, plan: Plan) -> Any:
        """The words of a call."""
        return self.array.sequence(halves(self.flat.flatten(plan.sequence)))

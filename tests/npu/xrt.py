# SPDX-License-Identifier: Apache-2.0
"""The double of libxrt_coreutil (tests/npu/xrt_double/), and calls through the XRT runtime over it."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from flownpu.aie.emulator import flatten_array
from scripts import xrt_headers
from tests.aie.emulation import ARCHITECTURES
from tests.aie.host_kernels import BUILT
from tests.npu.arrays import Bench, npu

if TYPE_CHECKING:
    from pathlib import Path

    from flownpu.aie.plan import Plan

__all__ = ["DOUBLE", "PLUGIN", "Double", "XrtBench", "halves", "write_xclbin"]

PLUGIN = BUILT / "libflownpu_xrt.so"
DOUBLE = BUILT / "xrt_double" / "libxrt_coreutil.so.2"


def require() -> None:
    """Skips the test where there are no headers of XRT to build the plugin with."""
    if PLUGIN.is_file() and DOUBLE.is_file():
        return
    if xrt_headers.find() is None:
        pytest.skip(xrt_headers.reason())
    pytest.fail(f"expected {PLUGIN} and {DOUBLE}, which are built where there are headers of XRT: run `make test`")


class Double:
    """Steers the double; whoever loads the plugin after this gets it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(DOUBLE), mode=ctypes.RTLD_GLOBAL)
        self._library.device_double_alive.restype = ctypes.c_int64
        self._library.device_double_violations.restype = ctypes.c_int64
        self.reset()
        self.use_kernels("npu2")

    def use_kernels(self, target: str) -> None:
        """Take the kernels of this target for all arrays that are loaded."""
        library = BUILT / f"libflownpu_aie_{ARCHITECTURES[target]}.so"
        self._library.device_double_use_kernels(str(library).encode())

    def reset(self) -> None:
        """Forget faults and violations."""
        self._library.device_double_reset()

    def inject(self, fault: str, amount: int = 0, *, after: int = 0) -> None:
        """A fault (double_state.h)."""
        self._library.device_double_inject(fault.encode(), ctypes.c_int64(after), ctypes.c_int64(amount))

    def end_hung_calls(self) -> None:
        """What the driver's watchdog does."""
        self._library.device_double_end_hung_calls()

    def alive(self, kind: str = "") -> int:
        """Objects of XRT."""
        return int(self._library.device_double_alive(kind.encode()))

    def violations(self) -> list[str]:
        """What was done that must not be."""
        text = ctypes.create_string_buffer(1 << 16)
        self._library.device_double_violations(text, ctypes.c_size_t(len(text)))
        return text.value.decode().splitlines()


def write_xclbin(path: Path, words: np.ndarray) -> Path:
    """What the double takes for an xclbin."""
    content = words.tobytes()
    path.write_bytes(b"xclbin2\0" + struct.pack("<Q", len(content)) + content)
    return path


def halves(words: np.ndarray) -> np.ndarray:
    """The emulator's words as instructions, which have 32 bits: of each word the low half first."""
    return words.astype("<i8").view("<u4").astype(np.int64)


class XrtBench(Bench):
    """An array of the double's, as `Bench` is one of the emulator's."""

    def __init__(self, plan: Plan, folder: Path, *, runtime: Any = None) -> None:
        self.flat = flatten_array(plan.array)
        self.file = str(write_xclbin(folder / f"{self.flat.identity}.xclbin", self.flat.words))
        self.runtime = runtime or npu.open_xrt_runtime()
        self.array = self.runtime.load(self.file)

    def sequence(self, plan: Plan) -> Any:
        """The words of a call."""
        return self.array.sequence(halves(self.flat.flatten(plan.sequence)))

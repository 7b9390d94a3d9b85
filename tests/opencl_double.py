# SPDX-License-Identifier: Apache-2.0
"""Steers the double of OpenCL's loader (tests/ops/gpu/opencl_double/), which the tests' PoCL is reached through."""

from __future__ import annotations

import ctypes
from enum import IntEnum

from tests.aie.host_kernels import BUILT

LIBRARY = BUILT / "libopencl_double.so"
# An environment variable: the loader's file.
LOADER = "OPENCL_DOUBLE_OF"


class Way(IntEnum):
    """How a call fails: Way of faults.h."""

    ONCE = 1
    LOST = 2
    LATE = 3
    HUNG = 4


class Double:
    """The double that this process has loaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(LIBRARY))
        for name in ("calls", "endless_waits"):
            getattr(self._library, f"opencl_double_{name}").restype = ctypes.c_int64
        self.reset()

    def inject(self, call: str, nth: int, way: Way, code: int = 0) -> None:
        """The nth call of that function from now on fails in this way, with this code of OpenCL's."""
        self._library.opencl_double_inject(
            call.encode(), ctypes.c_int64(nth), ctypes.c_int32(way), ctypes.c_int32(code)
        )

    def reset(self) -> None:
        """Nothing fails any more."""
        self._library.opencl_double_reset()

    def calls(self, call: str) -> int:
        """How often a function was called since the reset."""
        return int(self._library.opencl_double_calls(call.encode()))

    def endless_waits(self) -> int:
        """How often somebody waited without a limit for what never ends."""
        return int(self._library.opencl_double_endless_waits())

# SPDX-License-Identifier: Apache-2.0
"""Controls the double of OpenCL's loader (tests/ops/gpu/opencl_double/), through which the tests use PoCL."""

import ctypes
from enum import IntEnum

from tests.built import BUILT

LIBRARY = BUILT / "libopencl_double.so"
# The environment variable with the path of the real loader.
LOADER = "OPENCL_DOUBLE_OF"


class Way(IntEnum):
    """How a call fails; see Way in faults.h."""

    ONCE = 1
    LOST = 2
    LATE = 3
    HUNG = 4


class Double:
    """The double in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(LIBRARY))
        for name in ("calls", "endless_waits"):
            getattr(self._library, f"opencl_double_{name}").restype = ctypes.c_int64
        self.reset()

    def inject(self, call: str, nth: int, way: Way, code: int = 0) -> None:
        """Makes the nth call of a function from now on fail in this way, with this error code of OpenCL."""
        self._library.opencl_double_inject(
            call.encode(), ctypes.c_int64(nth), ctypes.c_int32(way), ctypes.c_int32(code)
        )

    def reset(self) -> None:
        """Removes all injected failures, and sets the counts to 0."""
        self._library.opencl_double_reset()

    def calls(self, call: str) -> int:
        """How often a function was called since the reset."""
        return int(self._library.opencl_double_calls(call.encode()))

    def endless_waits(self) -> int:
        """How often something waited without a time limit for a call that never ends."""
        return int(self._library.opencl_double_endless_waits())

# SPDX-License-Identifier: Apache-2.0
"""Controls the doubles of the loaders of OpenCL and Vulkan (tests/ops/gpu/doubles/), through which the tests use PoCL
and lavapipe.
"""

import ctypes
from enum import IntEnum
from pathlib import Path

from tests.built import BUILT


def library_of(api: str) -> Path:
    """The double of an API, "opencl" or "vulkan"."""
    return BUILT / f"lib{api}_double.so"


def loader_of(api: str) -> str:
    """The environment variable with the path of the real loader."""
    return f"{api.upper()}_DOUBLE_OF"


class Way(IntEnum):
    """How a call fails; see Way in faults.h."""

    ONCE = 1
    LOST = 2
    LATE = 3
    HUNG = 4


class Double:
    """A double in this process."""

    def __init__(self, api: str = "opencl") -> None:
        self._library = ctypes.CDLL(str(library_of(api)))
        self._api = api
        for name in ("calls", "endless_waits"):
            self._function(name).restype = ctypes.c_int64
        self.reset()

    def _function(self, name: str) -> "ctypes._NamedFuncPointer":
        found: ctypes._NamedFuncPointer = getattr(self._library, f"{self._api}_double_{name}")
        return found

    def inject(self, call: str, nth: int, way: Way, code: int = 0) -> None:
        """Makes the nth call of a function from now on fail in this way, with this error code of the API."""
        self._function("inject")(call.encode(), ctypes.c_int64(nth), ctypes.c_int32(way), ctypes.c_int32(code))

    def pretend(self, what: str) -> None:
        """Changes what Vulkan's devices say of themselves, until the reset; see `pretend` in vulkan.cc."""
        self._function("pretend")(what.encode())

    def reset(self) -> None:
        """Removes all injected failures, and sets the counts to 0."""
        self._function("reset")()

    def calls(self, call: str) -> int:
        """How often a function was called since the reset."""
        return int(self._function("calls")(call.encode()))

    def endless_waits(self) -> int:
        """How often something waited without a time limit for a call that never ends."""
        return int(self._function("endless_waits")())

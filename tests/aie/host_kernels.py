# SPDX-License-Identifier: Apache-2.0
"""Calls kernels of aie/kernels/ that were compiled for the host, on numpy arrays."""

from pathlib import Path
from typing import Any

import numpy as np

from flownpu.aie.designs.common import bits
from flownpu.selftest.reference.case import compare
from flownpu.selftest.reference.numbers import (
    BF16_ROUNDING,
    BFLOAT16,
    EXP2,
    F32_ROUNDING,
    INVERSE,
    PRODUCT,
    ROUGH_EXP2,
    bf16,
    blocks_of,
    panels,
    tiled,
    untiled,
    wide,
)
from tests import built
from tests.built import BUILT

__all__ = [
    "ARCHITECTURES", "BF16_ROUNDING", "BFLOAT16", "EXP2", "F32_ROUNDING", "INVERSE", "LIBRARIES", "PRODUCT",
    "ROUGH_EXP2",
    "Kernels", "assert_within", "bf16", "bits", "blocks_of", "load", "panels", "tiled", "untiled", "wide",
]  # fmt: skip

# The kernels' libraries. A sanitized build has them in a separate folder, beside unsanitized ones, which emulated
# models call (CMakeLists.txt).
LIBRARIES = BUILT / "kernels" if (BUILT / "kernels").is_dir() else BUILT
ARCHITECTURES = ("xdna", "xdna2")

_DTYPES = {"uint8": np.uint8, "int32": np.int32, "float32": np.float32, "bfloat16": BFLOAT16, "bfp16ebs8": np.uint8}
# Bytes before and after a buffer that no kernel may change, and their value.
_RED_ZONE = 128
_RED = 0xA5


def _buffer(content: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory with red zones around a copy of the content, and the copy: `offset` bytes past a multiple of 64."""
    raw = np.full(content.nbytes + 2 * _RED_ZONE + 64 + offset, _RED, np.uint8)
    begin = -raw.ctypes.data % 64 + _RED_ZONE + offset
    inside = raw[begin : begin + content.nbytes]
    inside[:] = np.ascontiguousarray(content).view(np.uint8).reshape(-1)
    return raw, inside


class Kernels:
    """The kernels of one library."""

    def __init__(self, path: Path) -> None:
        self._library = built.load("flownpu_aie_testing").Kernels(str(path))
        self.architecture: str = self._library.architecture
        self.names: list[str] = self._library.names()

    def parameters(self, name: str) -> list[tuple[str, bool, bool]]:
        """For each parameter: its type, whether it is a buffer, and whether it is written."""
        return self._library.parameters(name)

    def call(self, name: str, *arguments: np.ndarray | int, offset: int = 0) -> None:
        """Runs a kernel on copies of the arrays in aligned memory, and copies written arrays back.

        An array that is given twice is one buffer. Buffers begin `offset` bytes past a multiple of 64.

        Raises:
            RuntimeError: The kernel made an access that the array does not make as written: misaligned, outside of its
                buffers, or a write to an input.
            AssertionError: An array has another dtype than the kernel's parameter, or the kernel changed bytes around
                a buffer.
        """
        buffers: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        passed: list[Any] = []
        for argument, (kind, is_buffer, _) in zip(arguments, self.parameters(name), strict=True):
            if not is_buffer or not isinstance(argument, np.ndarray):
                passed.append(argument)
                continue
            assert argument.dtype == _DTYPES[kind], f"{name} takes {kind}, got {argument.dtype}"
            passed.append(buffers.setdefault(id(argument), _buffer(argument, offset))[1])
        self._library.call(name, passed)
        for argument, (_, _, written) in zip(arguments, self.parameters(name), strict=True):
            if not written or not isinstance(argument, np.ndarray):
                continue
            raw, inside = buffers[id(argument)]
            around = np.count_nonzero(raw == _RED) - np.count_nonzero(inside == _RED)
            assert around == raw.size - inside.size, f"{name} wrote beside a buffer"
            argument[...] = inside.view(argument.dtype).reshape(argument.shape)


def load(architecture: str, library: str = "flownpu_aie") -> Kernels:
    """The host build of one architecture, "xdna" or "xdna2"; `library`: "flownpu_aie_probes" for host/probes.cc."""
    return Kernels(LIBRARIES / f"lib{library}_{architecture}.so")


def assert_within(actual: np.ndarray, expected: np.ndarray, tolerance: Any) -> None:
    """Assert that the shapes are equal and every element is within its tolerance, absolute."""
    found = compare(np.asarray(actual), np.asarray(expected), tolerance)
    assert found.beyond == 0, found.text

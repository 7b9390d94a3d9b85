# SPDX-License-Identifier: Apache-2.0
"""Calls kernels of aie/kernels/ that were compiled for the host, on numpy arrays; and the layouts they read."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
BUILT = Path(os.environ.get("FLOWNPU_TESTING_DIR", ROOT / "build" / "testing"))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ARCHITECTURES = ("xdna", "xdna2")

# Half the distance of neighbouring bf16 is at most this share of a number: 8 bits of mantissa.
BF16_ROUNDING = 2.0**-8
# What aie/kernels/float_math.h says of a product of f32 numbers that are split in two bf16.
PRODUCT = 3 * 2.0**-16
# ... of power_of_two, and of aie::inv and invsqrt on the host (elementary.hpp).
EXP2 = 2.0**-14
INVERSE = 2.0**-15
F32_ROUNDING = 2.0**-24

_DTYPES = {"uint8": np.uint8, "int32": np.int32, "float32": np.float32, "bfloat16": BFLOAT16, "bfp16ebs8": np.uint8}
# Bytes before and after a buffer that no kernel may change, and their value.
_RED_ZONE = 128
_RED = 0xA5


def _load(folder: Path) -> ModuleType:
    if "flownpu_aie_testing" in sys.modules:
        return sys.modules["flownpu_aie_testing"]
    found = sorted(folder.glob("flownpu_aie_testing*.so"))
    if not found:
        raise ImportError(
            f"expected the module flownpu_aie_testing in {folder}, found none: run `make test`, or build it with "
            "`cmake -S . -B build/testing -DFLOWNPU_TESTING=ON && cmake --build build/testing`"
        )
    spec = importlib.util.spec_from_file_location("flownpu_aie_testing", found[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flownpu_aie_testing"] = module
    spec.loader.exec_module(module)
    return module


def _buffer(content: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Memory with red zones around a copy of the content, which begins `offset` bytes past a multiple of 64."""
    raw = np.full(content.nbytes + 2 * _RED_ZONE + 64 + offset, _RED, np.uint8)
    begin = -raw.ctypes.data % 64 + _RED_ZONE + offset
    inside = raw[begin : begin + content.nbytes]
    inside[:] = np.ascontiguousarray(content).view(np.uint8).reshape(-1)
    return raw, inside


class Kernels:
    """The kernels of one library."""

    def __init__(self, path: Path) -> None:
        self._library = _load(BUILT).Kernels(str(path))
        self.architecture: str = self._library.architecture
        self.names: list[str] = self._library.names()

    def parameters(self, name: str) -> list[tuple[str, bool, bool]]:
        """Of each parameter its type, whether it is a buffer, and whether it is written."""
        return self._library.parameters(name)

    def call(self, name: str, *arguments: np.ndarray | int, offset: int = 0) -> None:
        """Runs a kernel on copies of the arrays in aligned memory, and copies those back that it writes.

        The same array given twice is the same memory. `offset` bytes are added to the buffers' addresses.

        Raises:
            RuntimeError: The kernel made an access that the array would not have made as written.
            AssertionError: It changed bytes around a buffer.
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
    """The host build of one architecture, "xdna" or "xdna2"."""
    return Kernels(BUILT / f"lib{library}_{architecture}.so")


def bf16(values: Any) -> np.ndarray:
    """Rounded to the nearest bfloat16."""
    return np.asarray(values, np.float32).astype(BFLOAT16)


def wide(values: np.ndarray) -> np.ndarray:
    """The same numbers in float64."""
    return values.astype(np.float64)


def bits(value: float) -> int:
    """A float32 as the int32 that a run-time parameter holds."""
    return int(np.float32(value).view(np.int32))


def tiled(matrix: np.ndarray, rows: int = 8) -> np.ndarray:
    """[R][C] to [R/rows][C/8][rows][8]."""
    height, width = matrix.shape
    return np.ascontiguousarray(matrix.reshape(height // rows, rows, width // 8, 8).swapaxes(1, 2)).reshape(-1)


def untiled(flat: np.ndarray, height: int, width: int, rows: int = 8) -> np.ndarray:
    """The inverse of `tiled`."""
    return flat.reshape(height // rows, width // 8, rows, 8).swapaxes(1, 2).reshape(height, width)


def panels(matrix: np.ndarray) -> np.ndarray:
    """B [K][N] to [N/32][K/8][4][8 k][8 n]."""
    k, n = matrix.shape
    return np.ascontiguousarray(matrix.reshape(k // 8, 8, n // 32, 4, 8).transpose(2, 0, 3, 1, 4)).reshape(-1)


def blocks_of(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bfp16ebs8 along the last axis, written from the format's description (mlir-aie, python/utils/bfp.py).

    Returns:
        bytes [.., n/8, 9], and the numbers they hold, float64 [.., n]. Mantissas round to the nearest even.
    """
    values = wide(matrix).reshape(*matrix.shape[:-1], -1, 8)
    largest = np.abs(values).max(-1, keepdims=True)
    exponent = np.where(largest > 0, np.floor(np.log2(np.where(largest > 0, largest, 1))), -127).astype(int)
    unit = np.exp2(exponent - 6.0)
    mantissa = np.clip(np.rint(values / unit), -128, 127)
    coded = np.concatenate([exponent + 127, mantissa.astype(int) & 255], axis=-1).astype(np.uint8)
    return coded, (mantissa * unit).reshape(matrix.shape)


def assert_within(actual: np.ndarray, expected: np.ndarray, tolerance: Any) -> None:
    """Every element within its tolerance."""
    error = np.abs(wide(np.asarray(actual)) - expected)
    with np.errstate(over="ignore"):  # infinite is what it is
        excess = np.where(error <= tolerance, 0, error / np.maximum(tolerance, 1e-300))
    excess = np.where(np.isfinite(error), excess, np.inf)
    worst = np.unravel_index(np.argmax(excess), excess.shape)
    assert excess[worst] == 0, (
        f"{np.count_nonzero(excess)} of {error.size} elements are beyond their tolerance; at {worst}: expected "
        f"{expected[worst]}, got {actual[worst]}, {excess[worst]:.2f} x the tolerance"
    )

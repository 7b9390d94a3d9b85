# SPDX-License-Identifier: Apache-2.0
"""Formats and layouts of kernels' numbers (aie/kernels/README.md), and error bounds of their arithmetic."""

from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Relative error bound of a rounding to bf16, which has 8 bits of mantissa: half the distance of neighbouring numbers.
BF16_ROUNDING = 2.0**-8
# Relative error bound of a product of f32 numbers, each split into two bf16 (aie/kernels/common/float_math.h).
PRODUCT = 3 * 2.0**-16
# Relative error bounds of power_of_two, rough_power_of_two and tanh_of_power (float_math.h), and of
# aie::inv and invsqrt on the host (elementary.hpp).
EXP2 = 2.0**-14
ROUGH_EXP2 = 2.0**-10
TANH = 4e-4
INVERSE = 2.0**-15
F32_ROUNDING = 2.0**-24


def bf16(values: Any) -> np.ndarray:
    """Values rounded to the nearest bfloat16."""
    return np.asarray(values, np.float32).astype(BFLOAT16)


def wide(values: np.ndarray) -> np.ndarray:
    """The same numbers in float64."""
    return values.astype(np.float64)


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

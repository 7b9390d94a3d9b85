# SPDX-License-Identifier: Apache-2.0
"""Quantises weights to 4 or 8 bits: codes, scales and minima, before these are packed into blocks.

Each group of 32 columns of a row has a bf16 scale d and a bf16 minimum m ("Gemma3 on NPU", equation 3):

    w = d * code + m,    code in 0..15, or of 8 bits in -128..127                                           (3)

evaluated in float32: d * code is exact there (8 + 8 significant bits), so the sum's rounding is the only one. An 8-bit
code is signed: m is then the weight in the middle of the codes, not the smallest one, so that its rounding to bf16 is
small beside d. What is left is the rounding of d, at most 2^-8 of it, half a step at the largest code.
`q4nx` exports these names, and describes the blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from flownpu import _native

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"
Floats: TypeAlias = "NDArray[np.float32]"

# Columns that share a scale and a minimum.
GROUP = 32
LARGEST_CODE = 15
_LARGEST_BYTE = 127
# The minimum of a symmetric weight is this many times its scale: a code of 8 stands for 0.
MINIMUM_OF_SYMMETRIC = -8

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_WEIGHT_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)

# How many weights are widened to float32 at a time, in whole rows: their 256 KB stay in a core's L2 cache.
_WEIGHTS_AT_ONCE = 1 << 16


class Quantized(NamedTuple):
    """A weight's codes and parameters, row by row.

    Attributes:
        codes: uint8 [rows, columns], 0..15, of 4 bits; int8 of 8 bits.
        scale: bfloat16 [rows, ceil(columns/32)], d of equation 3.
        minimum: bfloat16 [rows, ceil(columns/32)], m of equation 3.
    """

    codes: NDArray[Any]
    scale: NDArray[Any]
    minimum: NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's rows and columns."""
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def bits(self) -> int:
        """Bits of a code, which the codes' type tells."""
        return 8 if self.codes.dtype == np.int8 else 4


def quantize(weight: NDArray[Any]) -> Quantized:
    """Searches for the codes, scales and minima with the least squared error.

    Codes are chosen for the *rounded* scale and minimum, so that they compensate for the rounding to bf16. The search
    (ops/lowering/weights/quantize_group.cc) starts from several pairs of scale and minimum, alternates between choosing
    codes and fitting scale and minimum to them by least squares, and keeps the result whose dequantised weights are
    nearest.

    Args:
        weight: float32, float16 or bfloat16 [rows, columns].

    Raises:
        ValueError: `weight` has another type or rank, is empty, or has a value that is not finite or too large for
            bf16.
    """
    weight = _check_weight("quantize", weight)
    rows, columns = weight.shape
    groups = ceil_divide(columns, GROUP)
    codes = np.empty((rows, columns), np.uint8)
    scale, minimum = (np.empty((rows, groups), np.uint16) for _ in range(2))
    at_once = max(1, _WEIGHTS_AT_ONCE // columns)
    for first in range(0, rows, at_once):
        part = slice(first, min(first + at_once, rows))
        values = np.ascontiguousarray(weight[part], np.float32)
        _check_finite(values, first)
        _native.quantise(values, codes[part], scale[part], minimum[part])
    return Quantized(codes, scale.view(BFLOAT16), minimum.view(BFLOAT16))


def quantize_bytes(weight: NDArray[Any]) -> Quantized:
    """Rounds weights to signed codes of 8 bits without minima: d = bf16(max|w| / 127) of 32 columns.

    Codes are chosen for the rounded d. The largest is at most 127 (1 + 2^-8) < 127.5 before it is rounded to 127, so
    that an error is at most d / 2. Groups whose largest magnitude is below 2^-120 become 0 (1 / d would not be finite).

    Args:
        weight: float32, float16 or bfloat16 [rows, columns].

    Raises:
        ValueError: As `quantize`.
    """
    weight = _check_weight("quantize_bytes", weight)
    rows, columns = weight.shape
    groups = ceil_divide(columns, GROUP)
    codes = np.empty((rows, columns), np.int8)
    scale = np.empty((rows, groups), BFLOAT16)
    at_once = max(1, _WEIGHTS_AT_ONCE // columns)
    for first in range(0, rows, at_once):
        part = slice(first, min(first + at_once, rows))
        values = np.ascontiguousarray(weight[part], np.float32)
        _check_finite(values, first)
        grouped = np.pad(values, ((0, 0), (0, groups * GROUP - columns))).reshape(-1, groups, GROUP)
        largest = np.abs(grouped).max(axis=-1)
        largest[largest < 2.0**-120] = 0
        scale[part] = (largest / np.float32(_LARGEST_BYTE)).astype(BFLOAT16)
        steps = scale[part].astype(np.float32)[..., None]
        rounded = np.rint(np.divide(grouped, steps, out=np.zeros_like(grouped), where=steps > 0))
        codes[part] = rounded.reshape(len(values), -1)[:, :columns]
    return Quantized(codes, scale, np.zeros_like(scale))


def from_affine(
    codes: NDArray[Any], scale: NDArray[Any], minimum: NDArray[Any] | None = None, *, bits: int = 4
) -> Quantized:
    """Keeps existing codes unchanged, and rounds their scales and minima to bf16.

    GGUF Q4_1 stores d and m: scale = d, minimum = m. Q4_0 stores d of w = d * (code - 8), and MatMulNBits scale and
    zero point of w = scale * (code - zero_point): minimum = -scale * zero_point. Of 8 bits, Q8_0 has int8 codes as they
    are, and MatMulNBits codes and zero points 128 above these. Where a scale is shared by more than 32 columns, the
    caller repeats it (np.repeat).

    Args:
        codes: integers [rows, columns], 0..15, or with `bits` = 8 from -128 to 127.
        scale: floats [rows, ceil(columns/32)].
        minimum: floats [rows, ceil(columns/32)]; by default those of a symmetric weight.
        bits: 4 or 8.

    Raises:
        ValueError: Shapes do not fit one another, a code is out of range, or a parameter is not finite in bf16.
    """
    codes = np.asarray(codes)
    if not np.issubdtype(codes.dtype, np.integer):
        raise ValueError(f"[from_affine] expected integer codes, got {codes.dtype}")
    lowest, highest = (-_LARGEST_BYTE - 1, _LARGEST_BYTE) if bits == 8 else (0, LARGEST_CODE)
    if codes.size and (int(codes.min()) < lowest or int(codes.max()) > highest):
        raise ValueError(
            f"[from_affine] expected codes in {lowest}..{highest}, got {int(codes.min())}..{int(codes.max())}"
        )
    if minimum is None:
        minimum = np.asarray(scale).astype(BFLOAT16) * BFLOAT16.type(_minimum_of_symmetric(bits))
    with np.errstate(over="ignore", invalid="ignore"):
        quantized = Quantized(
            codes.astype(np.int8 if bits == 8 else np.uint8),
            np.asarray(scale).astype(BFLOAT16),
            np.asarray(minimum).astype(BFLOAT16),
        )
    check_quantized("from_affine", *quantized)
    for name, parameter in (("scale", quantized.scale), ("minimum", quantized.minimum)):
        if not np.isfinite(parameter).all():
            raise ValueError(f"[from_affine] expected every {name} to be finite in bf16, got NaN or infinity")
    return quantized


def stack(*parts: Quantized) -> Quantized:
    """Stacks the rows of several weights, as for packed QKV. A part's number of rows need not be a multiple of 32.

    Raises:
        ValueError: There is no part, or parts differ in columns or bits.
    """
    columns = {part.shape[1] for part in parts}
    if len(columns) != 1:
        raise ValueError(f"[stack] expected one or more weights of equal columns, got columns {sorted(columns)}")
    if len(bits := {part.bits for part in parts}) != 1:
        raise ValueError(f"[stack] expected weights of equally many bits, got {sorted(bits)}")
    return Quantized(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate([part.minimum for part in parts]),
    )


def is_symmetric(quantized: Quantized) -> bool:
    """Whether every minimum is -8 times its scale (of 8 bits: 0), bit for bit; the product is exact in bf16."""
    if quantized.bits == 8:
        return not quantized.minimum.astype(np.float32).any()
    expected = quantized.scale * BFLOAT16.type(MINIMUM_OF_SYMMETRIC)
    return bool(np.array_equal(expected.view(np.uint16), quantized.minimum.view(np.uint16)))


def dequantize_codes(quantized: Quantized) -> Floats:
    """The weights that unpacked codes stand for, by equation 3: float32 [rows, columns]."""
    rows, columns = quantized.shape
    weights = np.zeros((rows, ceil_divide(columns, GROUP), GROUP), np.float32)
    by_row = weights.reshape(rows, -1)[:, :columns]
    by_row[:] = quantized.codes
    weights *= quantized.scale.astype(np.float32)[..., None]
    weights += quantized.minimum.astype(np.float32)[..., None]
    return np.ascontiguousarray(by_row)


def relative_error(weight: NDArray[Any], approximation: NDArray[Any]) -> float:
    """|W - W'| / |W| in the Frobenius norm; 0 for equal weights, even where both are zero."""
    difference = squares = 0.0
    for row, other in zip(weight, approximation, strict=True):  # by row: no second float64 copy of a large table
        exact = row.astype(np.float64)
        difference += float(np.square(exact - other.astype(np.float64)).sum())
        squares += float(np.square(exact).sum())
    if difference == 0.0:
        return 0.0
    return float(np.sqrt(difference / squares)) if squares else float("inf")


def check_quantized(name: str, codes: NDArray[Any], scale: NDArray[Any], minimum: NDArray[Any]) -> None:
    """Checks the types and shapes of a `Quantized`'s members.

    Raises:
        ValueError: They do not fit; the message begins with [`name`].
    """
    if codes.ndim != 2 or codes.size == 0 or codes.dtype not in (np.uint8, np.int8):
        raise ValueError(
            f"[{name}] expected codes uint8 (or int8 of 8 bits) [rows, columns], got {codes.dtype} {list(codes.shape)}"
        )
    expected = (codes.shape[0], ceil_divide(codes.shape[1], GROUP))
    for what, parameter in (("scale", scale), ("minimum", minimum)):
        if parameter.shape != expected or parameter.dtype != BFLOAT16:
            raise ValueError(
                f"[{name}] expected {what} bfloat16 {list(expected)} for codes {list(codes.shape)}, "
                f"got {parameter.dtype} {list(parameter.shape)}"
            )


def ceil_divide(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


def _minimum_of_symmetric(bits: int) -> int:
    return MINIMUM_OF_SYMMETRIC if bits == 4 else 0


def _check_weight(name: str, weight: NDArray[Any]) -> NDArray[Any]:
    weight = np.asarray(weight)
    if weight.dtype not in _WEIGHT_DTYPES:
        raise ValueError(
            f"[{name}] expected a weight of type float32, float16 or bfloat16, got {weight.dtype}; convert it first"
        )
    if weight.ndim != 2 or weight.size == 0:
        raise ValueError(
            f"[{name}] expected a weight of shape [rows, columns], neither of them 0, got {list(weight.shape)}"
        )
    return weight


def _check_finite(values: Floats, first_row: int) -> None:
    # A minimum of up to this magnitude cannot become infinite when it is rounded to bf16.
    limit = 2.0**127
    wrong = ~(np.abs(values) <= limit)
    if wrong.any():
        row, column = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"[quantize] expected finite weights of at most {limit:g}, got {values[row, column]:g} in row "
            f"{first_row + row}, column {column}; the checkpoint is damaged or was saved from a diverged training"
        )

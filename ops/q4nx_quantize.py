# SPDX-License-Identifier: Apache-2.0
"""Weights in 4 bits, before they are laid out in bytes.

Each group of 32 columns of a row has a bf16 scale d and a bf16 minimum m ("Gemma3 on NPU", equation 3):

    w = d * code + m,    code in 0..15                                                                      (3)

evaluated in float32: d * code is exact there (8 + 4 significant bits), so the sum's rounding is the only one.
Callers have these names from `q4nx`, where the bytes are described.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"
Floats: TypeAlias = "NDArray[np.float32]"

# Columns that share a scale and a minimum.
GROUP = 32
LARGEST_CODE = 15
# The minimum of a symmetric weight is this many times its scale: a code of 8 stands for 0.
MINIMUM_OF_SYMMETRIC = -8

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_WEIGHT_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)

# How far the search's starts move a group's smallest and largest weight inwards, in steps of range/15; every pair is
# tried. On normal and on Student-t (4 degrees of freedom) weights, these 4 x 4 starts with one refit each, then 3
# refits of the best, come within 2.2 % of the squared error of 12 x 12 starts with 3 refits each, in a tenth of the
# time.
_STARTS = (-0.3, 0.15, 0.6, 1.2)
_FINAL_REFITS = 3
# Groups that are searched together: 32 x 2048 float32 are 256 KB, so that the work arrays stay in a core's L2 cache.
_GROUPS_AT_ONCE = 2048


class Quantized(NamedTuple):
    """A weight's codes and parameters, row by row.

    Attributes:
        codes: uint8 [rows, columns], 0..15.
        scale: bfloat16 [rows, ceil(columns/32)], d of equation 3.
        minimum: bfloat16 [rows, ceil(columns/32)], m of equation 3.
    """

    codes: Bytes
    scale: NDArray[Any]
    minimum: NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        """The weight's rows and columns."""
        rows, columns = self.codes.shape
        return rows, columns


def quantize(weight: NDArray[Any]) -> Quantized:
    """Quantises to the codes, scales and minima of least squared error that a search finds.

    Codes are chosen for the *rounded* scale and minimum, so that rounding to bf16 costs nothing twice. The search
    alternates codes and a least-squares fit of scale and minimum from several starts, and keeps what is best by the
    error of the weights that will be read back.

    Args:
        weight: float32, float16 or bfloat16 [rows, columns].

    Raises:
        ValueError: `weight` has another type or rank, is empty, or has a value that is not finite or too large for
            bf16.
    """
    weight = np.asarray(weight)
    if weight.dtype not in _WEIGHT_DTYPES:
        raise ValueError(
            f"[quantize] expected a weight of type float32, float16 or bfloat16, got {weight.dtype}; convert it first"
        )
    if weight.ndim != 2 or weight.size == 0:
        raise ValueError(
            f"[quantize] expected a weight of shape [rows, columns], neither of them 0, got {list(weight.shape)}"
        )
    rows, columns = weight.shape
    groups = ceil_divide(columns, GROUP)
    codes = np.empty((rows, columns), np.uint8)
    scale = np.empty((rows, groups), BFLOAT16)
    minimum = np.empty((rows, groups), BFLOAT16)
    whole = columns // GROUP * GROUP
    at_once = max(1, _GROUPS_AT_ONCE // groups)
    for first in range(0, rows, at_once):
        part = slice(first, min(first + at_once, rows))
        values = weight[part].astype(np.float32)
        _check_finite(values, first)
        if whole:
            _quantize_groups(values[:, :whole], GROUP, codes[part, :whole], scale[part], minimum[part])
        if whole < columns:  # the last group is shorter: nothing but weights takes part in its fit
            _quantize_groups(
                values[:, whole:], columns - whole, codes[part, whole:], scale[part, -1:], minimum[part, -1:]
            )
    return Quantized(codes, scale, minimum)


def from_affine(codes: NDArray[Any], scale: NDArray[Any], minimum: NDArray[Any]) -> Quantized:
    """Takes codes that exist unchanged, and rounds their scales and minima to bf16.

    GGUF Q4_1 stores d and m: scale = d, minimum = m. Q4_0 stores d of w = d * (code - 8), and MatMulNBits scale and
    zero point of w = scale * (code - zero_point): minimum = -scale * zero_point. Where a scale is shared by more than
    32 columns, the caller repeats it (np.repeat).

    Args:
        codes: integers [rows, columns], 0..15.
        scale: floats [rows, ceil(columns/32)].
        minimum: floats [rows, ceil(columns/32)].

    Raises:
        ValueError: Shapes that do not fit one another, a code above 15, a parameter that is not finite in bf16.
    """
    codes = np.asarray(codes)
    if not np.issubdtype(codes.dtype, np.integer):
        raise ValueError(f"[from_affine] expected integer codes, got {codes.dtype}")
    if codes.size and (int(codes.min()) < 0 or int(codes.max()) > LARGEST_CODE):
        raise ValueError(f"[from_affine] expected codes in 0..15, got {int(codes.min())}..{int(codes.max())}")
    with np.errstate(over="ignore", invalid="ignore"):
        quantized = Quantized(
            codes.astype(np.uint8), np.asarray(scale).astype(BFLOAT16), np.asarray(minimum).astype(BFLOAT16)
        )
    check_quantized("from_affine", *quantized)
    for name, parameter in (("scale", quantized.scale), ("minimum", quantized.minimum)):
        if not np.isfinite(parameter).all():
            raise ValueError(f"[from_affine] expected every {name} to be finite in bf16, got NaN or infinity")
    return quantized


def stack(*parts: Quantized) -> Quantized:
    """Puts the rows of several weights below one another: packed QKV. A part's rows need not be a multiple of 32.

    Raises:
        ValueError: No part, or parts that differ in columns.
    """
    columns = {part.shape[1] for part in parts}
    if len(columns) != 1:
        raise ValueError(f"[stack] expected one or more weights of equal columns, got columns {sorted(columns)}")
    return Quantized(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scale for part in parts]),
        np.concatenate([part.minimum for part in parts]),
    )


def is_symmetric(quantized: Quantized) -> bool:
    """Whether every minimum is -8 times its scale, bit for bit; the product is exact in bf16."""
    expected = quantized.scale * BFLOAT16.type(MINIMUM_OF_SYMMETRIC)
    return bool(np.array_equal(expected.view(np.uint16), quantized.minimum.view(np.uint16)))


def dequantize_codes(quantized: Quantized) -> Floats:
    """Equation 3 in float32, of codes that are not packed: [rows, columns]."""
    _, columns = quantized.shape
    scale, minimum = (
        np.repeat(parameter.astype(np.float32), GROUP, axis=1)[:, :columns]
        for parameter in (quantized.scale, quantized.minimum)
    )
    scale *= quantized.codes
    scale += minimum
    return scale


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


def check_quantized(name: str, codes: Bytes, scale: NDArray[Any], minimum: NDArray[Any]) -> None:
    """Checks types and shapes of a `Quantized`.

    Raises:
        ValueError: They do not fit; the message begins with `name`.
    """
    if codes.ndim != 2 or codes.size == 0 or codes.dtype != np.uint8:
        raise ValueError(f"[{name}] expected codes uint8 [rows, columns], got {codes.dtype} {list(codes.shape)}")
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


def _quantize_groups(values: Floats, group: int, codes: Bytes, scale: NDArray[Any], minimum: NDArray[Any]) -> None:
    """Searches scale and minimum of every `group` columns of `values` [rows, n * group], and writes the results."""
    weights = np.ascontiguousarray(values.reshape(-1, group).T)  # [group, n]: reductions run over contiguous vectors
    # Searched at magnitudes of 1/2 to 1, where no square overflows or vanishes. Powers of two change no rounding.
    exponent = np.maximum(np.frexp(np.maximum(weights.max(axis=0), -weights.min(axis=0)))[1], -126)
    best = [np.ldexp(p, exponent) for p in _search(weights * np.ldexp(np.float32(1), -exponent))]
    for found, parameter in zip(best, (scale, minimum), strict=True):
        by_row = found.reshape(len(values), -1)
        parameter[:, : by_row.shape[1]] = by_row
    # Rounded once more: below 2^-126 powers of two do change it.
    codes[...] = _nearest_codes(weights, *(_round(p) for p in best)).T.reshape(values.shape)


def _search(weights: Floats) -> tuple[Floats, Floats]:
    """Scale and minimum, both values of bf16, of each column of `weights` [group, n]."""
    smallest, largest = weights.min(axis=0), weights.max(axis=0)
    total = weights.sum(axis=0)
    step = largest / LARGEST_CODE - smallest / LARGEST_CODE
    # A constant group is its minimum alone; it is also what any other start must beat.
    best_scale = np.zeros_like(step)
    best_minimum = _round(total / len(weights))
    best_error = _squared_error(weights, best_scale, best_minimum, np.zeros_like(weights))

    def consider(scale: Floats, minimum: Floats) -> Floats:
        """Keeps these parameters where they are better; returns the codes they give."""
        codes = _nearest_codes(weights, scale, minimum)
        error = _squared_error(weights, scale, minimum, codes)
        better = error < best_error
        for best, new in ((best_scale, scale), (best_minimum, minimum), (best_error, error)):
            np.copyto(best, new, where=better)
        return codes

    for low in _STARTS:
        for high in _STARTS:
            codes = consider(_round(step * ((LARGEST_CODE - low - high) / LARGEST_CODE)), _round(smallest + low * step))
            consider(*_least_squares(weights, codes, total))
    for _ in range(_FINAL_REFITS):
        consider(*_least_squares(weights, _nearest_codes(weights, best_scale, best_minimum), total))
    return best_scale, best_minimum


def _nearest_codes(weights: Floats, scale: Floats, minimum: Floats) -> Floats:
    """The codes, as float32, that bring min + scale * code nearest to the weights."""
    # A scale below the smallest normal number has no finite inverse; its codes are 0.
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale >= np.finfo(np.float32).tiny)
    codes = weights - minimum
    codes *= inverse
    np.rint(codes, out=codes)
    return np.clip(codes, 0, LARGEST_CODE, out=codes)


def _least_squares(weights: Floats, codes: Floats, total: Floats) -> tuple[Floats, Floats]:
    """Scale and minimum that fit given codes best; the minimum for the scale that bf16 has."""
    count = len(weights)
    code_sum = codes.sum(axis=0)
    code_squares = (codes * codes).sum(axis=0)
    products = (weights * codes).sum(axis=0)
    determinant = count * code_squares - code_sum * code_sum
    numerator = count * products - code_sum * total
    scale = np.divide(numerator, determinant, out=np.zeros_like(total), where=determinant > 0)
    scale = _round(np.maximum(scale, 0, out=scale))
    return scale, _round((total - scale * code_sum) / count)


def _squared_error(weights: Floats, scale: Floats, minimum: Floats, codes: Floats) -> Floats:
    difference = codes * scale
    difference += minimum
    difference -= weights
    difference *= difference
    error: Floats = difference.sum(axis=0)
    return error


def _round(values: Floats) -> Floats:
    """To the nearest value of bf16, still in float32."""
    rounded: Floats = values.astype(BFLOAT16).astype(np.float32)
    return rounded


def _check_finite(values: Floats, first_row: int) -> None:
    # A minimum of this magnitude cannot become infinite when it is rounded to bf16.
    limit = 2.0**127
    wrong = ~(np.abs(values) <= limit)
    if wrong.any():
        row, column = (int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"[quantize] expected finite weights of at most {limit:g}, got {values[row, column]:g} in row "
            f"{first_row + row}, column {column}; the checkpoint is damaged or was saved from a diverged training"
        )

# SPDX-License-Identifier: Apache-2.0
"""Rows of an int8 KV cache: the d codes of a head's key or value, then their scale as the four bytes of a float32.

    scale = bf16(max |x| / 127),   code = round(x / scale),   x' = scale * code          (to nearest, ties to even)

so |x - x'| <= scale / 2, which is at most max |x| / 253: the scale's own rounding, 2^-9 of it, leaves the largest
element the code 127 or -127. A scale of 8 significant bits times a code of 7 bits is exact in float32, and a
dequantised row gives the same row when it is quantised again. Scales below 2^-126 are 0. A row with a NaN or an
infinity gets the scale NaN.

The scale's bytes are little-endian, as float32 lies in memory; the lower two are 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"

SCALE_BYTES = 4
_LARGEST_CODE = 127
_SMALLEST_SCALE = 2.0**-126


def quantise_rows(x: Array) -> NDArray[np.int8]:
    """Quantises rows: float [.., d] -> int8 [.., d + 4]."""
    x = np.asarray(x, np.float32)
    with np.errstate(invalid="ignore"):
        raw = np.abs(x).max(axis=-1, keepdims=True, initial=0) / np.float32(_LARGEST_CODE)
        scale = np.where(np.isfinite(raw), raw, np.nan).astype(ml_dtypes.bfloat16).astype(np.float32)
        scale = np.where(scale < _SMALLEST_SCALE, 0, scale).astype(np.float32)
        codes = np.where(scale > 0, np.round(x / np.where(scale > 0, scale, 1)), 0).astype(np.int8)
    return np.concatenate([codes, scale.view(np.int8)], axis=-1)


def dequantise_rows(rows: NDArray[np.int8]) -> NDArray[np.float32]:
    """Dequantises rows exactly: int8 [.., d + 4] -> float32 [.., d]."""
    scale = np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view(np.float32)
    return np.asarray(rows[..., :-SCALE_BYTES].astype(np.float32) * scale, np.float32)


def quantised(x: str, rows: str) -> str:
    """Statements in ONNX's textual syntax that compute the value `rows` from the value `x`, as `quantise_rows` does.

    They use the value `minus_one`, the integers [-1], which earlier statements must define. Before opset 26 ONNX has no
    operator for the bits of a float: the exponent is found by counting the powers of two that the scale reaches.
    """
    # {rows}_zeros, x times 0, is NaN where x is not finite.
    return f"""
    {rows}_powers = Constant <value = float[254] {{{", ".join(f"{2.0**e:.9e}" for e in range(-126, 128))}}}> ()
    {rows}_codes_most = Constant <value = float {{{_LARGEST_CODE}}}> ()
    {rows}_float_0 = Constant <value = float {{0}}> ()
    {rows}_float_1 = Constant <value = float {{1}}> ()
    {rows}_128 = Constant <value = float {{128}}> ()
    {rows}_int_0 = Constant <value = int32 {{0}}> ()
    {rows}_int_1 = Constant <value = int32 {{1}}> ()
    {rows}_int_128 = Constant <value = int32 {{128}}> ()
    {rows}_int_256 = Constant <value = int32 {{256}}> ()
    {rows}_nan_bits = Constant <value = int32 {{32704}}> ()
    {rows}_magnitude = Abs ({x})
    {rows}_largest = ReduceMax <keepdims = 1> ({rows}_magnitude, minus_one)
    {rows}_zeros = Mul ({x}, {rows}_float_0)
    {rows}_zero = ReduceSum <keepdims = 1> ({rows}_zeros, minus_one)
    {rows}_quotient = Div ({rows}_largest, {rows}_codes_most)
    {rows}_raw = Add ({rows}_quotient, {rows}_zero)
    {rows}_is_nan = IsNaN ({rows}_raw)
    {rows}_bf16 = Cast <to = 16> ({rows}_raw)
    {rows}_rounded = Cast <to = 1> ({rows}_bf16)
    {rows}_reaches = GreaterOrEqual ({rows}_rounded, {rows}_powers)
    {rows}_reached = Cast <to = 6> ({rows}_reaches)
    {rows}_exponent = ReduceSum <keepdims = 1> ({rows}_reached, minus_one)
    {rows}_is_scale = Greater ({rows}_exponent, {rows}_int_0)
    {rows}_scale = Where ({rows}_is_scale, {rows}_rounded, {rows}_float_1)
    {rows}_scaled = Div ({x}, {rows}_scale)
    {rows}_whole = Round ({rows}_scaled)
    {rows}_codes_float = Where ({rows}_is_scale, {rows}_whole, {rows}_float_0)
    {rows}_codes = Cast <to = 3> ({rows}_codes_float)
    {rows}_exponent_1 = Sub ({rows}_exponent, {rows}_int_1)
    {rows}_at = Max ({rows}_exponent_1, {rows}_int_0)
    {rows}_power = Gather ({rows}_powers, {rows}_at)
    {rows}_significand = Div ({rows}_scale, {rows}_power)
    {rows}_fraction = Sub ({rows}_significand, {rows}_float_1)
    {rows}_mantissa_float = Mul ({rows}_fraction, {rows}_128)
    {rows}_mantissa = Cast <to = 6> ({rows}_mantissa_float)
    {rows}_upper = Mul ({rows}_exponent, {rows}_int_128)
    {rows}_finite_bits = Add ({rows}_upper, {rows}_mantissa)
    {rows}_scale_bits = Where ({rows}_is_scale, {rows}_finite_bits, {rows}_int_0)
    {rows}_bits = Where ({rows}_is_nan, {rows}_nan_bits, {rows}_scale_bits)
    {rows}_high = Div ({rows}_bits, {rows}_int_256)
    {rows}_high_bits = Mul ({rows}_high, {rows}_int_256)
    {rows}_low_unsigned = Sub ({rows}_bits, {rows}_high_bits)
    {rows}_low_negative = Sub ({rows}_low_unsigned, {rows}_int_256)
    {rows}_is_positive = Less ({rows}_low_unsigned, {rows}_int_128)
    {rows}_low = Where ({rows}_is_positive, {rows}_low_unsigned, {rows}_low_negative)
    {rows}_no_bits = Sub ({rows}_bits, {rows}_bits)
    {rows}_scale_ints = Concat <axis = -1> ({rows}_no_bits, {rows}_no_bits, {rows}_low, {rows}_high)
    {rows}_scale_bytes = Cast <to = 3> ({rows}_scale_ints)
    {rows} = Concat <axis = -1> ({rows}_codes, {rows}_scale_bytes)
"""


def dequantised(rows: str, x: str) -> str:
    """Statements in ONNX's textual syntax that compute the float32 value `x` from `rows`, as `dequantise_rows` does.

    They use the values `minus_one`, `zero` and `channels`, the integers [-1], [0] and [d], which earlier statements
    must define.
    """
    powers = ", ".join(["0", *(f"{2.0**e:.9e}" for e in range(-126, 128)), "0"])
    return f"""
    {x}_powers = Constant <value = float[256] {{{powers}}}> ()
    {x}_end = Constant <value_ints = [9223372036854775807]> ()
    {x}_float_0 = Constant <value = float {{0}}> ()
    {x}_float_1 = Constant <value = float {{1}}> ()
    {x}_128th = Constant <value = float {{0.0078125}}> ()
    {x}_int_0 = Constant <value = int32 {{0}}> ()
    {x}_int_128 = Constant <value = int32 {{128}}> ()
    {x}_int_255 = Constant <value = int32 {{255}}> ()
    {x}_int_256 = Constant <value = int32 {{256}}> ()
    {x}_codes = Slice ({rows}, zero, channels, minus_one)
    {x}_scale_bytes = Slice ({rows}, channels, {x}_end, minus_one)
    {x}_scale_ints = Cast <to = 6> ({x}_scale_bytes)
    {x}_byte_0, {x}_byte_1, {x}_byte_2, {x}_byte_3 = Split <axis = -1, num_outputs = 4> ({x}_scale_ints)
    {x}_low_positive = Add ({x}_byte_2, {x}_int_256)
    {x}_is_negative = Less ({x}_byte_2, {x}_int_0)
    {x}_low = Where ({x}_is_negative, {x}_low_positive, {x}_byte_2)
    {x}_high = Mul ({x}_byte_3, {x}_int_256)
    {x}_bits = Add ({x}_high, {x}_low)
    {x}_exponent = Div ({x}_bits, {x}_int_128)
    {x}_exponent_bits = Mul ({x}_exponent, {x}_int_128)
    {x}_mantissa = Sub ({x}_bits, {x}_exponent_bits)
    {x}_mantissa_float = Cast <to = 1> ({x}_mantissa)
    {x}_fraction = Mul ({x}_mantissa_float, {x}_128th)
    {x}_significand = Add ({x}_fraction, {x}_float_1)
    {x}_power = Gather ({x}_powers, {x}_exponent)
    {x}_finite_scale = Mul ({x}_significand, {x}_power)
    {x}_is_nan = Equal ({x}_exponent, {x}_int_255)
    {x}_nan = Div ({x}_float_0, {x}_float_0)
    {x}_scale = Where ({x}_is_nan, {x}_nan, {x}_finite_scale)
    {x}_codes_float = Cast <to = 1> ({x}_codes)
    {x} = Mul ({x}_codes_float, {x}_scale)
"""

# SPDX-License-Identifier: Apache-2.0
"""Bounds of element-wise operators: activations, arithmetic, comparisons, casts, selections."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tests.fuzz.arrays import Array, is_float, limits, numpy_type
from tests.fuzz.reference.bounds import (
    ALWAYS,
    NEVER,
    PERHAPS,
    Bounds,
    Unknown,
    elementwise,
    joined_nan,
    rounded,
    unit,
    unknown_where,
)
from tests.fuzz.reference.moves import apply

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fuzz.reference.evaluate import Node, Table

# Allowed error of exp, tanh and the like in roundings, including the result's: libm's and FlowNPU's are off by up to 2
# units in the last place (ops/cpu/kernels/vector.h).
FUNCTION_UNITS = 8.0
# An exponential that is below the normal numbers may be anything from 0 up to this.
LEAST = 2.0**-125


def erf(x: Array) -> Array:
    """erf in float64."""
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x))


def gelu(x: Bounds, *, tanh: bool) -> Bounds:
    """Bounds of GELU: x Phi(x), or its tanh approximation. It is not monotone, but within [-0.1701, 0] below 0."""

    def exactly(x: Array) -> Array:
        near = np.clip(x, -1e30, 1e30)
        if tanh:
            exponent = np.minimum(2 * np.sqrt(2 / np.pi) * (-near) * (1 + 0.044715 * near * near), 700)
            value = x / (1 + np.exp(exponent))
        else:
            value = 0.5 * x * (1 + erf(near / np.sqrt(2)))
        return np.where(x == np.inf, np.inf, np.where(x == -np.inf, -0.0, value))

    low, high = exactly(x.low), exactly(x.high)
    spans = (x.low < -0.75) & (x.high > -0.76) | (low > high)
    low, high = np.minimum(low, high), np.maximum(low, high)
    low = np.where(spans & ~(x.low == x.high), -0.1701, low)
    # Below 0 the value is x times a difference of numbers near 1: absolute errors count. FlowNPU's polynomial of erf
    # has an error of 1.5e-7 (ops/cpu/kernels/activations.h); tanh's argument is off by some roundings, and so is
    # 1 + tanh.
    magnitude = np.maximum(np.abs(x.low), np.abs(x.high))
    finite = np.where(np.isfinite(magnitude), magnitude, 0)
    u = unit(x.dtype)
    error = 0.5 * np.minimum(finite, 1e4) * (2e-7 + 12 * u)
    if tanh:
        # For large x only the error of an exponential that does not overflow is left.
        error = np.where(finite > 15, np.minimum(finite * 2.0**-125, 1e-9), error)
    error = np.maximum(error, FUNCTION_UNITS * u * np.maximum(np.abs(low), np.abs(high)))
    error = np.where(np.isfinite(error), error, 0)
    nan = x.nan
    # GELU(-inf) is -inf times 0: implementations give NaN or 0, which ONNX leaves open.
    at_end = x.low == -np.inf
    if at_end.any():
        nan = np.maximum(np.zeros(at_end.shape, np.uint8) if nan is None else nan, np.where(at_end, PERHAPS, NEVER))
    return rounded(low - error, high + error, x.dtype, nan=None if nan is None else nan.astype(np.uint8))


def unary(function: Callable[[Array], Array], units: float) -> Callable[[Node], Bounds]:
    return lambda node: elementwise(function, node.float(0), units=units)


def sigmoid(node: Node) -> Bounds:
    x = node.float(0)
    # e^-x of a rounded x, then a sum and a quotient; implementations may limit -x before e^-x overflows.
    made = elementwise(lambda a: 1 / (1 + np.exp(-a)), x, units=FUNCTION_UNITS)
    # ONNX Runtime's kernel is an approximation with an absolute error of 2^-24; with on_unsupported=cpu it may compute
    # a part of the graph.
    least = 2.0**-24 if node.provider.get("on_unsupported") == "cpu" else LEAST
    return made._replace(low=np.where(made.low < least, 0, made.low), high=np.maximum(made.high, least))


def negative(node: Node) -> Bounds:
    x = node.input(0)
    if not is_float(x.dtype):
        return integer(np.subtract, Bounds(np.zeros_like(x.low), np.zeros_like(x.low), x.dtype), x)
    low, high = -x.high, -x.low
    return Bounds(low, low if x.is_exact else high, x.dtype, x.nan)


def standard_gelu(node: Node) -> Bounds:
    return gelu(node.float(0), tanh=node.attributes.get("approximate", b"none") == b"tanh")


def fast_gelu(node: Node) -> Bounds:
    x = node.float(0)
    if node.has(1):
        x = elementwise(np.add, x, node.float(1))
    return gelu(x, tanh=True)


# --- Two operands -----------------------------------------------------------------------------------------------------


def integer(function: Callable[[Array, Array], Array], a: Bounds, b: Bounds) -> Bounds:
    """The bounds of a function of integers, which wrap around; unknown where an operand is unknown."""
    exact = function(a.low, b.low).astype(a.dtype)
    made = Bounds(exact, exact, a.dtype)
    if a.is_exact and b.is_exact:
        return made
    return unknown_where(made, np.broadcast_to((a.low != a.high) | (b.low != b.high), exact.shape))


def sum_of(a: Bounds, b: Bounds) -> Bounds:
    return elementwise(np.add, a, b)


def product_of(a: Bounds, b: Bounds) -> Bounds:
    made = elementwise(np.multiply, a, b)
    # Where the intervals contain zero times infinity between their ends, nothing is known.
    holes = [
        (p.low <= 0) & (p.high >= 0) & np.isinf(np.maximum(np.abs(q.low), np.abs(q.high))) for p, q in ((a, b), (b, a))
    ]
    hole = np.broadcast_to(holes[0] | holes[1], made.shape)
    if (a.is_exact and b.is_exact) or not hole.any():
        return made
    return unknown_where(made, hole)


def quotient_of(a: Bounds, b: Bounds) -> Bounds:
    made = elementwise(np.divide, a, b)
    if b.is_exact and a.is_exact:
        return made
    through_zero = (b.low <= 0) & (b.high >= 0) & ~((b.low == 0) & (b.high == 0) & (a.low == a.high))
    both_infinite = np.isinf(np.maximum(np.abs(a.low), np.abs(a.high))) & np.isinf(
        np.maximum(np.abs(b.low), np.abs(b.high))
    )
    return unknown_where(made, np.broadcast_to(through_zero | both_infinite, made.shape))


def reciprocal(node: Node) -> Bounds:
    x = node.float(0)
    ones = np.ones(x.shape)
    return quotient_of(Bounds(ones, ones, x.dtype), x)


def integer_quotient(a: Array, b: Array) -> Array:
    """The quotient of integers, rounded towards zero; the lowest number divided by -1 wraps around."""
    if (b == 0).any():
        raise Unknown
    wide = a.astype(object) if a.dtype.itemsize == 8 else a.astype(np.int64)
    if a.dtype.itemsize == 8:
        quotient = np.abs(wide) // np.abs(b.astype(object))
        signed = np.where((a < 0) != (b < 0), -quotient, quotient)
        return (
            np.array([int(n) & (2**64 - 1) for n in signed.reshape(-1)], np.uint64).view(np.int64).reshape(signed.shape)
        )
    quotient = np.abs(wide) // np.abs(b.astype(np.int64))
    return np.asarray(np.where((a < 0) != (b < 0), -quotient, quotient))


def arithmetic(
    of_floats: Callable[[Bounds, Bounds], Bounds], of_integers: Callable[[Array, Array], Array]
) -> Callable[[Node], Bounds]:
    def evaluate(node: Node) -> Bounds:
        a, b = node.input(0), node.input(1)
        return of_floats(a, b) if is_float(a.dtype) else integer(of_integers, a, b)

    return evaluate


def extreme(function: Any) -> Callable[[Node], Bounds]:
    """Bounds of Max or Min of any number of operands; if any of them is NaN, so is the result."""

    def evaluate(node: Node) -> Bounds:
        made = node.input(0)
        for i in range(1, node.count):
            other = node.input(i)
            low = function(made.low, other.low)
            high = low if made.is_exact and other.is_exact else function(made.high, other.high)
            nan = joined_nan(made, other)
            made = Bounds(low, high, made.dtype, None if nan is None else np.broadcast_to(nan, low.shape))
        return made

    return evaluate


def power(node: Node) -> Bounds:
    a, b = node.input(0), node.input(1)
    if not is_float(a.dtype):
        raise Unknown
    if not is_float(b.dtype):
        exponent = b.exact().astype(np.float64)
        b = Bounds(exponent, exponent, a.dtype)
    # x^y = exp(y log x): exp turns the absolute error of its argument into a relative error of the result, so that the
    # error grows with the argument.
    with np.errstate(all="ignore"):
        size = np.abs(np.broadcast_arrays(np.log(np.maximum(np.abs(a.low), 1e-300)) * b.low, a.high)[0])
    units = FUNCTION_UNITS + np.minimum(np.nan_to_num(size), 1e3)
    made = elementwise(np.power, a, b, units=units)
    if a.is_exact and b.is_exact:
        return made
    # x^y is monotone in both operands for x > 0 only.
    return unknown_where(made, np.broadcast_to((a.low <= 0) & ((a.low != a.high) | (b.low != b.high)), made.shape))


# --- Comparisons and logic --------------------------------------------------------------------------------------------


def truth(low: Array, high: Array) -> Bounds:
    return Bounds(low, low if (low == high).all() else high, np.dtype(np.bool_))


def decided(node: Node) -> Bounds:
    """Bounds of a comparison or of a logical operator, from its answers at all ends of its operands."""
    values = [node.input(i) for i in range(node.count)]
    ends = product(*((value.low,) if value.is_exact else (value.low, value.high) for value in values))
    answers = [apply(node, choice)[0] for choice in ends]
    low, high = np.logical_and.reduce(answers), np.logical_or.reduce(answers)
    if node.op_type == "Equal":  # operands may also be equal between their ends
        a, b = values
        high = high | ((a.low <= b.high) & (b.low <= a.high))
    nan = joined_nan(*values)
    if nan is not None:
        low, high = low & (nan == NEVER), high & (nan != ALWAYS)
    return truth(low, high)


def is_nan(node: Node) -> Bounds:
    x = node.float(0)
    if x.nan is None:
        return truth(np.zeros(x.shape, np.bool_), np.zeros(x.shape, np.bool_))
    return truth(x.nan == ALWAYS, x.nan != NEVER)


def absolute(node: Node) -> Bounds:
    x = node.float(0)
    spans = (x.low < 0) & (x.high > 0)
    made = elementwise(np.abs, x, units=0)
    return made._replace(low=np.where(spans, 0, made.low))


def where(node: Node) -> Bounds:
    condition, x, y = node.input(0), node.input(1), node.input(2)
    shape = np.broadcast_shapes(condition.shape, x.shape, y.shape)
    low = np.where(condition.low, x.low, y.low)
    high = np.where(condition.low, x.high, y.high)
    nan = None
    if x.nan is not None or y.nan is not None:
        nan = np.where(condition.low, NEVER if x.nan is None else x.nan, NEVER if y.nan is None else y.nan)
        nan = np.broadcast_to(nan, shape).astype(np.uint8)
    made = Bounds(np.broadcast_to(low, shape), np.broadcast_to(high, shape), x.dtype, nan)
    if condition.is_exact:
        return made
    return unknown_where(made, np.broadcast_to(condition.low != condition.high, shape))


# --- Casts ------------------------------------------------------------------------------------------------------------


def cast(node: Node) -> Bounds:
    return converted(node.input(0), numpy_type(int(node.attributes["to"])))


def converted(x: Bounds, to: np.dtype[Any]) -> Bounds:
    """Bounds of a Cast; numbers that the integer's type does not hold, which ONNX leaves open, become unknown."""
    if to == x.dtype:
        return x
    if to.itemsize < 1 or x.dtype.itemsize < 1 or not (_is_known(to) and _is_known(x.dtype)):
        raise Unknown
    if to == np.bool_:
        never_zero = (x.low > 0) | (x.high < 0)
        maybe = ~((x.low == 0) & (x.high == 0))
        if x.nan is not None:
            never_zero, maybe = never_zero | (x.nan >= ALWAYS), maybe | (x.nan != NEVER)
        return truth(never_zero & (x.nan != PERHAPS if x.nan is not None else True), maybe)
    if is_float(to):
        return _to_float(x, to)
    if not is_float(x.dtype):
        if not x.is_exact:
            raise Unknown
        made = x.low.astype(to)
        return Bounds(made, made, to)
    return _to_integer(x, to)


def _is_known(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iub" or dtype in (np.float32, np.float16, np.float64) or dtype == ml_dtypes.bfloat16


def _to_float(x: Bounds, to: np.dtype[Any]) -> Bounds:
    low = x.low.astype(to).astype(np.float64)
    if x.is_exact:
        return Bounds(low, low, to, x.nan)
    made = rounded(low, x.high.astype(to).astype(np.float64), to)
    return made._replace(nan=x.nan)


def _to_integer(x: Bounds, to: np.dtype[Any]) -> Bounds:
    info = limits(to)
    low, high = np.trunc(x.low), np.trunc(x.high)
    outside = ~((low >= float(info.min)) & (high < float(info.max) + 1))
    if x.nan is not None:
        outside |= x.nan != NEVER
    first, last = (np.where(outside, 0, end).astype(to) for end in (low, high))
    return unknown_where(Bounds(first, first if x.is_exact else last, to), outside)


_DECISIONS = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "And", "Or", "Xor", "Not")
TABLE: Table = {
    **{("", name): decided for name in _DECISIONS},
    ("", "Tanh"): unary(np.tanh, FUNCTION_UNITS),
    ("", "Sigmoid"): sigmoid,
    ("", "Exp"): unary(np.exp, FUNCTION_UNITS),
    ("", "Sqrt"): unary(np.sqrt, 1.0),
    ("", "Reciprocal"): reciprocal,
    ("", "Neg"): negative,
    ("", "Erf"): unary(erf, FUNCTION_UNITS),
    ("", "IsNaN"): is_nan,
    ("", "Gelu"): standard_gelu,
    ("com.microsoft", "Gelu"): standard_gelu,
    ("com.microsoft", "FastGelu"): fast_gelu,
    ("", "Add"): arithmetic(sum_of, np.add),
    ("", "Sub"): arithmetic(lambda a, b: elementwise(np.subtract, a, b), np.subtract),
    ("", "Mul"): arithmetic(product_of, np.multiply),
    ("", "Div"): arithmetic(quotient_of, integer_quotient),
    ("", "Pow"): power,
    ("", "Max"): extreme(np.maximum),
    ("", "Min"): extreme(np.minimum),
    ("", "Where"): where,
    ("", "Cast"): cast,
    ("", "Abs"): absolute,
    ("", "Relu"): lambda node: elementwise(lambda a: np.maximum(a, 0), node.float(0), units=0),
    ("", "Floor"): lambda node: elementwise(np.floor, node.float(0), units=0),
}

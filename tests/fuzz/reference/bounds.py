# SPDX-License-Identifier: Apache-2.0
"""Bounds: the interval in which each element of a value must be.

A tolerance for a whole graph would have to be guessed: the difference of two long sums may have any relative error. So
the reference computes with intervals. Each operator takes intervals and gives one that holds every result of a correct
implementation: it is computed in float64, and widened by the roundings that the operator's arithmetic may make
(operator by operator, with the reason beside it). Both ends are then exact up to 2^-53, compared with 2^-24 of the
float32 that is checked. Results of a comparison or a rounding that the intervals do not decide are unknown, and not
checked further. The bounds hold for any order of summation, and for fused nodes, too, for these round less.

Integers and booleans are intervals, too, mostly of one number; an unknown one goes from the lowest to the highest.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.fuzz.arrays import Array, is_float, limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Whether an element is NaN: never, perhaps, always; or it is always NaN or infinite.
NEVER, PERHAPS, ALWAYS, NOT_FINITE = 0, 1, 2, 3


class Unknown(Exception):  # noqa: N818
    """The reference does not know the operator's result for these inputs, or ONNX leaves it open."""


class Bounds(NamedTuple):
    """The lowest and highest number of each element: float64 for floats, else in the element's own type.

    `nan`: NEVER, PERHAPS, ALWAYS or NOT_FINITE for each element; None: never. Where it is ALWAYS, low and high are 0.
    """

    low: Array
    high: Array
    dtype: np.dtype[Any]
    nan: Array | None = None

    @property
    def is_exact(self) -> bool:
        return self.low is self.high

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.low.shape)

    def exact(self) -> Array:
        """The numbers, if each element can only be one. Raises Unknown."""
        if not self.is_exact and not (self.low == self.high).all():
            raise Unknown
        if self.nan is not None:
            raise Unknown
        return self.low

    def map(self, move: Callable[[Array], Array]) -> Bounds:
        """The bounds after elements are moved, by applying `move` to each array."""
        low = move(self.low)
        high = low if self.is_exact else move(self.high)
        return Bounds(low, high, self.dtype, None if self.nan is None else move(self.nan))


def of(array: Array) -> Bounds:
    """The bounds of known numbers."""
    if not is_float(array.dtype):
        return Bounds(array, array, array.dtype)
    numbers = array.astype(np.float64)
    missing = np.isnan(numbers)
    if not missing.any():
        return Bounds(numbers, numbers, array.dtype)
    numbers = np.where(missing, 0.0, numbers)
    return Bounds(numbers, numbers, array.dtype, np.where(missing, ALWAYS, NEVER).astype(np.uint8))


def unit(dtype: np.dtype[Any]) -> float:
    """The largest relative error of one rounding: half the distance from 1 to the next number."""
    # The reference is float64 itself, so float64 results can only be checked to within several roundings.
    return 2.0**-49 if dtype == np.float64 else float(limits(dtype).eps) / 2


def rounded(
    low: Array, high: Array, dtype: np.dtype[Any], units: float | Array = 1.0, nan: Array | None = None
) -> Bounds:
    """The interval widened by the errors of `units` roundings; subnormal numbers may be flushed to 0."""
    relative = unit(dtype) * units
    tiny, largest = float(limits(dtype).tiny), float(limits(dtype).max)

    def widened(numbers: Array, sign: int) -> Array:
        step = np.abs(numbers) * relative
        subnormal = (np.abs(numbers) < 2 * tiny) & (numbers != 0)
        return np.where(np.isinf(numbers), numbers, numbers + sign * np.where(subnormal, tiny, step))

    below, above = widened(low, -1), widened(high, 1)
    # A result beyond the largest number is infinity; but one that rounds just beyond it may still be that number.
    below = np.where(np.isinf(below) & (below == low), below, np.minimum(below, largest))
    above = np.where(np.isinf(above) & (above == high), above, np.maximum(above, -largest))
    below, above = np.where(below < -largest, -np.inf, below), np.where(above > largest, np.inf, above)
    return Bounds(below, above, dtype, nan)


def joined_nan(*values: Bounds) -> Array | None:
    """The NaNs of a result that is NaN where any of its operands, which broadcast, is."""
    found: Array | None = None
    for value in values:
        if value.nan is not None:
            own = np.where(value.nan == NOT_FINITE, PERHAPS, value.nan).astype(np.uint8)
            found = own if found is None else np.maximum(found, own)
    return found


def corners(function: Callable[..., Array], *values: Bounds) -> tuple[Array, Array, Array | None]:
    """Low, high and NaNs of a function that is monotone, in either direction, in each operand."""
    ends: list[Sequence[Array]] = [(v.low,) if v.is_exact else (v.low, v.high) for v in values]
    results = [np.asarray(function(*choice), np.float64) for choice in product(*ends)]
    missing = [np.isnan(result) for result in results]
    nan = joined_nan(*values)
    if any(m.any() for m in missing):
        always = np.logical_and.reduce(missing)
        own = np.where(always, ALWAYS, np.where(np.logical_or.reduce(missing), PERHAPS, NEVER)).astype(np.uint8)
        nan = own if nan is None else np.maximum(nan, own)
        low = np.where(
            always, 0.0, np.where(own == PERHAPS, -np.inf, results[0] if len(results) == 1 else np.fmin.reduce(results))
        )
        if len(results) == 1:
            return low, low, nan
        # If only some corners are NaN, the result may be anything, as the root of an interval with negative numbers.
        return low, np.where(always, 0.0, np.where(own == PERHAPS, np.inf, np.fmax.reduce(results))), nan
    if len(results) == 1:
        return results[0], results[0], nan
    return np.minimum.reduce(results), np.maximum.reduce(results), nan


def elementwise(
    function: Callable[..., Array], *values: Bounds, units: float | Array = 1.0, dtype: np.dtype[Any] | None = None
) -> Bounds:
    """The bounds of a function of floats that is monotone in each operand, with `units` roundings."""
    low, high, nan = corners(function, *values)
    if nan is not None:
        nan = np.broadcast_to(nan, low.shape)
    return rounded(low, high, dtype or values[0].dtype, units, nan)


def anything(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Bounds:
    """Bounds of completely unknown numbers."""
    if is_float(dtype):
        infinity = np.full(shape, np.inf)
        return Bounds(-infinity, infinity, dtype, np.full(shape, PERHAPS, np.uint8))
    if dtype == np.bool_:
        return Bounds(np.zeros(shape, bool), np.ones(shape, bool), dtype)
    info = limits(dtype)
    return Bounds(np.full(shape, info.min, dtype), np.full(shape, info.max, dtype), dtype)


def unknown_where(value: Bounds, unknown: Array) -> Bounds:
    """The value's bounds, with unknown numbers for the elements in `unknown`."""
    if not unknown.any():
        return value
    blank = anything(value.shape, value.dtype)
    nan = None
    if blank.nan is not None:
        nan = np.where(unknown, blank.nan, NEVER if value.nan is None else value.nan)
    low, high = np.where(unknown, blank.low, value.low), np.where(unknown, blank.high, value.high)
    return Bounds(low, high, value.dtype, nan)

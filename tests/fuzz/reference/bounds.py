# SPDX-License-Identifier: Apache-2.0
"""Between which numbers each element of a value must be.

A tolerance for a whole graph would have to be guessed: what a subtraction leaves of two long sums may be anything. So
the reference computes with intervals. Each operator takes intervals in and gives one that holds every result which a
correct implementation may have, in float64 with the roundings that the operator's arithmetic may make added to it
(operator by operator, with the reason beside it). Both ends are then exact up to 2^-53, against 2^-24 of what is
checked. What follows from a comparison or a rounding that the intervals do not decide is unknown, and not checked
further. The bounds hold in any order of summation and for fused nodes as well, for these round less.

Integers and booleans are intervals too, mostly of one number; an unknown one goes from the lowest to the highest.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.fuzz.arrays import Array, is_float, limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# What an element is: never, perhaps or always NaN; always NaN or infinite.
NEVER, PERHAPS, ALWAYS, NOT_FINITE = 0, 1, 2, 3


class Unknown(Exception):  # noqa: N818
    """What an operator gives for these inputs is not known to the reference, or is left open by ONNX."""


class Bounds(NamedTuple):
    """Lowest and highest numbers of each element: of floats as float64, else in their own type.

    `nan`: NEVER, PERHAPS, ALWAYS or NOT_FINITE of each element; none: never. Where it is ALWAYS, the numbers are 0.
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
        """The numbers, where there is one for each element. Raises Unknown."""
        if not self.is_exact and not (self.low == self.high).all():
            raise Unknown
        if self.nan is not None:
            raise Unknown
        return self.low

    def map(self, move: Callable[[Array], Array]) -> Bounds:
        """What a move of elements makes of it."""
        low = move(self.low)
        high = low if self.is_exact else move(self.high)
        return Bounds(low, high, self.dtype, None if self.nan is None else move(self.nan))


def of(array: Array) -> Bounds:
    """The bounds of numbers that are known."""
    if not is_float(array.dtype):
        return Bounds(array, array, array.dtype)
    numbers = array.astype(np.float64)
    missing = np.isnan(numbers)
    if not missing.any():
        return Bounds(numbers, numbers, array.dtype)
    numbers = np.where(missing, 0.0, numbers)
    return Bounds(numbers, numbers, array.dtype, np.where(missing, ALWAYS, NEVER).astype(np.uint8))


def unit(dtype: np.dtype[Any]) -> float:
    """The largest relative error of one rounding, half the distance of 1 to the next number."""
    # What is computed in float64 here cannot be checked more closely than to some roundings of it.
    return 2.0**-49 if dtype == np.float64 else float(limits(dtype).eps) / 2


def rounded(
    low: Array, high: Array, dtype: np.dtype[Any], units: float | Array = 1.0, nan: Array | None = None
) -> Bounds:
    """The interval, widened by that many roundings' errors; numbers below the normal ones may be flushed to 0."""
    relative = unit(dtype) * units
    tiny, largest = float(limits(dtype).tiny), float(limits(dtype).max)

    def widened(numbers: Array, sign: int) -> Array:
        step = np.abs(numbers) * relative
        subnormal = (np.abs(numbers) < 2 * tiny) & (numbers != 0)
        return np.where(np.isinf(numbers), numbers, numbers + sign * np.where(subnormal, tiny, step))

    below, above = widened(low, -1), widened(high, 1)
    # Beyond the largest number there is infinity, which a number just below may not reach.
    below = np.where(np.isinf(below) & (below == low), below, np.minimum(below, largest))
    above = np.where(np.isinf(above) & (above == high), above, np.maximum(above, -largest))
    below, above = np.where(below < -largest, -np.inf, below), np.where(above > largest, np.inf, above)
    return Bounds(below, above, dtype, nan)


def joined_nan(*values: Bounds) -> Array | None:
    """NaN where any of the operands, which broadcast, is NaN."""
    found: Array | None = None
    for value in values:
        if value.nan is not None:
            own = np.where(value.nan == NOT_FINITE, PERHAPS, value.nan).astype(np.uint8)
            found = own if found is None else np.maximum(found, own)
    return found


def corners(function: Callable[..., Array], *values: Bounds) -> tuple[Array, Array, Array | None]:
    """Ends and NaNs of a function that is monotone in each operand, in whichever direction."""
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
        # Between the ends there may be more than at them: the root of what may be negative.
        return low, np.where(always, 0.0, np.where(own == PERHAPS, np.inf, np.fmax.reduce(results))), nan
    if len(results) == 1:
        return results[0], results[0], nan
    return np.minimum.reduce(results), np.maximum.reduce(results), nan


def elementwise(
    function: Callable[..., Array], *values: Bounds, units: float | Array = 1.0, dtype: np.dtype[Any] | None = None
) -> Bounds:
    """A function of floats, monotone in each operand, with that many roundings."""
    low, high, nan = corners(function, *values)
    if nan is not None:
        nan = np.broadcast_to(nan, low.shape)
    return rounded(low, high, dtype or values[0].dtype, units, nan)


def anything(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Bounds:
    """Nothing is known of the numbers."""
    if is_float(dtype):
        infinity = np.full(shape, np.inf)
        return Bounds(-infinity, infinity, dtype, np.full(shape, PERHAPS, np.uint8))
    if dtype == np.bool_:
        return Bounds(np.zeros(shape, bool), np.ones(shape, bool), dtype)
    info = limits(dtype)
    return Bounds(np.full(shape, info.min, dtype), np.full(shape, info.max, dtype), dtype)


def unknown_where(value: Bounds, unknown: Array) -> Bounds:
    """The value, with nothing known of some elements."""
    if not unknown.any():
        return value
    blank = anything(value.shape, value.dtype)
    nan = None
    if blank.nan is not None:
        nan = np.where(unknown, blank.nan, NEVER if value.nan is None else value.nan)
    low, high = np.where(unknown, blank.low, value.low), np.where(unknown, blank.high, value.high)
    return Bounds(low, high, value.dtype, nan)

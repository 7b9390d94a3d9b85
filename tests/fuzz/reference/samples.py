# SPDX-License-Identifier: Apache-2.0
"""Samples of a value: what float64 computes, and what roundings might make of it.

A tolerance for a whole graph would have to be guessed: the difference of two long sums may have any relative error. So
each operator is computed in float64 several times, on samples of its inputs, and its results are moved at random by
what the operator's arithmetic may round (Parker, "Monte Carlo Arithmetic", 1997). What the last samples spread over is
then the tolerance; a comparison that samples decide differently is unknown, and not checked further. Fused nodes round
less, and are within it, too.

A sample's error is at least half of, and at most, WIDE roundings, and bounds are BEYOND times the samples' spread, for
one that a comparison lets through may lie beyond those that it let through: a single rounding is certainly within them.
If many roundings add up, both are nearly normal: the widest of 16 samples is below a quarter of their standard
deviation (0.76 WIDE roundings) in 1e-11 cases, below a half in 2e-7, and a result's error (a standard deviation of 0.58
roundings) above BEYOND times this half, 3 of its own, in 3e-3; over all widths the chance is 1e-8 an element at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.fuzz.arrays import Array, is_float, limits

SAMPLES = 16
WIDE, BEYOND = 3.0, 1.5
# Whether an element is NaN: never, perhaps, always; or it is always NaN or infinite.
NEVER, PERHAPS, ALWAYS, NOT_FINITE = 0, 1, 2, 3


_random = [np.random.default_rng(0)]


def restart() -> None:
    """Makes the same random errors follow as after the last call, so that a model has the same bounds each time."""
    _random[0] = np.random.default_rng(0)


class Unknown(Exception):  # noqa: N818
    """The reference does not know the operator's result for these inputs, or ONNX leaves it open."""


class Bounds(NamedTuple):
    """The lowest and highest number of each element: float64 for floats, else in the element's own type.

    `nan`: NEVER, PERHAPS, ALWAYS or NOT_FINITE for each element; None: never.
    """

    low: Array
    high: Array
    dtype: np.dtype[Any]
    nan: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.low.shape)


class Samples(NamedTuple):
    """Samples [1 or 1 + SAMPLES, *shape] of a value: the first without roundings; only one: it is known exactly.

    Floats are float64 numbers; `dtype` is the value's type in the model.
    """

    numbers: Array
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.numbers.shape[1:])

    @property
    def is_float(self) -> bool:
        return is_float(self.dtype)

    def exact(self) -> Array:
        """The numbers, if each element can only be one. Raises Unknown."""
        first = self.numbers[0]
        if (self.numbers != first).any():  # NaN differs from itself
            raise Unknown
        return first

    def shaken(self, relative: float | Array = 0.0, absolute: float | Array = 0.0) -> Samples:
        """The samples after each element is moved by up to WIDE times an error, of its magnitude and absolute.

        Args:
            relative: relative to the magnitude.
            absolute: the same for all samples, or for each of them.
        """
        count = 1 + SAMPLES
        numbers = np.broadcast_to(self.numbers, (count, *self.shape))
        noise = _random[0].uniform(-0.5, 0.5, numbers.shape)
        noise = WIDE * (noise + np.copysign(0.5, noise))
        noise[0] = 0
        size = np.where(np.isfinite(numbers), np.abs(numbers), 0)
        return self._replace(numbers=numbers + noise * (size * relative + absolute))

    def rounded(self, units: float | Array = 1.0, least: float = 0.0) -> Samples:
        """The samples after `units` roundings to the value's type.

        Numbers below `least`, and subnormal ones, may be flushed to 0; those beyond the largest are infinite.
        """
        if not np.size(units) or not np.any(units):
            return self
        numbers = self.shaken(unit(self.dtype) * units).numbers
        info = limits(self.dtype)
        least = max(least, 2 * float(info.tiny))
        small = (np.abs(numbers) < least) & (numbers != 0)
        if small.any():
            share = _random[0].integers(0, 2, numbers.shape)
            numbers = np.where(small, np.copysign(least, numbers) * share, numbers)
        largest = float(info.max)
        return self._replace(numbers=np.where(np.abs(numbers) > largest, np.copysign(np.inf, numbers), numbers))

    def unknown_where(self, unknown: Array) -> Samples:
        """The samples, except that those of elements in `unknown` are of all kinds."""
        if not np.any(unknown):
            return self
        numbers = np.broadcast_to(self.numbers, (1 + SAMPLES, *self.shape)).copy()
        if self.is_float:
            kinds: Sequence[Any] = (np.nan, np.inf, -np.inf, 0.0)
        else:
            kinds = (False, True) if self.dtype == np.bool_ else (limits(self.dtype).min, limits(self.dtype).max, 0)
        for i in range(1, 1 + SAMPLES):
            numbers[i] = np.where(unknown, np.asarray(kinds[i % len(kinds)], numbers.dtype), numbers[i])
        return self._replace(numbers=numbers)

    def map(self, function: Callable[[Array], Array]) -> Samples:
        """The samples after `function` changes each of them."""
        return self._replace(numbers=np.stack([function(sample) for sample in self.numbers]))

    def bounds(self) -> Bounds:
        """The interval of BEYOND times the samples' spread about the first, and one rounding more."""
        first = self.numbers[0]
        if not self.is_float:
            varies = (self.numbers != first).any(axis=0)
            if self.dtype == np.bool_:
                return Bounds(first & ~varies, first | varies, self.dtype)
            info = limits(self.dtype)
            low, high = (np.where(varies, end, first).astype(self.dtype) for end in (info.min, info.max))
            return Bounds(low, high, self.dtype)
        spread = BEYOND * np.nan_to_num(np.abs(self.numbers - first), nan=0, posinf=np.inf).max(axis=0)
        one = unit(self.dtype) * np.where(np.isfinite(first), np.abs(first), 0) if len(self.numbers) > 1 else 0.0
        low, high = first - spread - one, first + spread + one
        finite = np.isfinite(self.numbers)
        if finite.all():
            return Bounds(low, high, self.dtype)
        missing = np.isnan(self.numbers)
        infinite = (self.numbers == first).all(axis=0)  # or all of them one number
        nan = np.select(
            [finite.all(axis=0) | infinite, missing.all(axis=0), ~finite.any(axis=0)],
            [NEVER, ALWAYS, NOT_FINITE],
            PERHAPS,
        ).astype(np.uint8)
        low, high = np.where(nan == NEVER, low, -np.inf), np.where(nan == NEVER, high, np.inf)
        return Bounds(np.where(infinite, first, low), np.where(infinite, first, high), self.dtype, nan)


def unit(dtype: np.dtype[Any]) -> float:
    """The largest relative error of one rounding: half the distance from 1 to the next number."""
    # The reference is float64 itself, so float64 results can only be checked to within several roundings.
    return 2.0**-49 if dtype == np.float64 else float(limits(dtype).eps) / 2


def of(array: Array) -> Samples:
    """The only sample of known numbers."""
    return Samples((array.astype(np.float64) if is_float(array.dtype) else array)[None], array.dtype)


def each(
    function: Callable[..., Sequence[Array]], inputs: Sequence[Samples | None], dtype: np.dtype[Any] | None
) -> list[Samples]:
    """A function's outputs for each sample of its inputs.

    Args:
        function: takes arrays, None for an absent one.
        inputs: its inputs.
        dtype: type in the model of outputs that are float64 here; None: each output's own.

    Raises:
        Unknown: the samples' outputs have several shapes.
    """
    count = max((len(samples.numbers) for samples in inputs if samples is not None), default=1)
    made = [
        function(*(None if s is None else s.numbers[min(i, len(s.numbers) - 1)] for s in inputs)) for i in range(count)
    ]
    outputs = []
    for arrays in zip(*made, strict=True):
        if len({array.shape for array in arrays}) > 1:
            raise Unknown
        stacked = np.stack([np.asarray(array) for array in arrays])
        own = stacked.dtype if dtype is None or not is_float(stacked.dtype) else dtype
        outputs.append(Samples(stacked.astype(np.float64) if is_float(own) else stacked, own))
    return outputs

# SPDX-License-Identifier: Apache-2.0
"""Bounds of sums and extremes over axes, norms, Softmax."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.fuzz.arrays import Array, is_float, limits
from tests.fuzz.reference.bounds import (
    ALWAYS,
    NEVER,
    PERHAPS,
    Bounds,
    Unknown,
    anything,
    elementwise,
    rounded,
    unit,
    unknown_where,
)
from tests.fuzz.reference.elementwise import FUNCTION_UNITS, product_of, sum_of
from tests.fuzz.reference.moves import apply

if TYPE_CHECKING:
    from tests.fuzz.reference.evaluate import Node, Table

Axes = tuple[int, ...]
# Default epsilon of SkipSimplifiedLayerNormalization's schema; that of the other norms is 1e-5.
SKIP_EPSILON = 1e-12


def any_nan(x: Bounds, axes: Axes) -> Array | None:
    """The NaNs of a reduction along axes, which are kept: a result is NaN if one of its elements is."""
    if x.nan is None:
        return None
    own = np.where(x.nan > ALWAYS, PERHAPS, x.nan).astype(np.uint8)
    return np.asarray(own.max(axis=axes, keepdims=True, initial=NEVER), np.uint8)


def total(x: Bounds, axes: Axes) -> Bounds:
    """The sum along axes, which are kept, in any order: n terms make n - 1 roundings of partial sums."""
    terms = int(np.prod([x.shape[axis] for axis in axes], dtype=np.int64))
    low, high = (end.sum(axis=axes, keepdims=True) for end in (x.low, x.high))
    magnitude = np.maximum(np.abs(x.low), np.abs(x.high)).sum(axis=axes, keepdims=True)
    error = np.where(np.isfinite(magnitude), magnitude, 0) * max(terms, 1) * unit(x.dtype) * 1.01
    nan = any_nan(x, axes)
    missing = np.isnan(low) | np.isnan(high)
    if missing.any():
        always = missing & (x.is_exact | (np.isnan(low) & np.isnan(high)))
        own = np.where(always, ALWAYS, np.where(missing, PERHAPS, NEVER)).astype(np.uint8)
        nan = own if nan is None else np.maximum(nan, own)
        low = np.where(missing, np.where(always, 0, -np.inf), low)
        high = np.where(missing, np.where(always, 0, np.inf), high)
    made = rounded(low - error, high + error, x.dtype, nan=nan)
    # Partial sums may overflow to infinity in some orders.
    return unknown_where(made, (magnitude > float(limits(x.dtype).max) / 2) & np.isfinite(magnitude))


def _axes(node: Node, since: int) -> tuple[Axes, bool]:
    """The axes of a reduction, and whether they are kept."""
    x = node.input(0)
    given = node.axes(since)
    if given is None or not given:
        noop = node.attributes.get("noop_with_empty_axes", 0)
        given = [] if noop else list(range(len(x.shape)))
    places = tuple(sorted(axis + len(x.shape) if axis < 0 else axis for axis in given))
    if len(set(places)) < len(places):
        raise Unknown
    return places, bool(node.attributes.get("keepdims", 1))


def _without(made: Bounds, axes: Axes, keep: bool) -> Bounds:
    return made if keep else made.map(lambda array: array.squeeze(axes))


def reduce_sum(node: Node, *, mean: bool = False) -> Bounds:
    x = node.input(0)
    axes, keep = _axes(node, 13 if node.op_type == "ReduceSum" else 18)
    count = int(np.prod([x.shape[axis] for axis in axes], dtype=np.int64))
    if not is_float(x.dtype):
        if mean or not x.is_exact:  # ONNX leaves open how a mean of integers is rounded
            shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
            return _without(anything(shape, x.dtype), axes, keep)
        made = x.low.sum(axis=axes, keepdims=True, dtype=x.dtype)
        return _without(Bounds(made, made, x.dtype), axes, keep)
    if not axes:
        return x
    if mean and count == 0:  # ONNX leaves it open
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
        return _without(anything(shape, x.dtype), axes, keep)
    made_sum = total(x, axes)
    if mean:
        number = np.full((1,) * len(x.shape), float(count))
        made_sum = elementwise(np.divide, made_sum, Bounds(number, number, x.dtype), units=2)
    return _without(made_sum, axes, keep)


def reduce_extreme(node: Node, *, largest: bool) -> Bounds:
    x = node.input(0)
    axes, keep = _axes(node, 18)
    if any(x.shape[axis] == 0 for axis in axes):
        # The least or largest number since opset 20; left open before.
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
        return _without(anything(shape, x.dtype), axes, keep)
    function: Any = np.max if largest else np.min
    if x.dtype == np.bool_:
        function = np.any if largest else np.all
    low = function(x.low, axis=axes, keepdims=True)
    high = low if x.is_exact else function(x.high, axis=axes, keepdims=True)
    return _without(Bounds(low, high, x.dtype, any_nan(x, axes)), axes, keep)


def arg_max(node: Node) -> Bounds:
    x = node.input(0)
    if x.nan is not None:
        raise Unknown  # ONNX leaves open whether NaN or a number is larger
    axis = node.attributes.get("axis", 0)
    if x.shape[axis] == 0:
        raise Unknown  # there is no largest element
    if node.attributes.get("select_last_index", 0):
        place = x.shape[axis] - 1 - np.argmax(np.flip(x.low, axis), axis=axis)
    else:
        place = np.argmax(x.low, axis=axis)
    place = np.expand_dims(place, axis).astype(np.int64)
    made = Bounds(place, place, np.dtype(np.int64))
    if not x.is_exact:
        best = np.take_along_axis(x.low, place, axis)
        others = np.where(
            np.arange(x.shape[axis]).reshape(-1, *[1] * (x.low.ndim - 1 - axis % x.low.ndim)) == place, -np.inf, x.high
        )
        made = unknown_where(made, others.max(axis=axis, keepdims=True) >= best)
    if node.attributes.get("keepdims", 1):
        return made
    return made.map(lambda array: array.squeeze(axis))


def cum_sum(node: Node) -> Bounds:
    x, axis = node.input(0), node.input(1).exact().reshape(-1)[0]  # ONNX's is a scalar, ONNX Runtime's also [1]

    def along(array: Array) -> Array:
        return apply(node, [array, axis])[0]

    if not is_float(x.dtype):
        if not x.is_exact:
            raise Unknown
        sums = along(x.low)
        return Bounds(sums, sums, x.dtype)
    magnitude = along(np.maximum(np.abs(x.low), np.abs(x.high)))
    if x.nan is not None or not np.isfinite(magnitude).all() or (magnitude > float(limits(x.dtype).max) / 2).any():
        return anything(x.shape, x.dtype)
    error = magnitude * x.shape[axis] * unit(x.dtype) * 1.01
    return rounded(along(x.low) - error, along(x.high) + error, x.dtype, units=0)


def softmax(node: Node) -> Bounds:
    x = node.float(0)
    axis = node.attributes.get("axis", 1 if node.opset < 13 else -1)
    if node.opset >= 13:
        return softmax_along(x, axis)
    rows = int(np.prod(x.shape[:axis], dtype=np.int64)) if axis >= 0 else int(np.prod(x.shape[: len(x.shape) + axis]))
    flat = x.map(lambda array: array.reshape(rows, -1) if array.size else array.reshape(rows, 0))
    return softmax_along(flat, -1).map(lambda array: array.reshape(x.shape))


def softmax_along(x: Bounds, axis: int) -> Bounds:
    """e^x_i / sum e^x_j: each end of the result takes its own x at that end, and all others at the opposite one."""
    if x.low.size == 0:
        return x
    top = x.high.max(axis=axis, keepdims=True)
    finite = np.where(np.isfinite(top), top, 0)
    low, high = np.exp(x.low - finite), np.exp(x.high - finite)
    others_low = low.sum(axis=axis, keepdims=True) - low
    others_high = high.sum(axis=axis, keepdims=True) - high
    least, most = low / (low + np.maximum(others_high, 0)), high / (high + np.maximum(others_low, 0))
    # The exponent's argument is a rounded difference; a sum of n and a quotient follow.
    span = np.where(
        np.isfinite(x.low) & np.isfinite(x.high), np.maximum(np.abs(x.low - finite), np.abs(x.high - finite)), 0
    )
    units = FUNCTION_UNITS + x.shape[axis] + np.minimum(span, 1e4)
    nan = any_nan(x, (axis,))
    # If all are -inf, or one is inf, the result is a difference of infinities, NaN.
    hopeless = (x.high.max(axis=axis, keepdims=True) == -np.inf) | (x.low.max(axis=axis, keepdims=True) == np.inf)
    doubtful = (x.low.max(axis=axis, keepdims=True) == -np.inf) | (x.high.max(axis=axis, keepdims=True) == np.inf)
    if doubtful.any() or nan is not None:
        own = np.where(hopeless, ALWAYS, np.where(doubtful, PERHAPS, NEVER)).astype(np.uint8)
        nan = own if nan is None else np.maximum(own, nan)
        nan = np.broadcast_to(nan, x.shape)
        least = np.where(nan == NEVER, least, 0)
        most = np.where(nan == NEVER, most, np.where(nan == ALWAYS, 0, 1))
    made = rounded(np.nan_to_num(least), np.nan_to_num(most, nan=1.0), x.dtype, units, nan)
    # An exponential far below the others' may be flushed to 0.
    return made._replace(
        low=np.where(made.low < 1e-36, 0, made.low), high=np.maximum(made.high, 1e-36 * (made.high < 1e-36))
    )


# --- Norms ------------------------------------------------------------------------------------------------------------


def _last_axes(node: Node, x: Bounds) -> Axes:
    axis = node.attributes.get("axis", -1)
    return tuple(range(axis + len(x.shape) if axis < 0 else axis, len(x.shape)))


def _mean(x: Bounds, axes: Axes) -> Bounds:
    number = np.full((1,) * len(x.shape), float(np.prod([x.shape[axis] for axis in axes])))
    return elementwise(np.divide, total(x, axes), Bounds(number, number, x.dtype), units=2)


def _square(x: Bounds) -> Bounds:
    made = product_of(x, x)
    spans = (x.low < 0) & (x.high > 0)
    return made._replace(low=np.where(spans, 0, np.maximum(made.low, 0)))


def _inverse_root(x: Bounds, epsilon: float) -> Bounds:
    number = np.full((1,) * len(x.shape), epsilon)
    shifted = sum_of(x._replace(low=np.maximum(x.low, 0)), Bounds(number, number, x.dtype))
    # Either the reciprocal of a root, or a refined approximation of it.
    return elementwise(lambda a: 1 / np.sqrt(np.maximum(a, 0)), shifted, units=4)


def layer_norm(node: Node) -> list[Bounds | None]:
    x = node.float(0)
    if x.dtype != np.float32:
        raise Unknown  # kernels differ in how they compute 16-bit floats
    axes = _last_axes(node, x)
    mean = _mean(x, axes)
    deviation = elementwise(np.subtract, x, mean)
    variance = _mean(_square(deviation), axes)
    made = product_of(deviation, _inverse_root(variance, node.attributes.get("epsilon", 1e-5)))
    made = product_of(made, node.float(1))
    if node.has(2):
        made = sum_of(made, node.float(2))
    return [made, None, None]


def rms_norm(node: Node) -> list[Bounds | None]:
    x, scale = node.float(0), node.float(1)
    if x.dtype != np.float32 or scale.dtype != np.float32:
        raise Unknown
    return [_rms(node, x, scale, 1e-5), None]


def _rms(node: Node, x: Bounds, scale: Bounds, epsilon: float) -> Bounds:
    squares = _mean(_square(x), _last_axes(node, x))
    made = product_of(x, _inverse_root(squares, node.attributes.get("epsilon", epsilon)))
    return product_of(made, scale)


def skip_norm(node: Node) -> list[Bounds | None]:
    x, skip, gamma = node.float(0), node.float(1), node.float(2)
    if x.dtype != np.float32:
        raise Unknown
    added = sum_of(x, skip)
    if node.has(3):
        added = sum_of(added, node.float(3))
    return [_rms(node, added, gamma, SKIP_EPSILON), None, None, added]


TABLE: Table = {
    ("", "ReduceSum"): reduce_sum,
    ("", "ReduceMean"): partial(reduce_sum, mean=True),
    ("", "ReduceMax"): partial(reduce_extreme, largest=True),
    ("", "ReduceMin"): partial(reduce_extreme, largest=False),
    ("", "ArgMax"): arg_max,
    ("", "CumSum"): cum_sum,
    ("", "Softmax"): softmax,
    ("", "LayerNormalization"): layer_norm,
    ("", "SimplifiedLayerNormalization"): rms_norm,
    ("", "RMSNormalization"): rms_norm,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): skip_norm,
}

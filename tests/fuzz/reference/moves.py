# SPDX-License-Identifier: Apache-2.0
"""Bounds of operators that move elements, which move both ends alike, and of those that make tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import onnx

from tests.fuzz.arrays import Array, is_float, numpy_type
from tests.fuzz.reference.bounds import Bounds, Unknown, of, rounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fuzz.reference.evaluate import Node, Table

# As Slice's `ends` these mean the end of the axis in the slice's direction; one for each integer type.
NO_END = (2**31 - 1, 2**63 - 1)


def move(function: Callable[[Array, Node], Array]) -> Callable[[Node], Bounds]:
    return lambda node: node.input(0).map(lambda array: function(array, node))


def reshaped(array: Array, node: Node) -> Array:
    target = node.integers(1)
    if not node.attributes.get("allowzero", 0):
        target = [array.shape[i] if size == 0 else size for i, size in enumerate(target)]
    if array.size == 0 and -1 in target:
        target = [0 if size == -1 else size for size in target]
    return array.reshape(target)


def unsqueezed(array: Array, node: Node) -> Array:
    axes = node.axes()
    assert axes is not None
    return np.expand_dims(array, tuple(axes))


def squeezed(array: Array, node: Node) -> Array:
    axes = node.axes()
    if axes is not None and len({axis % max(array.ndim, 1) for axis in axes}) < len(axes):
        raise Unknown  # ONNX Runtime accepts an axis twice
    return array.squeeze() if axes is None else array.squeeze(tuple(axes))


def flattened(array: Array, node: Node) -> Array:
    axis = node.attributes.get("axis", 1)
    axis += array.ndim if axis < 0 else 0
    rows = int(np.prod(array.shape[:axis], dtype=np.int64))
    return array.reshape(rows, int(np.prod(array.shape[axis:], dtype=np.int64)))


def sliced(array: Array, node: Node) -> Array:
    if node.opset < 10:
        starts, ends = node.attributes["starts"], node.attributes["ends"]
        axes, steps = node.attributes.get("axes"), None
    else:
        starts, ends = node.integers(1), node.integers(2)
        axes = node.integers(3) if node.has(3) else None
        steps = node.integers(4) if node.has(4) else None
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise Unknown
    chosen: list[slice | Array] = [slice(None)] * array.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step == 0 or not -array.ndim <= axis < array.ndim:
            raise Unknown
        size = array.shape[axis]
        lowest, highest = (0, size) if step > 0 else (-1, size - 1)
        last = -1 - size if step < 0 and end in NO_END else end

        def place(index: int, least: int, most: int, size: int = size) -> int:
            return min(max(index + size if index < 0 else index, least), most)

        places = range(place(start, max(lowest, 0), highest), place(last, lowest, highest), step)
        array = np.take(array, np.array(places, np.int64), axis=axis)
    return array[tuple(chosen)]


def gathered(array: Array, node: Node) -> Array:
    index = node.input(1).exact()
    axis = node.attributes.get("axis", 0)
    size = array.shape[axis]
    if index.size and (index.min() < -size or index.max() >= size):
        raise Unknown
    return np.take(array, index, axis=axis)


def gathered_nd(array: Array, node: Node) -> Array:
    index = node.input(1).exact()
    batch = node.attributes.get("batch_dims", 0)
    leading = array.shape[:batch]
    batches = math.prod(leading)
    flat = array.reshape((batches, *array.shape[batch:]))
    lookups = index.reshape((batches, math.prod(index.shape[batch:-1]), index.shape[-1]))
    sizes = np.array(array.shape[batch : batch + index.shape[-1]])
    if ((lookups < -sizes) | (lookups >= sizes)).any():
        raise Unknown
    rows = [flat[i][tuple(lookups[i].T)] for i in range(flat.shape[0])]
    result = np.stack(rows) if rows else flat[:0]
    return result.reshape((*leading, *index.shape[batch:-1], *array.shape[batch + index.shape[-1] :]))


def concatenated(node: Node) -> Bounds:
    parts = [node.input(i) for i in range(node.count)]
    axis = node.attributes["axis"]
    others = {tuple(np.delete(part.shape, axis)) for part in parts}
    if len(others) > 1:
        raise Unknown  # ONNX Runtime skips empty parts of other shapes
    low = np.concatenate([part.low for part in parts], axis)
    high = low if all(part.is_exact for part in parts) else np.concatenate([part.high for part in parts], axis)
    nan = None
    if any(part.nan is not None for part in parts):
        own = [np.zeros(part.shape, np.uint8) if part.nan is None else part.nan for part in parts]
        nan = np.concatenate(own, axis)
    return Bounds(low, high, parts[0].dtype, nan)


def split(node: Node) -> list[Bounds | None]:
    x = node.input(0)
    axis = node.attributes.get("axis", 0)
    size, parts = x.shape[axis], node.outputs
    if node.opset < 13 and "split" in node.attributes:
        sizes = node.attributes["split"]
    elif node.opset >= 13 and node.has(1):
        sizes = node.integers(1)
    else:
        each = -(-size // parts)
        sizes = [min(each, size - i * each) for i in range(parts)]
    if sum(sizes) != size or min(sizes) < 0:
        raise Unknown
    ends = np.cumsum(sizes)[:-1].tolist()
    low = np.split(x.low, ends, axis)
    high = low if x.is_exact else np.split(x.high, ends, axis)
    nan = [None] * parts if x.nan is None else np.split(x.nan, ends, axis)
    return [Bounds(low[i], high[i], x.dtype, nan[i]) for i in range(parts)]


def shape_of(node: Node) -> Bounds:
    shape = node.input(0).shape
    start, end = node.attributes.get("start", 0), node.attributes.get("end")
    return of(np.array(shape[slice(start, end)], np.int64))


def range_(node: Node) -> Bounds:
    start, limit, delta = (node.input(i).exact().reshape(-1) for i in range(3))
    if delta[0] == 0:
        raise Unknown
    dtype = node.input(0).dtype
    if not is_float(dtype):
        integers = range(int(start[0]), int(limit[0]), int(delta[0]))
        if len(integers) > 1 << 20:
            raise Unknown
        return of(np.array(integers, dtype).reshape(-1))
    # The number of elements follows from the rounded quotient.
    count = max(0, int(np.ceil((limit[0] - start[0]) / delta[0])))
    if count > 1 << 20:
        raise Unknown
    numbers = np.arange(count)
    exact = start[0] + numbers * delta[0]
    # Elements may be computed by repeated addition or each by a product: up to `count` roundings of the largest.
    error = count * 2.0**-23 * np.maximum(abs(start[0]), np.abs(exact))
    return rounded(exact - error, exact + error, dtype)


def constant_of_shape(node: Node) -> Bounds:
    shape = node.integers(0)
    if int(np.prod(np.array(shape, object))) > 1 << 24:
        raise Unknown
    value = node.attributes.get("value")
    array = np.zeros(1, np.float32) if value is None else onnx.numpy_helper.to_array(value)
    return of(np.full(shape, array.reshape(-1)[0], array.dtype))


def constant(node: Node) -> Bounds:
    value = node.attributes["value"]
    array = onnx.numpy_helper.to_array(value)
    if array.dtype != numpy_type(value.data_type):
        raise Unknown
    return of(array)


def transposed(array: Array, node: Node) -> Array:
    return np.transpose(array, node.attributes.get("perm"))


def expanded(array: Array, node: Node) -> Array:
    target = node.integers(1)
    if int(np.prod(np.array(target, object))) > 1 << 24:
        raise Unknown
    return np.broadcast_to(array, np.broadcast_shapes(array.shape, tuple(target)))


TABLE: Table = {
    ("", "Identity"): lambda node: node.input(0),
    ("", "Reshape"): move(reshaped),
    ("", "Unsqueeze"): move(unsqueezed),
    ("", "Squeeze"): move(squeezed),
    ("", "Flatten"): move(flattened),
    ("", "Transpose"): move(transposed),
    ("", "Slice"): move(sliced),
    ("", "Gather"): move(gathered),
    ("", "GatherND"): move(gathered_nd),
    ("", "Expand"): move(expanded),
    ("", "Concat"): concatenated,
    ("", "Split"): split,
    ("", "Shape"): shape_of,
    ("", "Range"): range_,
    ("", "ConstantOfShape"): constant_of_shape,
    ("", "Constant"): constant,
}

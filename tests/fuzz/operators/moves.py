# SPDX-License-Identifier: Apache-2.0
"""Operators that move elements: shapes, look-ups, parts, transposes; and operators that make tensors."""

import math

import numpy as np
from onnx import TensorProto, helper

from tests.fuzz import arrays
from tests.fuzz.arrays import numpy_type
from tests.fuzz.graphs.builder import ABSENT, Builder, Shape, Value, wrapped
from tests.fuzz.operators import Operators

INT64 = TensorProto.INT64


def identity(b: Builder) -> None:
    x = b.operand("Identity", "V" if b.opset >= 14 else "T")
    b.node("Identity", [x], [(x.type, x.shape)])


def cut(b: Builder, elements: int) -> list[int]:
    """Random sizes whose product is `elements`."""
    sizes = []
    for _ in range(b.choices.below(3)):
        divisors = [n for n in range(1, 65) if elements and elements % n == 0] or [0, 1, 5]
        sizes.append(b.choices.pick(divisors))
        elements = elements // sizes[-1] if sizes[-1] else 0
    return [*sizes, elements]


def reshape(b: Builder) -> None:
    x = b.operand("Reshape")
    elements = math.prod(x.shape)
    to = cut(b, elements)
    if elements == 1 and b.choices.chance(20):
        to = []
    allow_zero = None if b.opset < 14 else b.choices.pick((None, 0, 1))
    if 0 in to and not allow_zero:
        to = [0] if x.rank and x.shape[0] == 0 else to
    result = tuple(to)
    target = list(to)
    if target and elements and b.choices.chance(50):
        target[b.choices.below(len(target))] = -1
    for axis in range(min(len(target), x.rank)):
        if not allow_zero and target[axis] == x.shape[axis] and b.choices.chance(50):
            target[axis] = 0
    b.node("Reshape", [x, b.integers(target)], [(x.type, result)], allowzero=allow_zero)


def reshape_to_a_shape(b: Builder) -> None:
    """A pattern of exports: the new shape is put together from another shape's sizes."""
    x = b.operand("Reshape", least=2)
    shape = b.node("Shape", [x], [(INT64, (x.rank,))])[0]
    axis = b.choices.below(x.rank)
    index = b.integers([axis], shape=() if b.choices.chance(60) else (1,), constant=True)
    size = b.node("Gather", [shape, index], [(INT64, index.shape)], axis=0)[0]
    if index.shape == ():
        size = unsqueezed(b, size, [0])
    rest = b.integers([-1], constant=True)
    if x.shape[axis] == 0:
        rest = b.integers([math.prod(x.shape[:axis] + x.shape[axis + 1 :])], constant=True)
    target = b.node("Concat", [size, rest], [(INT64, (2,))], axis=0)[0]
    others = math.prod(x.shape[:axis] + x.shape[axis + 1 :])
    b.node("Reshape", [x, target], [(x.type, (x.shape[axis], others))], allowzero=1 if b.opset >= 14 else None)


def unsqueezed(b: Builder, x: Value, axes: list[int]) -> Value:
    """The value with axes of size 1 inserted; `axes` are their places in the result."""
    rank = x.rank + len(axes)
    places = {axis % rank if -rank <= axis < rank else axis for axis in axes}
    rest = iter(x.shape)
    shape = tuple(1 if axis in places else next(rest, 1) for axis in range(rank))
    if b.opset < 13:
        return b.node("Unsqueeze", [x], [(x.type, shape)], axes=axes)[0]
    return b.node("Unsqueeze", [x, b.integers(axes)], [(x.type, shape)])[0]


def unsqueeze(b: Builder) -> None:
    x = b.operand("Unsqueeze")
    count = b.choices.pick((1, 1, 2))
    rank = x.rank + count
    axes = [b.choices.below(rank) for _ in range(count)]
    if len(set(axes)) < len(axes) and not b.mistake():
        axes = axes[:1]
        rank = x.rank + 1
        axes = [axes[0] % rank]
    unsqueezed(b, x, [wrapped(b.choices, axis, rank) for axis in axes])


def squeeze(b: Builder) -> None:
    x = b.operand("Squeeze")
    ones = [axis for axis, size in enumerate(x.shape) if size == 1]
    if not ones and x.rank < 6:
        x = unsqueezed(b, x, [b.choices.below(x.rank + 1)])
        ones = [axis for axis, size in enumerate(x.shape) if size == 1]
    if b.choices.chance(25) or not ones:
        b.node("Squeeze", [x], [(x.type, tuple(size for size in x.shape if size != 1))])
        return
    axes = ones if b.choices.chance(30) else [b.choices.pick(ones)]
    shape = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    axes = [wrapped(b.choices, axis, x.rank) if b.opset >= 11 else axis for axis in axes]
    if b.opset < 13:
        b.node("Squeeze", [x], [(x.type, shape)], axes=axes)
    else:
        b.node("Squeeze", [x, b.integers(axes)], [(x.type, shape)])


def flatten(b: Builder) -> None:
    x = b.operand("Flatten")
    axis = b.choices.below(x.rank + 1)
    shape = (math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    given: int | None = axis if axis == x.rank or b.opset < 11 else wrapped(b.choices, axis, x.rank)
    b.node("Flatten", [x], [(x.type, shape)], axis=None if axis == 1 and b.choices.chance(50) else given)


def transpose(b: Builder) -> None:
    x = b.operand("Transpose")
    order = sorted(range(x.rank), key=lambda _: b.choices.below(256))
    given: list[int] | None = order
    if b.choices.chance(20):
        order, given = list(range(x.rank))[::-1], None
    if given and b.mistake():
        given = [b.choices.between(-2, x.rank) for _ in given]
    b.node("Transpose", [x], [(x.type, tuple(x.shape[axis] for axis in order))], perm=given)


def tile(b: Builder) -> None:
    x = b.operand("Tile")
    repeats = [b.choices.pick((1, 2, 3, 0)) for _ in x.shape]
    b.node("Tile", [x, b.integers(repeats)], [(x.type, tuple(n * r for n, r in zip(x.shape, repeats, strict=True)))])


def pad(b: Builder) -> None:
    x = b.operand("Pad")
    modes = ("constant", "constant", None, "reflect", "edge") + ("wrap",) * (b.opset >= 19)
    mode = b.choices.pick(modes)
    most = [4 if mode in ("constant", None, "edge") else max(size - 1, 0) for size in x.shape]
    ends = [b.choices.pick((0, 0, 1, most[i % x.rank])) for i in range(2 * x.rank)] if x.rank else []
    ends = [min(end, most[i % x.rank]) for i, end in enumerate(ends)]
    if mode in ("constant", None) and b.choices.chance(20):
        ends = [-1 if end == 1 and size > 1 else end for end, size in zip(ends, x.shape * 2, strict=True)]
    sizes = (size + head + tail for size, head, tail in zip(x.shape, ends, ends[x.rank :], strict=False))
    value = b.like(x.type, ()) if b.choices.chance(40) else ABSENT
    axes = list(range(x.rank))
    if b.opset >= 18 and b.choices.chance(30):
        axes = axes[::-1]
        ends = [*ends[: x.rank][::-1], *ends[x.rank :][::-1]]
        given = [b.integers(ends), value, b.integers([wrapped(b.choices, axis, x.rank) for axis in axes])]
    else:
        given = [b.integers(ends), value]
    b.node("Pad", [x, *given], [(x.type, tuple(sizes))], mode=mode)


def resize(b: Builder) -> None:
    x = b.source(
        TensorProto.FLOAT,
        (b.choices.pick((1, 2)), b.choices.pick((1, 3)), b.choices.pick((1, 4)), b.choices.pick((5, 3))),
    )
    factors = [1, 1, b.choices.pick((2, 1, 3)), b.choices.pick((2, 1, 3))]
    shape = tuple(size * factor for size, factor in zip(x.shape, factors, strict=True))
    given = [ABSENT, b.source(TensorProto.FLOAT, (4,), constant=True, given=factors)]
    if b.choices.chance(40):
        given = [ABSENT, ABSENT, b.integers(list(shape))]
    modes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if b.choices.chance(30):
        modes = {"mode": "linear", "coordinate_transformation_mode": b.choices.pick(("half_pixel", "align_corners"))}
    b.node("Resize", [x, *given], [(TensorProto.FLOAT, shape)], **modes)


def trilu(b: Builder) -> None:
    x = b.operand("Trilu", least=2)
    diagonal = b.integers([b.choices.between(-9, 9)], shape=()) if b.choices.chance(70) else ABSENT
    b.node("Trilu", [x, diagonal], [(x.type, x.shape)], upper=b.choices.pick((None, 0, 1)))


def gather_elements(b: Builder) -> None:
    x = b.operand("GatherElements", least=1)
    axis = b.choices.below(x.rank)
    shape = tuple(b.choices.below(size + 1) for size in x.shape)
    if x.shape[axis]:
        shape = (*shape[:axis], b.choices.between(0, 5), *shape[axis + 1 :])
    indices = [b.choices.between(-x.shape[axis], x.shape[axis] - 1) for _ in range(math.prod(shape))]
    place = wrapped(b.choices, axis, x.rank)
    b.node("GatherElements", [x, b.integers(indices, shape=shape)], [(x.type, shape)], axis=place)


def scatter_elements(b: Builder) -> None:
    x = b.operand("ScatterElements", least=1)
    axis = b.choices.below(x.rank)
    # Places along the axis that differ: of two updates of a place ONNX does not say which remains.
    places = sorted(range(x.shape[axis]), key=lambda _: b.choices.below(256))[: b.choices.between(0, 3)]
    shape = (*x.shape[:axis], len(places), *x.shape[axis + 1 :])
    lines = np.reshape(np.array(places, np.int64), [len(places) if a == axis else 1 for a in range(x.rank)])
    indices = b.integers(np.broadcast_to(lines, shape).ravel().tolist(), shape=shape)
    place = wrapped(b.choices, axis, x.rank)
    b.node("ScatterElements", [x, indices, b.like(x.type, shape)], [(x.type, x.shape)], axis=place)


def top_k(b: Builder) -> None:
    """Integers, in float as well: ONNX does not say where NaN comes."""
    shape = b.shape(1)
    x = b.integers([b.choices.between(-9, 9) for _ in range(math.prod(shape))], shape=shape)
    if b.choices.chance(60):
        x = b.node("Cast", [x], [(TensorProto.FLOAT, shape)], to=TensorProto.FLOAT)[0]
    axis = b.choices.below(len(shape))
    made = (*shape[:axis], b.choices.between(0, shape[axis]), *shape[axis + 1 :])
    attributes = {"axis": wrapped(b.choices, axis, len(shape)), "largest": b.choices.pick((None, 0, 1))}
    b.node("TopK", [x, b.integers([made[axis]])], [(x.type, made), (INT64, made)], **attributes)


def scatter_nd(b: Builder) -> None:
    x = b.operand("ScatterND", least=1)
    axes = b.choices.between(1, x.rank)
    count = b.choices.between(0, 3) if 0 not in x.shape[:axes] else 0
    # Places of one axis that differ: of two updates of a place ONNX does not say which remains.
    first = sorted(range(x.shape[0]), key=lambda _: b.choices.below(256))[:count]
    rows = [[place, *(b.choices.below(size) for size in x.shape[1:axes])] for place in first]
    indices = b.integers([index for row in rows for index in row], shape=(len(rows), axes))
    updates = b.like(x.type, (len(rows), *x.shape[axes:]))
    b.node("ScatterND", [x, indices, updates], [(x.type, x.shape)])


def concat(b: Builder) -> None:
    x = b.operand("Concat", least=1)
    axis = b.choices.below(x.rank)
    values, size = [x], x.shape[axis]
    for _ in range(b.choices.pick((1, 1, 2, 0, 3))):
        other = list(x.shape)
        other[axis] = b.choices.pick((1, 2, 3, x.shape[axis], 0))
        if b.mistake():
            other = list(b.shape(1))
        values.append(b.like(x.type, tuple(other)))
        size += other[axis] if axis < len(other) else 0
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    given = wrapped(b.choices, axis, x.rank) if b.opset >= 11 else axis
    b.node("Concat", values, [(x.type, shape)], axis=given if not b.mistake() else 9)


def split(b: Builder) -> None:
    x = b.operand("Split", least=1)
    axis = b.choices.below(x.rank)
    size = x.shape[axis]
    parts = min(b.choices.pick((2, 3, 1, 4)), max(size, 1))
    given = b.choices.chance(60) or size % parts != 0
    if given and parts > 1:
        cuts = sorted(b.choices.below(size + 1) for _ in range(parts - 1))
        sizes = np.diff([0, *cuts, size]).tolist()
    else:
        sizes = [size // parts] * parts
        given = given and parts == 1
    outputs = [(x.type, (*x.shape[:axis], part, *x.shape[axis + 1 :])) for part in sizes]
    unused = b.choices.below(parts) if parts > 1 and b.choices.chance(10) else -1
    made = [None if i == unused else output for i, output in enumerate(outputs)]
    place = wrapped(b.choices, axis, x.rank) if b.opset >= 11 else axis
    if b.opset < 13:
        b.node("Split", [x], made, axis=place, split=sizes if given else None)
    elif given:
        b.node("Split", [x, b.integers(sizes)], made, axis=place)
    else:
        b.node("Split", [x], made, axis=place, num_outputs=parts if b.opset >= 18 else None)


def slice_(b: Builder) -> None:
    x = b.operand("Slice", least=1)
    axes = sorted({b.choices.below(x.rank) for _ in range(b.choices.pick((1, 2)))})
    starts: list[int] = []
    ends: list[int] = []
    steps: list[int] = []
    shape = list(x.shape)
    for axis in axes:
        size = x.shape[axis]
        step = b.choices.pick((1, 1, 2, -1, 3, -2, 100, -(2**63), 2**63 - 1)) if b.opset >= 10 else 1
        ends_of = (size, size - 1, 2**63 - 1, -1, 0, -size - 1, -(2**63), size // 2, size + 5)
        starts_of = (0, 1, -1, size, -size, size // 2, 2**63 - 1, -(2**63), size + 5)
        start, end = b.choices.pick(starts_of), b.choices.pick(ends_of)
        if step < 0:
            start, end = b.choices.pick((-1, 2**63 - 1, size)), b.choices.pick((-(2**63), 0, -size - 1, 1, 2**63 - 1))
        if b.choices.chance(60):  # a plain slice, with step 1
            start, end, step = b.choices.below(max(size, 1)), size, 1
        starts, ends, steps = [*starts, start], [*ends, end], [*steps, step]
        shape[axis] = len(range(*_places(size, start, end, step)))
    result = [(x.type, tuple(shape))]
    places = [wrapped(b.choices, axis, x.rank) for axis in axes]
    whole = axes == list(range(len(axes))) and b.choices.chance(30)
    if b.opset < 10:
        b.node("Slice", [x], result, starts=starts, ends=ends, axes=None if whole else axes)
        return
    kind = b.choices.pick((INT64, INT64, TensorProto.INT32))
    given = [b.integers(starts, kind), b.integers(ends, kind), ABSENT if whole else b.integers(places, kind)]
    if any(step != 1 for step in steps) or b.choices.chance(40):
        given.append(b.integers(steps, kind))
    b.node("Slice", [x, *given], result)


def _places(size: int, start: int, end: int, step: int) -> tuple[int, int, int]:
    """Arguments of Python's range for the places that ONNX's Slice takes."""

    def place(index: int, lowest: int, highest: int) -> int:
        return min(max(index + size if index < 0 else index, lowest), highest)

    if step > 0:
        return place(start, 0, size), place(end, 0, size), step
    return place(start, 0, size - 1), place(end, -1, size - 1), step


def shape_of(b: Builder) -> None:
    x = b.operand("Shape")
    start = end = None
    if b.opset >= 15 and b.choices.chance(50):
        start = b.choices.pick((0, 1, -1, -2, 9, -9))
        end = b.choices.pick((None, 1, -1, 9, 2, -9))
    sizes = x.shape[slice(start, end)]
    value = b.node("Shape", [x], [(INT64, (len(sizes),))], start=start, end=end)[0]
    if sizes and b.choices.chance(40):  # read as a number
        b.node("Cast", [value], [(TensorProto.FLOAT, value.shape)], to=TensorProto.FLOAT)


def indices(b: Builder, shape: Shape, size: int, kinds: tuple[int, ...] = (INT64, INT64, TensorProto.INT32)) -> Value:
    """Random indices of an axis of size `size`, sometimes counted from the end."""
    lowest = -size if b.choices.chance(40) else 0
    numbers = [b.choices.between(lowest, max(size - 1, lowest)) for _ in range(min(math.prod(shape), 8))]
    count = math.prod(shape)
    return b.integers((numbers * (count // 8 + 1))[:count], b.choices.pick(kinds), shape=shape)


def gather(b: Builder) -> None:
    x = b.operand("Gather", least=1, fits=lambda v: math.prod(v.shape) > 0)
    axis = b.choices.below(x.rank)
    shape = b.choices.pick(((), (1,), (3,), (2, 2), (1, 1), (0,), (2, 1, 3)))
    index = indices(b, shape, x.shape[axis])
    result = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    if math.prod(result) > 40_000:
        return
    b.node("Gather", [x, index], [(x.type, result)], axis=wrapped(b.choices, axis, x.rank))


def gather_nd(b: Builder) -> None:
    x = b.operand("GatherND", least=1, fits=lambda v: math.prod(v.shape) > 0)
    batch = b.choices.below(min(x.rank, 3)) if b.opset >= 12 else 0
    depth = b.choices.between(1, x.rank - batch)
    lookups = b.choices.pick(((), (2,), (1,), (2, 3), (0,)))
    shape = (*x.shape[:batch], *lookups, depth)
    smallest = min(x.shape[batch : batch + depth])
    index = indices(b, shape, smallest, (INT64,))
    result = (*shape[:-1], *x.shape[batch + depth :])
    if math.prod(result) > 40_000:
        return
    b.node("GatherND", [x, index], [(x.type, result)], batch_dims=batch or None)


def range_(b: Builder) -> None:
    kind = b.choices.pick((INT64, TensorProto.FLOAT, TensorProto.INT32, TensorProto.DOUBLE, TensorProto.INT16))
    start, delta = b.choices.between(-3, 3), b.choices.pick((1, 2, -1, 3, -7))
    limit = start + delta * b.choices.pick((1, 5, 40, 0, -2)) + b.choices.between(-1, 1)
    numbers: list[float] = [start, limit, delta]
    if kind in arrays.FLOATS and b.choices.chance(50):
        numbers = [number * 0.3 for number in numbers]
    if b.mistake(30):
        wrong = (2**62, -(2**62), 0) if kind == INT64 else (2**31 - 1, -(2**31), 0)
        wrong = wrong if kind in (INT64, TensorProto.INT32) else (0, 1, 1)
        numbers[b.choices.below(3)] = b.choices.pick(wrong)
    dtype = numpy_type(kind)
    first, last, step = (dtype.type(number) for number in numbers)
    count = 0 if step == 0 else max(0, math.ceil((float(last) - float(first)) / float(step)))
    shape: Shape = () if not b.choices.chance(15) else (1,)
    inputs = [b.source(kind, shape, given=[number.item()]) for number in (first, last, step)]
    b.node("Range", inputs, [(kind, (min(count, 1 << 40),))])


def constant_of_shape(b: Builder) -> None:
    shape = b.shape()
    target = list(shape)
    if b.mistake():
        target = [b.choices.pick((2**31, 2**40, -1, 2)) for _ in target]
    kind = b.type_for("ConstantOfShape", "T2")
    value = None
    if kind != TensorProto.FLOAT or b.choices.chance(50):
        if kind not in arrays.FED:
            kind = TensorProto.INT32
        size = 1 if not b.mistake() else b.choices.pick((0, 2))
        number = arrays.Source(kind, (size,), b.choices.pick(b.kinds), b.choices.seed()).array()
        value = helper.make_tensor("value", kind, [size], number.tobytes(), raw=True)
    b.node("ConstantOfShape", [b.integers(target)], [(kind, shape)], value=value)


OPERATORS: Operators = [
    (5, "Tile", 7, tile),
    (6, "Pad", 13, pad),
    (4, "Resize", 13, resize),
    (5, "Trilu", 14, trilu),
    (5, "GatherElements", 11, gather_elements),
    (5, "ScatterElements", 11, scatter_elements),
    (5, "ScatterND", 11, scatter_nd),
    (5, "TopK", 11, top_k),
    (5, "Identity", 7, identity),
    (14, "Reshape", 7, reshape),
    (8, "Shape, Gather, Reshape", 7, reshape_to_a_shape),
    (10, "Unsqueeze", 7, unsqueeze),
    (10, "Squeeze", 7, squeeze),
    (7, "Flatten", 7, flatten),
    (16, "Transpose", 7, transpose),
    (12, "Concat", 7, concat),
    (12, "Split", 7, split),
    (16, "Slice", 7, slice_),
    (8, "Shape", 7, shape_of),
    (12, "Gather", 7, gather),
    (10, "GatherND", 11, gather_nd),
    (8, "Range", 11, range_),
    (7, "ConstantOfShape", 9, constant_of_shape),
]

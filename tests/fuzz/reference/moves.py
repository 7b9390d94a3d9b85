# SPDX-License-Identifier: Apache-2.0
"""Bounds of operators that move elements, which move both ends alike, and of those that make tensors.

onnx's reference implementation, in NumPy, moves them: its answer is ONNX's, independent of ONNX Runtime's kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.fuzz.arrays import is_float
from tests.fuzz.reference.bounds import Bounds, Unknown, of, rounded
from tests.one_node import by_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fuzz.arrays import Array
    from tests.fuzz.reference.evaluate import Node, Table

# As Slice's `ends` these mean the end of the axis in the slice's direction; one for each integer type.
NO_END = (2**31 - 1, 2**63 - 1)
MOST_NUMBERS = 1 << 20  # of a Range


def apply(node: Node, arrays: Sequence[Array | None]) -> list[Array]:
    """The node's outputs for these inputs. Raises Unknown for inputs that onnx's implementation does not take."""
    attributes = {name: value for name, value in node.attributes.items() if value != []}  # a scalar's perm
    try:
        return by_reference(node.op_type, arrays, node.outputs, opset=node.opset, **attributes)
    except Exception as error:
        raise Unknown from error


def moved(node: Node) -> list[Bounds | None]:
    """The elements of the first input, of Concat's all inputs; other inputs say where they go."""
    count = node.count if node.op_type == "Concat" else 1
    data = [node.input(i) for i in range(count)]
    places = [node.input(i).exact() if node.has(i) else None for i in range(count, node.count)]
    if node.op_type == "Slice" and node.opset >= 10:
        places = _as_numpy_slices(places)
    low = apply(node, [*(value.low for value in data), *places])
    high = low if all(value.is_exact for value in data) else apply(node, [*(value.high for value in data), *places])
    nan: Sequence[Array | None] = [None] * len(low)
    if any(value.nan is not None for value in data):
        kinds = (np.zeros(value.shape, np.uint8) if value.nan is None else value.nan for value in data)
        nan = apply(node, [*kinds, *places])
    return [Bounds(low[i], high[i], data[0].dtype, nan[i]) for i in range(len(low))]


def _as_numpy_slices(places: Sequence[Array | None]) -> list[Array | None]:
    """A slice's starts, ends, axes and steps, as NumPy has its ends. Raises Unknown for lists of several lengths."""
    starts, ends, axes, steps = [*places, None, None][:4]
    if ends is None or len({array.size for array in places if array is not None}) > 1:
        raise Unknown
    if steps is not None:
        ends = np.where((steps < 0) & np.isin(ends, NO_END), np.iinfo(ends.dtype).min, ends)
    return [starts, ends, axes, steps]


def unsqueezed(node: Node) -> Bounds:
    axes = node.axes()  # in any order, which onnx's implementation does not take
    assert axes is not None
    return node.input(0).map(lambda array: np.expand_dims(array, tuple(axes)))


def made(node: Node) -> Bounds:
    """A tensor that is made from known numbers."""
    return of(apply(node, [node.input(i).exact() for i in range(node.count)])[0])


def shape_of(node: Node) -> Bounds:
    return of(apply(node, [node.input(0).low])[0])


def range_(node: Node) -> Bounds:
    start, limit, delta = (node.input(i).exact().reshape(-1)[0] for i in range(3))
    dtype = node.input(0).dtype
    if delta == 0 or abs((float(limit) - float(start)) / float(delta)) > MOST_NUMBERS:
        raise Unknown
    if not is_float(dtype):
        return of(np.array(range(int(start), int(limit), int(delta)), dtype).reshape(-1))
    # The number of elements follows from the rounded quotient.
    count = max(0, int(np.ceil((limit - start) / delta)))
    exact = start + np.arange(count) * delta
    # Elements may be computed by repeated addition or each by a product: up to `count` roundings of the largest.
    error = count * 2.0**-23 * np.maximum(abs(start), np.abs(exact))
    return rounded(exact - error, exact + error, dtype)


_MOVES = ("Reshape", "Squeeze", "Flatten", "Transpose", "Slice", "Gather", "GatherND", "Expand", "Concat")
TABLE: Table = {
    **{("", name): moved for name in (*_MOVES, "Split")},
    ("", "Identity"): lambda node: node.input(0),
    ("", "Unsqueeze"): unsqueezed,
    ("", "Shape"): shape_of,
    ("", "Range"): range_,
    ("", "ConstantOfShape"): made,
    ("", "Constant"): made,
}

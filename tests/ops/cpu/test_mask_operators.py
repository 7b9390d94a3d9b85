# SPDX-License-Identifier: Apache-2.0
"""Operators that make masks, positions and shapes, and move elements, against onnx's reference evaluator.

Sizes, types and extremes beside those of ONNX's backend suite (tests/ops/test_onnx_backend.py).
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.one_node import by_reference
from tests.ops import device
from tests.ops.cpu import within_bounds
from tests.ops.cpu.test_standard_operators import ort
from tests.ops.device import NAMES

RNG = np.random.default_rng(0)
LOWEST, HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Numbers of few values, so that some are equal; booleans are half of them true."""
    return np.asarray(RNG.integers(-3, 4, shape) if dtype != np.bool_ else RNG.random(shape) < 0.5, dtype)


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def run(op_type: str, inputs: list[Any], **keywords: Any) -> list[Any]:
    return device.run(op_type, inputs, domain="", **keywords)


def check(op_type: str, inputs: list[np.ndarray | None], outputs: int = 1, **attributes: Any) -> None:
    expected = by_reference(op_type, inputs, outputs, **attributes)
    names = tuple(NAMES[x.dtype] for x in expected)
    found = run(op_type, inputs, outputs=names, **attributes)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)


# Pairs of shapes: alike, scalars, one of an axis, outer axes only, both expanded, empty, more than a task's elements.
PAIRS = [
    ((2, 3, 5), (2, 3, 5)),
    ((2, 3, 5), ()),
    ((1,), (4, 1)),
    ((2, 1, 5), (3, 1)),
    ((3, 1, 1, 1), (1, 1, 4, 7)),
    ((1, 1, 6), (2, 5, 1)),
    ((0, 3), (1, 3)),
    ((2, 1, 0), (1, 3, 1)),
    ((3, 1, 7001), (2, 7001)),
]
NUMBERS = [np.float32, np.int64, np.int32]
COMPARISONS = ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"]


@pytest.mark.parametrize("shapes", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("op_type", COMPARISONS)
def test_comparisons_equal_reference(op_type: str, dtype: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    check(op_type, [array(*shape, dtype=dtype) for shape in shapes])


@pytest.mark.parametrize("shapes", PAIRS, ids=str)
def test_equality_of_booleans_equals_reference(shapes: tuple[tuple[int, ...], ...]) -> None:
    check("Equal", [array(*shape, dtype=np.bool_) for shape in shapes])


@pytest.mark.parametrize("op_type", COMPARISONS)
def test_comparisons_of_extremes_equal_numpy(op_type: str) -> None:
    check(op_type, [integers(LOWEST, HIGHEST, -1, 0), integers(HIGHEST, LOWEST, 0, 0)])
    check(
        op_type, [np.array([np.nan, np.inf, -np.inf, -0.0], np.float32), np.array([np.nan, 1, -np.inf, 0], np.float32)]
    )


@pytest.mark.parametrize("shapes", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul", "Min", "Max"])
def test_arithmetic_equals_reference(op_type: str, dtype: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    check(op_type, [array(*shape, dtype=dtype) for shape in shapes])


def test_integers_wrap_around() -> None:
    with np.errstate(over="ignore"):
        check("Add", [integers(HIGHEST, LOWEST), integers(1, -1)])
        check("Sub", [integers(LOWEST, 0), integers(1, LOWEST)])
        check("Mul", [integers(HIGHEST, LOWEST), integers(3, -1)])
    # Processors trap this quotient; numpy wraps around, too.
    (result,) = run("Div", [integers(LOWEST, -7), integers(-1, -1)], outputs=("int64",))
    np.testing.assert_array_equal(result, integers(LOWEST, 7))
    check("Div", [integers(7, -7, HIGHEST, LOWEST), integers(2, 2, LOWEST, HIGHEST)])


@pytest.mark.parametrize("exponent", [2.0, 0.5, -1.0, 3.0])
def test_pow_equals_reference(exponent: float) -> None:
    within_bounds.check("Pow", [RNG.random((3, 5), np.float32), np.array(exponent, np.float32)])
    check("Pow", [np.array([2, 3], np.float32), np.array([2, 2], np.float32)])


# Every size of element; the shapes of the condition and of the two tensors.
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int64, np.bool_, np.int8])
@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3, 4), (2, 3, 4), (2, 3, 4)),
        ((2, 1, 4), (), ()),
        ((1, 3, 1), (2, 1, 4), ()),
        ((), (3,), (2, 1)),
        ((2, 1, 1), (1, 1, 5), (1, 3, 1)),
        ((0,), (1,), ()),
        ((1, 40, 1000), (), (1000,)),
    ],
    ids=str,
)
def test_operator_where_equals_reference(dtype: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    condition, x, y = shapes
    inputs = [array(*condition, dtype=np.bool_), array(*x, dtype=dtype), array(*y, dtype=dtype)]
    (result,) = run("Where", inputs, outputs=(NAMES[np.dtype(dtype)],))
    np.testing.assert_array_equal(result, np.where(*inputs), strict=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.bool_])
@pytest.mark.parametrize(
    ("shape", "target"),
    [((), (2, 3)), ((3, 1), (2, 3, 4)), ((2, 1, 5), (3, 1)), ((1, 4), (0, 4)), ((5,), ()), ((1, 1, 700), (2, 30, 700))],
    ids=str,
)
def test_expand_equals_reference(dtype: Any, shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    check("Expand", [array(*shape, dtype=dtype), integers(*target)])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.int8])
@pytest.mark.parametrize(
    ("shape", "permutation"),
    [
        ((2, 3, 4, 5), (0, 2, 1, 3)),
        ((2, 37, 41), (0, 2, 1)),
        ((33, 50), (1, 0)),
        ((300, 170), (1, 0)),
        ((2, 3, 4, 5), (3, 1, 0, 2)),
        ((2, 3, 4, 5), (2, 3, 0, 1)),
        ((1, 5, 1, 4), (2, 3, 0, 1)),
        ((2, 3, 4, 1, 2), (4, 3, 2, 1, 0)),
        ((6, 90, 3, 90), (0, 2, 3, 1)),
        ((4,), (0,)),
        ((), ()),
        ((1, 1), (1, 0)),
        ((0, 3), (1, 0)),
    ],
    ids=str,
)
def test_transpose_equals_reference(dtype: Any, shape: tuple[int, ...], permutation: tuple[int, ...]) -> None:
    x = (np.arange(np.prod(shape)) % 113).astype(dtype).reshape(shape)
    (result,) = run("Transpose", [x], outputs=(NAMES[x.dtype],), perm=list(permutation))
    np.testing.assert_array_equal(result, x.transpose(permutation), strict=True)


@pytest.mark.parametrize(
    ("starts", "ends", "axes", "steps"),
    [
        ([1], [3], None, None),
        ([1, 0], [HIGHEST, 2], [1, 2], None),
        ([-2], [-1], [-1], None),
        ([LOWEST], [HIGHEST], [2], [1]),
        ([3], [1], [1], [1]),
        ([0], [6], [2], [2]),
        ([-1], [LOWEST], [2], [-1]),
        ([HIGHEST], [0], [2], [-2]),
        ([5, 3], [0, 0], [2, 1], [-3, -1]),
        ([0], [6], [2], [HIGHEST]),
        ([-1], [LOWEST], [2], [LOWEST]),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
def test_slice_equals_reference(
    dtype: Any, starts: list[int], ends: list[int], axes: list[int] | None, steps: list[int] | None
) -> None:
    x = array(3, 4, 6, dtype=dtype)
    given = [None if values is None else integers(*values) for values in (starts, ends, axes, steps)]
    expected = [slice(None)] * x.ndim
    for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
        # Python's slices take no lowest number as their end: None is before the first element.
        step = 1 if steps is None else steps[i]
        expected[i if axes is None else axes[i]] = slice(start, None if end == LOWEST else end, step)
    (result,) = run("Slice", [x, *given], outputs=(NAMES[x.dtype],))
    np.testing.assert_array_equal(result, x[tuple(expected)], strict=True)


@pytest.mark.parametrize("step", [-1, -2, LOWEST])
@pytest.mark.parametrize("start", [HIGHEST, 2**31 - 1, 5, -1, -7, LOWEST])
@pytest.mark.parametrize("end", [HIGHEST, HIGHEST - 1, 2**31 - 1, 2**31 - 2, 4, 0, -3, -7, -(2**31), LOWEST])
def test_slice_backwards_equals_reference(start: int, end: int, step: int) -> None:
    """As in ONNX Runtime, which does not take the largest number of either type for an end."""
    inputs = [array(6, 3), integers(start), integers(end), integers(0), integers(step)]
    (expected,) = ort("Slice", inputs, ("float",), "")
    (result,) = run("Slice", inputs)
    np.testing.assert_array_equal(result, expected, strict=True)
    if all(-(2**31) <= number < 2**31 for number in (start, end, step)):
        (result,) = run("Slice", [inputs[0], *(x.astype(np.int32) for x in inputs[1:])])
        np.testing.assert_array_equal(result, expected, strict=True)


@pytest.mark.parametrize(
    "numbers", [(LOWEST, HIGHEST, 1), (HIGHEST, LOWEST, 1), (1, HIGHEST, HIGHEST), (-2, LOWEST, 2)]
)
def test_slice_forwards_equals_reference(numbers: tuple[int, int, int]) -> None:
    start, end, step = numbers
    inputs = [array(6, 3), integers(start), integers(end), integers(0), integers(step)]
    (expected,) = ort("Slice", inputs, ("float",), "")
    (result,) = run("Slice", inputs)
    np.testing.assert_array_equal(result, expected, strict=True)


def test_large_parts_are_joined_and_cut() -> None:
    """Lines of a copy that is done in pieces of 256 KB by all threads begin and end within a piece."""
    parts = [RNG.standard_normal((3, size, 1001), np.float32) for size in (40, 1, 199)]
    (joined,) = run("Concat", parts, axis=1)
    np.testing.assert_array_equal(joined, np.concatenate(parts, 1))
    cut = run("Split", [joined, integers(40, 1, 199)], outputs=("float",) * 3, axis=1)
    for ours, theirs in zip(cut, parts, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    (flat,) = run("Reshape", [joined, integers(-1)])
    np.testing.assert_array_equal(flat, joined.ravel())


def test_slice_of_nothing_is_empty() -> None:
    for step in (1, -1):
        (result,) = run("Slice", [array(3, 0), integers(0), integers(5), integers(1), integers(step)])
        assert result.shape == (3, 0)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("numbers", [(0, 7, 1), (3, 10, 4), (5, -4, -2), (5, 5, 1), (5, 4, 1), (-2, 3, 2)])
def test_range_equals_reference(dtype: Any, numbers: tuple[int, int, int]) -> None:
    check("Range", [np.array(number, dtype) for number in numbers])


def test_range_of_extremes_equals_numpy() -> None:
    for start, limit, delta in [(HIGHEST - 3, HIGHEST, 1), (LOWEST, HIGHEST, 2**62), (HIGHEST, LOWEST, LOWEST)]:
        found = run("Range", [np.array(n) for n in (start, limit, delta)], outputs=("int64",))
        np.testing.assert_array_equal(found[0], list(range(start, limit, delta)))
    check("Range", [np.array(x, np.float32) for x in (0.5, 2.25, 0.25)])


@pytest.mark.parametrize(
    "value", [np.array([7], np.int64), np.array([True]), np.array([-1.5], np.float32), np.array([3], np.int32)]
)
def test_constant_of_shape_equals_reference(value: np.ndarray) -> None:
    name = NAMES[value.dtype]
    for shape in [(2, 3), (), (0, 2), (30, 700)]:
        # The attribute `value` comes as a constant input.
        (result,) = run("ConstantOfShape", [integers(*shape), value], outputs=(name,), constants=(1,))
        np.testing.assert_array_equal(result, np.full(shape, value[0]), strict=True)
    check("ConstantOfShape", [integers(2, 2)])  # without a value: 0.0


def test_squeeze_without_axes_takes_all_of_one_element() -> None:
    check("Squeeze", [array(1, 3, 1, 4)])


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [(0,), (-1,), (1, 2), (0, 2), (0, 1, 2), None], ids=str)
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMax", "ReduceMin"])
def test_reduce_equals_reference(op_type: str, dtype: Any, axes: tuple[int, ...] | None, keepdims: int) -> None:
    given = [] if axes is None else [integers(*axes)]
    check(op_type, [array(3, 4, 5, dtype=dtype), *given], keepdims=keepdims)  # sums of small integers are exact


def test_reductions_of_nothing_equal_reference() -> None:
    check("ReduceSum", [array(3, 0), integers(1)])
    check("ReduceSum", [array(3, 2), integers()], noop_with_empty_axes=1)


CASTS = ["float", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"]
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@pytest.mark.parametrize("source", CASTS)
@pytest.mark.parametrize("target", CASTS)
def test_cast_equals_reference(source: str, target: str) -> None:
    numbers = [0, 1, 3, 77, 100, 1.00390625, 1.01171875]
    if not {"int8", "uint8"} & {source, target}:
        numbers += [-1, 300, 1000.5, 30000]
    x = np.array(numbers, np.float32).astype(DTYPES[source])
    # numpy rounds f32 to nearest even and to integers towards zero, as ONNX asks.
    (result,) = run("Cast", [x], outputs=(target,))
    expected = x if source == target else x.astype(np.float32).astype(DTYPES[target])
    np.testing.assert_array_equal(result, expected, strict=True)


def test_cast_of_extremes_gives_documented_numbers() -> None:
    def cast(x: Any, dtype: Any, target: str) -> Any:
        return run("Cast", [np.array(x, dtype)], outputs=(target,))[0]

    lost = [np.nan, np.inf, -np.inf, 2.0**63, -(2.0**64)]
    np.testing.assert_array_equal(cast(lost, np.float32, "int64"), [LOWEST] * 5)
    lowest = np.iinfo(np.int32).min
    np.testing.assert_array_equal(cast([2.0**31, -(2.0**31), 2.0**31 - 128], np.float32, "int32"),
                                  [lowest, lowest, 2**31 - 128])  # fmt: skip
    np.testing.assert_array_equal(cast([HIGHEST, LOWEST, 2**32 + 5], np.int64, "int32"), [-1, 0, 5])
    np.testing.assert_array_equal(cast([HIGHEST, LOWEST, 0, 2**40], np.int64, "bool"), [True, True, False, True])
    np.testing.assert_array_equal(cast([np.nan, -0.0, 1e-45], np.float32, "bool"), [True, False, True])
    np.testing.assert_array_equal(
        cast([HIGHEST, LOWEST], np.int64, "float"), np.array([2.0**63, -(2.0**63)], np.float32)
    )


X, COUNTS = array(2, 3), array(2, 3, dtype=np.int64)
YES = array(2, 3, dtype=np.bool_)


@pytest.mark.parametrize(
    ("op_type", "inputs", "output", "attributes", "message"),
    [
        ("And", [X, YES], "bool", {}, "input 0 .*: expected bool, got float"),
        ("Not", [COUNTS], "bool", {}, "input 0 .*: expected bool, got int64"),
        ("Less", [YES, YES], "bool", {}, "input 0 .*: expected float or .* or int32, got bool"),
        ("Equal", [X, COUNTS], "bool", {}, "input 1 .*: expected float, the type of what it goes with, got int64"),
        ("Equal", [YES, COUNTS], "bool", {}, "input 1 .*: expected bool, the type of what it goes with, got int64"),
        ("Where", [X, X, X], "float", {}, "input 0 .*: expected bool, got float"),
        ("Where", [YES, X, COUNTS], "float", {}, "input 2 .*: expected float, the type .*, got int64"),
        ("Where", [YES, X, array(4, 3)], "float", {}, "expected shapes that broadcast"),
        ("Pow", [X, COUNTS], "float", {}, "input 1 .*: expected float or float16 or bfloat16, got int64"),
        ("Expand", [X, X], "float", {}, "input 1 .*: expected int64, got float"),
        ("Expand", [X, integers(-1, 3)], "float", {}, "expected sizes of 0 and more, got -1"),
        ("Expand", [X, integers(4, 3)], "float", {}, "expected shapes that broadcast"),
        ("Transpose", [X], "float", {"perm": [0, 1, 2]}, r"expected an input of rank 3, got \[2,3\]"),
        ("Transpose", [X], "float", {"perm": [1, 1]}, "expected perm to have each axis once, got axis 1 twice"),
        ("Transpose", [X], "float", {"perm": [0, 2]}, r"expected an index in \[-2, 2\), got 2"),
        ("Concat", [X, COUNTS], "float", {"axis": 0}, "input 1 .*: expected float, the type of what it goes with"),
        ("Concat", [X, array(2, 4)], "float", {"axis": 0}, "expected shapes that differ in axis 0 only"),
        ("Concat", [X], "float", {}, "expected the attribute 'axis', got none"),
        ("Split", [X, integers(1, 1)], "float", {"axis": 1}, "expected 1 sizes, got 2"),
        ("Split", [X, integers(2)], "float", {"axis": 1}, "expected sizes that add up to 3, got 2"),
        ("Slice", [X, integers(0), integers(1), integers(1), integers(0)], "float", {}, "expected steps other than 0"),
        ("Range", [np.array(0), np.array(1), np.array(0)], "int64", {}, "expected a delta other than 0"),
        ("Range", [np.array(0), integers(1, 2), np.array(1)], "int64", {}, "expected one element in input 1"),
        ("Range", [np.array(LOWEST), np.array(HIGHEST), np.array(1)], "int64", {}, "a range that fits memory"),
        ("Range", [np.array(0), np.array(1), np.array(1, np.int32)], "int64", {}, "input 2 .*: expected int64"),
        ("ConstantOfShape", [integers(-1)], "float", {}, "expected sizes of 0 and more, got -1"),
        ("Squeeze", [X, integers(1)], "float", {}, "expected axis 1 to be of size 1"),
        ("Unsqueeze", [X, integers(1, 1)], "float", {}, "expected each axis once, got axis 1 twice"),
        ("CumSum", [X, np.array(2)], "float", {}, r"expected an index in \[-2, 2\), got 2"),
        ("CumSum", [X, integers(0, 1)], "float", {}, "expected one axis, got 2"),
        ("ReduceSum", [YES, integers(1)], "float", {}, "input 0 .*: expected float or .* or int32, got bool"),
        ("ArgMax", [array(2, 0)], "int64", {"axis": 1}, "expected elements along axis 1"),
    ],
)  # fmt: skip
def test_unfit_inputs_are_refused(
    op_type: str, inputs: list[Any], output: str, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(op_type, inputs, outputs=(output,), **attributes)


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_cumsum_equals_reference(dtype: Any, axis: int, reverse: int, exclusive: int) -> None:
    """The array's numbers are integers, so that sums of floats are exact."""
    check("CumSum", [array(3, 5, 4, dtype=dtype), np.array(axis)], reverse=reverse, exclusive=exclusive)


def test_cumsum_of_nothing_is_empty() -> None:
    check("CumSum", [array(2, 0, 3), np.array(1)])
    check("CumSum", [array(0, 4, dtype=np.int64), np.array(1, np.int32)])

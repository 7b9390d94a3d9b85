# SPDX-License-Identifier: Apache-2.0
"""Standard operators on the CPU at the ends of their types, in large arrays, and in 16-bit floats.

Ordinary numbers, and NaN and infinities of most operators, are those of ONNX's backend suite
(tests/ops/test_onnx_backend.py) and of random graphs of each operator (tests/fuzz/graphs/test_graphs.py).
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.one_node import by_onnxruntime, by_reference
from tests.ops import device
from tests.ops.device import NAMES, one
from tests.pairwise import pairwise

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 37), dtype=np.float32)
Y = RNG.standard_normal((2, 3, 37), dtype=np.float32)
WEIGHT = RNG.standard_normal(37, dtype=np.float32)
LOWEST, HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
NAN, INF = np.float32(np.nan), np.float32(np.inf)


def array(*shape: int) -> np.ndarray:
    return RNG.integers(-3, 4, shape).astype(np.float32)


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


def test_integers_wrap_around() -> None:
    with np.errstate(over="ignore"):
        check("Add", [integers(HIGHEST, LOWEST), integers(1, -1)])
        check("Sub", [integers(LOWEST, 0), integers(1, LOWEST)])
        check("Mul", [integers(HIGHEST, LOWEST), integers(3, -1)])
    # Processors trap this quotient; numpy wraps around, too.
    (result,) = run("Div", [integers(LOWEST, -7), integers(-1, -1)], outputs=("int64",))
    np.testing.assert_array_equal(result, integers(LOWEST, 7))
    check("Div", [integers(7, -7, HIGHEST, LOWEST), integers(2, 2, LOWEST, HIGHEST)])
    check("Relu", [integers(LOWEST, -2, -1, 0, 1, HIGHEST)])


SQUARE = RNG.standard_normal((3, 3), dtype=np.float32)
SCALES, ZEROS = np.array([0.1, 0.2, 0.3], np.float32), np.array([1, 2, 3], np.int8)
DEFAULTS: list[tuple[str, str, list[np.ndarray], str, dict[str, Any]]] = [
    ("LayerNormalization", "", [X / 1000, WEIGHT], "float", {"epsilon": 1e-5, "axis": -1}),
    ("SimplifiedLayerNormalization", "", [X / 1000, WEIGHT], "float", {"epsilon": 1e-5, "axis": -1}),
    ("QuickGelu", "com.microsoft", [X], "float", {"alpha": 1.702}),
    ("QuantizeLinear", "", [SQUARE, SCALES, ZEROS], "int8", {"axis": 1}),
    ("DequantizeLinear", "", [np.arange(9, dtype=np.int8).reshape(3, 3), SCALES, ZEROS], "float", {"axis": 1}),
    ("Gelu", "", [X], "float", {"approximate": "none"}),
    ("Softmax", "", [X], "float", {"axis": -1}),
]


@pytest.mark.parametrize(
    ("op_type", "domain", "inputs", "output", "attributes"), DEFAULTS, ids=[d[0] for d in DEFAULTS]
)
def test_absent_attributes_have_their_defaults(
    op_type: str, domain: str, inputs: list[np.ndarray], output: str, attributes: dict[str, Any]
) -> None:
    absent, given = (device.run(op_type, inputs, domain=domain, outputs=(output,), **a)[0] for a in ({}, attributes))
    np.testing.assert_array_equal(absent, given)


@pytest.mark.parametrize(
    ("step", "start", "end"),
    pairwise(
        [-1, -2, LOWEST, 1],
        [HIGHEST, 2**31 - 1, 5, -1, -7, LOWEST],
        [HIGHEST, HIGHEST - 1, 2**31 - 1, 2**31 - 2, 4, 0, -3, -7, -(2**31), LOWEST],
    ),
)
def test_slice_at_ends_of_integers_equals_onnxruntime(step: int, start: int, end: int) -> None:
    """As in ONNX Runtime, which does not take the largest number of either type for an end."""
    inputs = [array(6, 3), integers(start), integers(end), integers(0), integers(step)]
    (expected,) = by_onnxruntime("Slice", inputs, [np.float32])
    (result,) = run("Slice", inputs)
    np.testing.assert_array_equal(result, expected, strict=True)
    if all(-(2**31) <= number < 2**31 for number in (start, end, step)):
        (result,) = run("Slice", [inputs[0], *(x.astype(np.int32) for x in inputs[1:])])
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


def test_range_of_extremes_equals_numpy() -> None:
    for start, limit, delta in [(HIGHEST - 3, HIGHEST, 1), (LOWEST, HIGHEST, 2**62), (HIGHEST, LOWEST, LOWEST)]:
        found = run("Range", [np.array(n) for n in (start, limit, delta)], outputs=("int64",))
        np.testing.assert_array_equal(found[0], list(range(start, limit, delta)))
    check("Range", [np.array(x, np.float32) for x in (0.5, 2.25, 0.25)])


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


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean"])
def test_reductions_keep_nan(op_type: str, axis: int) -> None:
    """NaN is the result in any position, as in numpy; in ONNX Runtime a maximum is NaN only if the first element is."""
    function = {"ReduceMax": np.max, "ReduceMin": np.min, "ReduceSum": np.sum, "ReduceMean": np.mean}[op_type]
    for place in range(5):
        x = np.arange(15, dtype=np.float32).reshape(3, 5)
        x[place % 3, place] = NAN
        x[(place + 1) % 3, place] = (INF, -INF)[place % 2]
        found = one(op_type, [x, np.array([axis])], domain="", keepdims=0)
        np.testing.assert_array_equal(found, function(x, axis))


@pytest.mark.parametrize("last", [0, 1])
def test_arg_max_takes_nan(last: int) -> None:
    """NaN is the largest where it is the first, as in ONNX Runtime."""
    for place in range(5):
        x = np.array([[3, 1, 3, 2, 0], [-INF, -INF, INF, INF, 1]], np.float32)
        x[:, place] = NAN
        (expected,) = by_onnxruntime("ArgMax", [x], [np.int64], axis=1, select_last_index=last)
        found = one("ArgMax", [x], outputs=("int64",), domain="", axis=1, select_last_index=last)
        np.testing.assert_array_equal(found, expected)


NARROW = [
    ("Add", "", [X, Y], {}),
    ("Less", "", [X, Y], {}),
    ("Pow", "", [np.abs(X), np.array(2, np.float32)], {}),
    ("Clip", "", [X, np.array(-0.5, np.float32)], {}),
    ("Gelu", "", [X], {"approximate": "tanh"}),
    ("Softmax", "", [X], {"axis": 1}),
    ("LayerNormalization", "", [X, WEIGHT, WEIGHT[::-1].copy()], {}),
    ("SkipSimplifiedLayerNormalization", "com.microsoft", [X, Y, WEIGHT], {}),
    ("ReduceMean", "", [X], {}),
    ("CumSum", "", [X, np.array(1)], {}),
    ("MaxPool", "", [X], {"kernel_shape": [3]}),
    ("MatMul", "", [X, Y.transpose(0, 2, 1).copy()], {}),
    ("Gemm", "", [X[0], X[0].T.copy()], {}),
]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("op_type", "domain", "inputs", "attributes"), NARROW, ids=[case[0] for case in NARROW])
def test_operators_of_16_bit_floats_equal_rounded_ones_of_float32(
    op_type: str, domain: str, inputs: list[np.ndarray], attributes: dict[str, Any], dtype: Any
) -> None:
    """NumPy and ml_dtypes round; the operators' float32 is compared with the reference elsewhere."""
    narrow = [x.astype(dtype) if x.dtype == np.float32 else x for x in inputs]
    exact = [x.astype(np.float32) if x.dtype == dtype else x for x in narrow]
    output = "bool" if op_type == "Less" else "float"
    wide = one(op_type, list(exact), outputs=(output,), domain=domain, **attributes)
    found = one(op_type, list(narrow), outputs=(NAMES[np.dtype(dtype)] if output == "float" else output,),
                domain=domain, **attributes)  # fmt: skip
    np.testing.assert_array_equal(found, wide if output == "bool" else wide.astype(dtype), strict=True)


@pytest.mark.parametrize("values", [X, np.abs(X), -np.abs(X), 0 * X], ids=["both", "positive", "negative", "zero"])
def test_dynamic_quantize_linear_equals_onnxruntime(values: np.ndarray) -> None:
    expected = by_onnxruntime("DynamicQuantizeLinear", [values], [np.uint8, np.float32, np.uint8])
    found = run("DynamicQuantizeLinear", [values], outputs=("uint8", "float", "uint8"))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("types", [(np.uint8, np.int8), (np.int8, np.uint8)])
@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_matmul_integer_is_exact(types: tuple[Any, Any], zeros: int) -> None:
    """K of 300 at the ends of both types: its sums are not exact in float32."""
    a, b = (np.where(RNG.random(s) < 0.5, np.iinfo(t).min, np.iinfo(t).max).astype(t)
            for t, s in zip(types, ((2, 5, 300), (300, 41)), strict=True))  # fmt: skip
    points = [np.array(types[0](3)), RNG.integers(0, 100, 41).astype(types[1])][:zeros]
    y = one("MatMulInteger", [a, b, *points], outputs=("int32",), domain="")
    shifted = [v.astype(np.int64) - (points[i].astype(np.int64) if i < zeros else 0) for i, v in enumerate((a, b))]
    np.testing.assert_array_equal(y, shifted[0] @ shifted[1])


@pytest.mark.parametrize("isa", device.ISAS)
@pytest.mark.parametrize("axes", [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize(("op_type", "function"), [("ReduceSum", np.sum), ("ReduceMax", np.max), ("ReduceMin", np.min)])
def test_reductions_of_many_rows_equal_float64(op_type: str, function: Any, axes: list[int], isa: str) -> None:
    """Enough rows that threads share them, and columns that fill no whole number of vectors."""
    x = np.random.default_rng(0).standard_normal((7, 90, 61), dtype=np.float32)
    found = one(op_type, [x, np.array(axes)], domain="", options={"cpu_isa": isa, "threads": "2"}, keepdims=0)
    # Sums are in double and rounded once.
    expected = function(x.astype(np.float64), axis=tuple(axes))
    np.testing.assert_allclose(found, expected, rtol=2.0**-23, atol=1e-12)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_cumulative_sum_of_many_columns_equals_float64(axis: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, 40, 300), dtype=np.float32)
    found = one("CumSum", [x, np.array(axis)], domain="")
    np.testing.assert_allclose(found, x.cumsum(axis, dtype=np.float64), rtol=2.0**-23, atol=1e-12)


@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_takes_lower_places_of_equal_numbers(largest: int) -> None:
    x = array(9, 5)
    expected = np.argsort(-x if largest else x, axis=0, kind="stable")[:6]
    values, places = run("TopK", [x, integers(6)], outputs=("float", "int64"), axis=0, largest=largest)
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, 0))


def test_top_k_counts_nan_as_largest() -> None:
    x = np.array([1, NAN, INF, NAN, -1], np.float32)
    for largest, expected in ((1, [1, 3, 2]), (0, [4, 0, 2])):
        _, places = run("TopK", [x, integers(3)], outputs=("float", "int64"), largest=largest)
        np.testing.assert_array_equal(places, expected)


def test_top_k_of_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a K of 0 to 9, got 10"):
        run("TopK", [array(9, 5), integers(10)], outputs=("float", "int64"), axis=0)

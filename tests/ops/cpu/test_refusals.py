# SPDX-License-Identifier: Apache-2.0
"""Standard operators on the CPU refuse inputs that do not fit, and say what they expected."""

from typing import Any

import numpy as np
import pytest

from tests.ops.device import run

LOWEST, HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


X, COUNTS, YES = array(2, 3), array(2, 3, dtype=np.int64), array(2, 3, dtype=np.bool_)
CUBE, IMAGES, KERNEL = array(2, 3, 37), array(2, 3, 13, 12), array(4)
PADS = np.array([1, 0, 2, 3, 0, 1, 4, 0])
A, B = array(2, 8), array(8, 4)
OUTPUTS = dict.fromkeys(("And", "Not", "Less", "Equal"), "bool") | dict.fromkeys(("Div", "Range", "ArgMax"), "int64")


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "message"),
    [
        ("And", [X, YES], {}, "input 0 .*: expected bool, got float"),
        ("Not", [COUNTS], {}, "input 0 .*: expected bool, got int64"),
        ("Less", [YES, YES], {}, "input 0 .*: expected float or .* or int32, got bool"),
        ("Equal", [X, COUNTS], {}, "input 1 .*: expected float, the type of what it goes with, got int64"),
        ("Equal", [YES, COUNTS], {}, "input 1 .*: expected bool, the type of what it goes with, got int64"),
        ("Where", [X, X, X], {}, "input 0 .*: expected bool, got float"),
        ("Where", [YES, X, COUNTS], {}, "input 2 .*: expected float, the type .*, got int64"),
        ("Where", [YES, X, array(4, 3)], {}, "expected shapes that broadcast"),
        ("Pow", [X, COUNTS], {}, "input 1 .*: expected float or float16 or bfloat16, got int64"),
        ("Expand", [X, X], {}, "input 1 .*: expected int64, got float"),
        ("Expand", [X, integers(-1, 3)], {}, "expected sizes of 0 and more, got -1"),
        ("Expand", [X, integers(4, 3)], {}, "expected shapes that broadcast"),
        ("Transpose", [X], {"perm": [0, 1, 2]}, r"expected an input of rank 3, got \[2,3\]"),
        ("Transpose", [X], {"perm": [1, 1]}, "expected perm to have each axis once, got axis 1 twice"),
        ("Transpose", [X], {"perm": [0, 2]}, r"expected an index in \[-2, 2\), got 2"),
        ("Concat", [X, COUNTS], {"axis": 0}, "input 1 .*: expected float, the type of what it goes with"),
        ("Concat", [X, array(2, 4)], {"axis": 0}, "expected shapes that differ in axis 0 only"),
        ("Concat", [X], {}, "expected the attribute 'axis', got none"),
        ("Split", [X, integers(1, 1)], {"axis": 1}, "expected 1 sizes, got 2"),
        ("Split", [X, integers(2)], {"axis": 1}, "expected sizes that add up to 3, got 2"),
        ("Slice", [X, integers(0), integers(1), integers(1), integers(0)], {}, "expected steps other than 0"),
        ("Range", [np.array(0), np.array(1), np.array(0)], {}, "expected a delta other than 0"),
        ("Range", [np.array(0), integers(1, 2), np.array(1)], {}, "expected one element in input 1"),
        ("Range", [np.array(LOWEST), np.array(HIGHEST), np.array(1)], {}, "a range that fits memory"),
        ("Range", [np.array(0), np.array(1), np.array(1, np.int32)], {}, "input 2 .*: expected int64"),
        ("ConstantOfShape", [integers(-1)], {}, "expected sizes of 0 and more, got -1"),
        ("Squeeze", [X, integers(1)], {}, "expected axis 1 to be of size 1"),
        ("Unsqueeze", [X, integers(1, 1)], {}, "expected each axis once, got axis 1 twice"),
        ("CumSum", [X, np.array(2)], {}, r"expected an index in \[-2, 2\), got 2"),
        ("CumSum", [X, integers(0, 1)], {}, "expected one axis, got 2"),
        ("ReduceSum", [YES, integers(1)], {}, "input 0 .*: expected float or .* or int32, got bool"),
        ("ArgMax", [array(2, 0)], {"axis": 1}, "expected elements along axis 1"),
        ("Add", [CUBE, CUBE[:, :, :5].copy()], {}, "expected shapes that broadcast"),
        ("Add", [X, COUNTS], {}, "input 1 .*: expected float, the type of what it goes with, got int64"),
        ("Div", [COUNTS, np.array([0])], {}, "expected divisors other than 0"),
        ("Gather", [CUBE, np.array([3])], {"axis": 1}, r"expected an index in \[-3, 3\), got 3"),
        ("Reshape", [CUBE, np.array([7, -1])], {}, "expected a shape of 222 elements"),
        ("Tile", [CUBE, np.array([1, 1 << 62, 1])], {}, "expected repeats of which a tensor fits in memory"),
        ("Einsum", [X], {}, "the cpu device has no ai.onnx::Einsum"),
        (
            "AveragePool",
            [IMAGES],
            {"kernel_shape": [4, 4], "pads": [4, 0, 0, 0]},
            "expected pads smaller than the window",
        ),
        ("MaxPool", [IMAGES], {"kernel_shape": [4]}, r"expected images of 1 axes after two others, got \[2,3,13,12\]"),
        ("MaxPool", [IMAGES], {"kernel_shape": [14, 2]}, "expected images of at least one window of 14, got 13"),
        ("Pad", [IMAGES, PADS * 2], {"mode": "reflect"}, "expected pads of 0 to 1 in mode reflect, got 2 and 0"),
        ("Pad", [IMAGES, PADS[:6].copy()], {}, "expected 8 pads, got 6"),
        ("Pad", [IMAGES, PADS - 14], {}, "expected pads that leave 2 elements or take some, got -13 and -14"),
        (
            "LayerNormalization",
            [IMAGES, KERNEL],
            {"axis": 2},
            r"expected a weight of shape \[13,12\], got \[4\]",
        ),
        ("LayerNormalization", [IMAGES, KERNEL], {}, r"expected a weight of shape \[12\], got \[4\]"),
        ("Gelu", [IMAGES], {"approximate": "quick"}, "expected one of none.tanh, got 'quick'"),
        ("Gemm", [A, B], {"transA": 1}, r"expected B with 2 rows, as many as A has to multiply, got A \[2,8\]"),
        ("Gemm", [A, B], {"transB": 1}, r"expected B with 8 columns, as many as A has to multiply, got .* B \[8,4\]"),
        ("Gemm", [A, B, A[:, :3].copy()], {}, r"expected C of a shape that broadcasts to \[2,4\], got \[2,3\]"),
        ("Gemm", [A[:1].copy(), B, A[:, :4].copy()], {}, r"expected C of .* broadcasts to \[1,4\], got \[2,4\]"),
        ("Gemm", [A, B, np.zeros((1, 2, 4), np.float32)], {}, r"expected C of a shape that broadcasts to \[2,4\], got"),
        ("Gemm", [A[None], B], {}, r"input 0 \(A\): expected shape \[\?,\?\], got \[1,2,8\]"),
    ],
)  # fmt: skip
def test_unfit_inputs_are_refused(op_type: str, inputs: list[Any], attributes: dict[str, Any], message: str) -> None:
    constants = (1,) if op_type in ("Pad", "LayerNormalization") else ()
    with pytest.raises(ValueError, match=message):
        run(op_type, inputs, outputs=(OUTPUTS.get(op_type, "float"),), domain="", constants=constants, **attributes)

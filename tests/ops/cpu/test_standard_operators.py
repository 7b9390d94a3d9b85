# SPDX-License-Identifier: Apache-2.0
"""The standard operators between ours, against ONNX Runtime's own CPU kernels and the fuzzers' reference."""

from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest

from flownpu.ops.eager_call import DTYPES
from tests.one_node import one_node
from tests.ops.cpu.within_bounds import check
from tests.ops.device import ISAS, NAMES, one, run

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 37), dtype=np.float32)
Y = RNG.standard_normal((2, 3, 37), dtype=np.float32)
WEIGHT = RNG.standard_normal(37, dtype=np.float32)


def ort(op_type: str, inputs: list[np.ndarray], outputs: tuple[str, ...], domain: str, **attributes: Any) -> list[Any]:
    """The outputs of ONNX Runtime's kernel; types by their ONNX names, "" for an absent output."""
    types = [DTYPES[name] if name else "" for name in outputs]
    model, feeds = one_node(op_type, inputs, types, domain=domain, attributes=attributes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)  # type: ignore[no-any-return]


INTEGERS = np.array([[5, -3, 9], [2, 7, -8]], np.int64)
EXACT: list[tuple[str, list[np.ndarray], dict[str, Any]]] = [
    *[(op, [X, Y], {}) for op in ("Add", "Sub", "Mul", "Div", "Min", "Max")],
    ("Shape", [X], {}),
    ("Shape", [X], {"start": 1}),
    ("Shape", [X], {"start": -2, "end": -1}),
    ("Gather", [np.array([4, 5, 6]), np.array(1)], {}),
    ("Gather", [X, np.array([[2, -1]])], {"axis": 1}),
    ("GatherND", [X, np.array([[[2]], [[0]]])], {"batch_dims": 1}),
    ("GatherND", [X, np.array([[1, 2], [0, -3]])], {}),
    ("Reshape", [X, np.array([0, -1])], {}),
    ("Identity", [X], {}),
    ("Tile", [X, np.array([2, 1, 3])], {}),
    ("Tile", [INTEGERS, np.array([1, 2])], {}),
    ("Tile", [X, np.array([1, 0, 2])], {}),
    ("Mod", [INTEGERS, np.array([4, -3, 5])], {}),
    ("Mod", [X, Y], {"fmod": 1}),
    ("Clip", [X, np.array(-0.5, np.float32)], {}),
    ("Clip", [X, np.array(-0.5, np.float32), np.array(0.5, np.float32)], {}),
    ("Clip", [INTEGERS, np.array(-2), np.array(5)], {}),
    ("GatherElements", [X, RNG.integers(-3, 3, (2, 2, 30))], {"axis": 1}),
    ("GatherElements", [INTEGERS, np.array([[2, 0], [-1, 1]])], {"axis": -1}),
    ("ScatterND", [X, np.array([[0, 1], [1, -1]]), Y[0, :2].copy()], {}),
    ("ScatterND", [X, np.array([[1]]), Y[:1].copy()], {}),
    ("ScatterND", [X, np.zeros((0, 2), np.int64), Y[0, :0].copy()], {}),
    *[("Trilu", [X[:, :, :5].copy(), np.array(k)], {"upper": u}) for k in (-9, -1, 0, 2, 9) for u in (0, 1)],
    ("Trilu", [INTEGERS], {}),
]


@pytest.mark.parametrize(("op_type", "inputs", "attributes"), EXACT, ids=[f"{i}-{c[0]}" for i, c in enumerate(EXACT)])
def test_exact_operators_equal_numpy(op_type: str, inputs: list[np.ndarray], attributes: dict[str, Any]) -> None:
    name = "int64" if op_type == "Shape" else NAMES[inputs[0].dtype]
    (expected,) = ort(op_type, inputs, (name,), "", **attributes)
    (result,) = run(op_type, inputs, outputs=(name,), domain="", **attributes)
    np.testing.assert_array_equal(result, expected, strict=True)


@pytest.mark.parametrize("op_type", ["Tanh", "Sigmoid", "Erf", "Exp"])
def test_functions_equal_reference(op_type: str) -> None:
    check(op_type, [np.linspace(-12, 12, 1001, dtype=np.float32)])


def test_cast_like_has_type_of_second_input() -> None:
    result = one("CastLike", [X * 9, INTEGERS], outputs=("int64",), domain="")
    np.testing.assert_array_equal(result, (X * 9).astype(np.int64), strict=True)


@pytest.mark.parametrize(
    ("op_type", "domain", "inputs", "attributes"),
    [
        ("QuickGelu", "com.microsoft", [X * 4], {}),
        ("QuickGelu", "com.microsoft", [X * 4], {"alpha": 0.5}),
        ("BiasGelu", "com.microsoft", [X * 4, WEIGHT], {}),
        ("FastGelu", "com.microsoft", [X * 4, WEIGHT], {}),
        ("FastGelu", "com.microsoft", [X * 4], {}),
        ("LogSoftmax", "", [X * 4], {}),
    ],
)
def test_other_activations_equal_reference(
    op_type: str, domain: str, inputs: list[np.ndarray], attributes: dict[str, Any]
) -> None:
    check(op_type, list(inputs), ("float",), domain, **attributes)


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


def test_product_reads_constant_weight_of_float16_as_it_is_stored() -> None:
    x, weight = X.astype(np.float16), Y[0].T.astype(np.float16)
    found = one("MatMul", [x, weight.copy()], outputs=("float16",), domain="", constants=(1,),
                options={"cpu_isa": "generic"})  # fmt: skip
    expected = x.astype(np.float64) @ weight.astype(np.float64)
    # A sum of 37 products in float32, and its rounding to float16.
    np.testing.assert_allclose(found, expected, rtol=2.0**-11, atol=37 * 37 * 16 * 2.0**-24)


@pytest.mark.parametrize("given", ["all", "least", "positions"])
def test_embedding_with_norm_equals_onnxruntime(given: str) -> None:
    tables = [RNG.standard_normal((rows, 8), dtype=np.float32) for rows in (9, 7, 2)]
    weights = list(RNG.standard_normal((2, 8), dtype=np.float32))
    ids = RNG.integers(0, 9, (2, 5)).astype(np.int32)
    segments, positions = (ids > 4).astype(np.int32), np.arange(5, dtype=np.int32)[None, ::-1].copy()
    inputs: list[Any] = [ids, segments, *tables, *weights, (ids > 2).astype(np.int32)]
    if given != "all":
        inputs = [ids, None, *tables[:2], None, *weights]
    if given == "positions":
        inputs += [None, positions]
    outputs = ("float", "int32", "float")
    expected = ort("EmbedLayerNormalization", inputs, outputs, "com.microsoft", epsilon=1e-5)
    found = run("EmbedLayerNormalization", inputs, outputs=outputs, domain="com.microsoft", epsilon=1e-5)
    np.testing.assert_array_equal(found[1], expected[1])
    for i in (0, 2):  # numbers up to 20, of some 20 roundings each
        np.testing.assert_allclose(found[i], expected[i], rtol=0, atol=20 * 20 * 2.0**-24)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("biases", [0, 1, 2])
def test_norms_equal_reference(isa: str, biases: int) -> None:
    how: dict[str, Any] = {"options": {"cpu_isa": isa}, "epsilon": 1e-6}
    inputs = [X, Y, WEIGHT, WEIGHT[::-1].copy(), WEIGHT + 1][: 3 + biases]
    outputs = ("float", "", "", "float")
    check("SkipLayerNormalization", list(inputs), outputs, "com.microsoft", **how)
    if biases < 2:
        check("SkipSimplifiedLayerNormalization", list(inputs), outputs, "com.microsoft", **how)
    if biases == 0:
        check("SimplifiedLayerNormalization", [X, WEIGHT], **how)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "message"),
    [
        ("Add", [X, X[:, :, :5].copy()], {}, "expected shapes that broadcast"),
        ("Add", [X, INTEGERS], {}, "input 1 .*: expected float, the type of what it goes with, got int64"),
        ("Div", [INTEGERS, np.array([0])], {}, "expected divisors other than 0"),
        ("Gather", [X, np.array([3])], {"axis": 1}, r"expected an index in \[-3, 3\), got 3"),
        ("Reshape", [X, np.array([7, -1])], {}, "expected a shape of 222 elements"),
        ("Tile", [X, np.array([1, 1 << 62, 1])], {}, "expected repeats of which a tensor fits in memory, got 46116860"),
        ("Einsum", [X], {}, "the cpu device has no ai.onnx::Einsum"),
    ],
)
def test_unfit_inputs_are_refused(
    op_type: str, inputs: list[np.ndarray], attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(op_type, inputs, outputs=(NAMES[inputs[0].dtype],), domain="", **attributes)

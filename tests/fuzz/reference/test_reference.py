# SPDX-License-Identifier: Apache-2.0
"""The reference's bounds contain ONNX Runtime's results, and are narrow enough to exclude wrong ones."""

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from flownpu.ops import q4nx
from flownpu.ops.definitions import DOMAIN, OPERATORS
from tests.fuzz.conftest import Workers
from tests.fuzz.graphs.compare import outside
from tests.fuzz.reference.evaluate import bounds_of_node, evaluate, references
from tests.fuzz.reference.samples import ALWAYS, NEVER, NOT_FINITE, PERHAPS

HEADER = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'
X = "agraph (float[4,32] x) => (float y)"
# Graphs of one input x [4, 32], and how wide their bounds may be, relative to the largest magnitude in y: 2 WIDE BEYOND
# roundings of 2^-24, and two more, for each rounding: one of a sum, 8 of a function, 32 of terms.
GRAPHS: dict[str, float] = {
    "y = Add (x, x)": 7e-7,
    "z = Exp (x)  y = Mul (z, x)": 5e-6,
    "y = Softmax (x)": 3e-5,
    "a = Constant <value_ints = [1]> ()  y = ReduceSum (x, a)": 3e-5,
    "t = Transpose (x)  y = MatMul (x, t)": 2e-5,
    "y = Gelu (x)": 1.2e-5,
    "y = Tanh (x)": 5e-6,
    "z = Neg (x)  e = Exp (z)  y = Div (x, e)": 1e-5,
    "w = Constant <value_float = 1.5> ()  v = Expand (w, n)  y = SimplifiedLayerNormalization <axis = -1> (x, v)": 2e-5,
}


def test_operators_of_flownpu_have_reference() -> None:
    """Without a reference, an operator's numbers would be compared only with ONNX Runtime's, which runs our
    definitions.
    """
    # PagedAttention is in no random graph (tests/fuzz/graphs/test_graphs.py).
    assert {name for domain, name in references() if domain == DOMAIN} == OPERATORS.keys() - {"PagedAttention"}


def model_of(body: str) -> onnx.ModelProto:
    text = f"{HEADER} {X} {{ n = Constant <value_ints = [32]> () {body} }}"
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    for node in model.graph.node:
        if node.op_type == "Constant":  # as in exports, with a tensor as value
            (attribute,) = node.attribute
            value = np.array(onnx.helper.get_attribute_value(attribute))
            value = value.astype(np.int64 if value.dtype.kind == "i" else np.float32)
            attribute.CopyFrom(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(value)))
    return model


@pytest.mark.parametrize("body", GRAPHS)
def test_bounds_hold_onnx_runtime_s_numbers_and_are_narrow(body: str, workers: Workers) -> None:
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    model = model_of(body)
    known = evaluate(model, {"x": x})["y"]
    assert known is not None
    (run,) = workers[0].call("tests.fuzz.sessions:run_reference", model.SerializeToString(), [{"x": x}]).runs
    y = run["y"]
    assert not outside(y, np.full_like(y, np.nan), known).any()
    assert ((y >= known.low) & (y <= known.high)).all()
    assert (known.high - known.low).max() <= GRAPHS[body] * np.abs(y).max()
    # An error of ten times this width is found.
    wrong = y + 10 * GRAPHS[body] * np.abs(y).max()
    assert outside(wrong, y, known).all()


def nan_of(body: str, x: Any) -> int:
    known = evaluate(model_of(body), {"x": np.asarray(x, np.float32)})["y"]
    assert known is not None
    return int(NEVER if known.nan is None else known.nan.max())


@pytest.mark.parametrize(
    ("body", "x", "expected"),
    [
        ("y = Add (x, x)", [np.nan], ALWAYS),
        ("z = Neg (x)  y = Add (x, z)", [np.inf], ALWAYS),
        ("y = Sqrt (x)", [-1.0], ALWAYS),
        ("y = Softmax (x)", [-np.inf, -np.inf], ALWAYS),
        ("y = Max (x, n2)", [1.0], NEVER),
        # A difference of two rounded numbers may be below 0.
        ("z = Exp (x)  w = Exp (x)  d = Sub (z, w)  y = Sqrt (d)", [1.0], PERHAPS),
    ],
)
def test_nan_is_followed_through_operators(body: str, x: Any, expected: int) -> None:
    assert nan_of(body.replace("n2", "x"), x) == expected


def test_vanished_nan_is_found() -> None:
    known = evaluate(model_of("y = Softmax (x)"), {"x": np.array([np.nan, 1], np.float32)})["y"]
    assert outside(np.array([0.5, 0.5], np.float32), np.full(2, np.nan, np.float32), known).all()


def test_rounded_product_with_nan_is_not_finite() -> None:
    weight = onnx.numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    model = model_of("y = MatMul (x, w)")
    model.graph.initializer.append(weight)
    x = {"x": np.array([[np.nan, 1]], np.float32)}
    provider = {"cpu_isa": "avx512", "activations": "int8"}
    known = evaluate(model, x, provider)["y"]
    assert known is not None
    assert known.nan is not None
    assert (known.nan == NOT_FINITE).all()
    plain = evaluate(model, x)["y"]
    assert plain is not None
    assert plain.nan is not None
    assert (plain.nan == ALWAYS).all()


def test_gated_product_with_infinity_is_nan_or_infinite() -> None:
    """A gate and a value that each may be either."""
    weight = np.random.default_rng(0).standard_normal((32, 32), dtype=np.float32)
    blocks = np.concatenate([q4nx.pack(*q4nx.quantize(weight))] * 2)
    x = np.ones((2, 32), np.float32)
    x[0, 3] = np.inf
    provider = {"cpu_isa": "avx512", "activations": "int8"}
    for gating in ("geglu", "swiglu"):
        attributes = {"M": 32, "K": 32, "gating": gating}
        (known,) = bounds_of_node("Q4NXMatMul", [x, blocks], domain=DOMAIN, options=provider, **attributes)
        assert known is not None
        assert known.nan is not None
        assert (known.nan == [[NOT_FINITE], [NEVER]]).all(), gating

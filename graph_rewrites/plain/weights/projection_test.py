# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.plain.weights.projection import quantise_projections
from flownpu.graph_rewrites.q4nx_tensor import Q4NXTensor
from flownpu.ops import q4nx

# M = 40 rows of K = 48 columns.
GENERATOR = np.random.default_rng(2)
WEIGHT: testing.Array = GENERATOR.standard_normal((40, 48)).astype(np.float32)
CONSTANTS = {
    "stored": np.ascontiguousarray(WEIGHT.T),
    "rows": WEIGHT,
    "bias": GENERATOR.standard_normal(40).astype(np.float32),
    "short_bias": np.ones(1, np.float32),
    "few": np.ones((48, 2), np.float32),
    "narrow": np.ones((8, 40), np.float32),
    "half": np.ones((48, 40), np.float16),
}


def _model(body: str, inputs: str = "float[B, S, 48] x") -> Any:
    return testing.parse(f"projection ({inputs}) => (float y) {{ {body} }}", **CONSTANTS)


@pytest.mark.parametrize(
    ("body", "biased", "shape"),
    [
        ("y = MatMul (x, stored)", False, (2, 3, 48)),
        ("p = MatMul (x, stored) y = Add (p, bias)", True, (2, 3, 48)),
        ("p = MatMul (x, stored) y = Add (bias, p)", True, (2, 3, 48)),
        ("w = Transpose <perm = [1, 0]> (rows) y = MatMul (x, w)", False, (2, 3, 48)),
        ("y = Gemm <transB = 1> (x, rows, bias)", True, (5, 48)),
        ("y = Gemm (x, stored)", False, (5, 48)),
    ],
)
def test_weights_are_quantised(body: str, biased: bool, shape: tuple[int, ...]) -> None:
    dimensions = "float[B, S, 48] x" if len(shape) == 3 else "float[B, 48] x"
    model, misses = testing.folded(_model(body, dimensions), quantise_projections)
    assert testing.operator_names(model) == ["Q4NXMatMul"]
    assert misses == []
    x = np.random.default_rng(3).standard_normal(shape, np.float32)
    rounded = q4nx.dequantize_codes(q4nx.quantize(WEIGHT))
    expected = x.astype(np.float64) @ rounded.T.astype(np.float64) + (CONSTANTS["bias"] if biased else 0)
    (found,) = testing.run(model, {"x": x})
    # The product's own bound, and a rounding of the sum with the bias.
    bound = testing.product_bound(x, rounded) + testing.FLOAT32_ROUNDING * np.abs(expected)
    assert np.all(np.abs(found - expected) <= bound)
    testing.check(model)


def test_quantisation_error_is_reported() -> None:
    model, _ = testing.folded(_model("y = MatMul (x, stored)"), quantise_projections)
    (tensor,) = (value.const_value for name, value in model.graph.initializers.items() if name.endswith("_Q4NX"))
    assert isinstance(tensor, Q4NXTensor)
    packed = tensor.numpy()
    rounded = q4nx.dequantize(packed, 40, 48)
    assert tensor.relative_error == pytest.approx(q4nx.relative_error(WEIGHT, rounded), rel=1e-6)


def test_shared_weight_is_packed_once() -> None:
    body = "p = MatMul (x, stored) q = MatMul (x, stored) y = Add (p, q)"
    model, _ = testing.folded(_model(body), quantise_projections)
    assert testing.operator_names(model) == ["Q4NXMatMul", "Q4NXMatMul", "Add"]
    assert len({node.inputs[1] for node in model.graph if node.op_type == "Q4NXMatMul"}) == 1


@pytest.mark.parametrize(
    ("body", "inputs", "reason"),
    [
        ("y = MatMul (x, few)", "float[B, S, 48] x", "few has 2 rows, less than 32"),
        ("y = MatMul (x, narrow)", "float[B, S, 8] x", "narrow has 8 columns, less than 32"),
        (
            "y = MatMul (x, half)",
            "float16[B, S, 48] x",
            "the weight half is FLOAT16, expected FLOAT; export with float32",
        ),
        ("y = Gemm <alpha = 2.0> (x, stored)", "float[B, 48] x", "a Gemm with transA, alpha or beta"),
        ("y = Gemm (x, stored, short_bias)", "float[B, 48] x", "the bias of the Gemm is not a constant of 40 numbers"),
    ],
)
def test_unmatched_graph_reports_miss(body: str, inputs: str, reason: str) -> None:
    model, misses = testing.folded(_model(body, inputs), quantise_projections)
    assert "Q4NXMatMul" not in testing.operator_names(model)
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("projection", reason)]


def test_bias_of_other_size_stays_outside() -> None:
    model, misses = testing.folded(_model("p = MatMul (x, stored) y = Add (p, short_bias)"), quantise_projections)
    assert testing.operator_names(model) == ["Q4NXMatMul", "Add"]
    assert misses == []


def test_product_of_computed_values_is_no_miss() -> None:
    model, misses = testing.folded(
        _model("y = MatMul (x, z)", "float[B, S, 48] x, float[B, 48, S] z"), quantise_projections
    )
    assert testing.operator_names(model) == ["MatMul"]
    assert misses == []

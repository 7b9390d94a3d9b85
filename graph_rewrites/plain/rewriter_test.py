# SPDX-License-Identifier: Apache-2.0
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.plain.rewriter import rewrite_plain

# A feed-forward block as torch exports it: sizes as initializers, a norm in its parts, a bias after each product.
MODEL = """
<ir_version: 8, opset_import: ["": {opset}]> block (float[B, S, 64] x) => (float[B, S, 64] y) {{
    mean = ReduceMean <axes = [-1]> (x)
    centred = Sub (x, mean)
    square = Pow (centred, two)
    variance = ReduceMean <axes = [-1]> (square)
    total = Add (variance, epsilon)
    root = Sqrt (total)
    normalised = Div (centred, root)
    scaled = Mul (normalised, weight)
    norm = Add (scaled, bias)
    flat = Reshape (norm, sizes)
    a = MatMul (flat, up)
    b = Add (a, up_bias)
    c = Div (b, root_two)
    d = Erf (c)
    e = Add (d, one)
    f = Mul (b, e)
    g = Mul (f, half)
    h = MatMul (g, down)
    i = Add (h, down_bias)
    shape = Shape (x)
    back = Reshape (i, shape)
    y = Add (x, back)
}}
"""


def _model(opset: int) -> ir.Model:
    generator = np.random.default_rng(4)
    constants = {
        "two": 2.0, "epsilon": 1e-5, "root_two": np.sqrt(2), "one": 1.0, "half": 0.5, "sizes": np.array([-1, 64]),
        "weight": generator.standard_normal(64), "bias": generator.standard_normal(64),
        "up": generator.standard_normal((64, 96)) / 8, "up_bias": generator.standard_normal(96),
        "down": generator.standard_normal((96, 64)) / 10, "down_bias": generator.standard_normal(64),
    }  # fmt: skip
    model = onnx.parser.parse_model(MODEL.format(opset=opset))
    for name, value in constants.items():
        array = np.asarray(value)
        typed = array if array.dtype == np.int64 else array.astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(typed, name))
    return ir.from_proto(model)


@pytest.mark.parametrize("opset", [13, 17])
def test_older_opsets_are_converted(opset: int) -> None:
    original, model = _model(opset), _model(opset)
    report = rewrite_plain(model)
    assert report.misses == []
    assert testing.operator_names(model) == [
        "LayerNormalization", "Reshape", "Q4NXMatMul", "Gelu", "Q4NXMatMul", "Shape", "Reshape", "Add",
    ]  # fmt: skip
    x = np.random.default_rng(1).standard_normal((2, 3, 64), np.float32)
    found, expected = (testing.run(m, {"x": x})[0] for m in (model, original))
    # The range of 32 normal numbers is some 4 deviations, and a step of 4 bits is a 15th of it. So the root mean square
    # error of rounding is 4 / 15 / sqrt(12) = 8 %. Errors of a product's terms are independent, so each of the two
    # products has this relative error.
    assert np.linalg.norm(found - expected) <= 2 * 0.08 * np.linalg.norm(expected - x)
    testing.check(model)


def test_opset_that_cannot_be_converted_is_refused() -> None:
    model = _model(13)
    model.opset_imports[""] = 2
    with pytest.raises(ValueError, match="ONNX opset 2, expected 21 or one that can be converted to it: "):
        rewrite_plain(model)

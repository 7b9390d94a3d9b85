# SPDX-License-Identifier: Apache-2.0
"""The types of all inputs and outputs decide whether a node is taken, not that of the first input alone."""

import ctypes
import math

import ml_dtypes
import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

from flownpu.graph_rewrites import testing
from tests.ep.conftest import MakeSession, reference

RNG = np.random.default_rng(4)
UNOPTIMISED = onnxruntime.SessionOptions()
UNOPTIMISED.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
X = np.linspace(-2, 3, 5 * 8, dtype=np.float32).reshape(5, 8)
OPSET_21 = '<ir_version: 10, opset_import: ["": 21]>'
OPSET_23 = '<ir_version: 10, opset_import: ["": 23]>'
# Y has the scale's type, float16. A kernel that wrote float32 would write beyond its memory within the partition.
MIXED = {
    "SimplifiedLayerNormalization": f"""{OPSET_21} g (float[5,8] x, float16[8] w) => (float[5,8] y) {{
        n = SimplifiedLayerNormalization <axis = -1, epsilon = 1e-5, stash_type = 1> (x, w)  y = Cast <to = 1> (n)
    }}""",
    "RMSNormalization": f"""{OPSET_23} g (float[5,8] x, float16[8] w) => (float[5,8] y) {{
        n = RMSNormalization <axis = -1> (x, w)  y = Cast <to = 1> (n)
    }}""",
}
DEQUANTIZED = f"""{OPSET_23} g (int8[5,8] x) => (float[5,8] y) <float[1] half = {{0.5}}> {{
    scale = Cast <to = 10> (half)  h = DequantizeLinear (x, scale)  y = Cast <to = 1> (h)
}}"""
DEQUANTIZED_TO_HALF = f"""{OPSET_23} g (int8[5,8] x) => (float[5,8] y)
    <float[1] scale = {{0.5}}> {{ h = DequantizeLinear <output_dtype = 10> (x, scale)  y = Cast <to = 1> (h) }}"""


@pytest.mark.parametrize("operator", MIXED)
def test_norm_with_scale_of_other_type_equals_float64(make_session: MakeSession, operator: str) -> None:
    graph = onnx.parser.parse_model(MIXED[operator])  # parse() has a checker without ORT's own operators
    w = np.arange(1, 9, dtype=np.float16)
    (ours,) = make_session(graph).run(None, {"x": X, "w": w})
    x = X.astype(np.float64)
    expected = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * w
    # The result is rounded to float16's 11 bits.
    np.testing.assert_allclose(ours, expected, rtol=1.01 * 2.0**-11)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        pytest.param(DEQUANTIZED, r"input 1 \(x_scale\): expected float, got float16", id="scale"),
        pytest.param(DEQUANTIZED_TO_HALF, r"output 0 \(y\): expected float, got float16", id="output"),
    ],
)
def test_half_dequantisation_is_left_to_onnxruntime(make_session: MakeSession, graph: str, reason: str) -> None:
    with pytest.raises(Exception, match=rf"\[DequantizeLinear 'h'\] {reason}"):
        make_session(graph)
    feeds = {"x": np.arange(-20, 20, dtype=np.int8).reshape(5, 8)}
    session = make_session(graph, {"on_unsupported": "cpu"})
    np.testing.assert_array_equal(session.run(None, feeds)[0], reference(graph, feeds)[0])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "uint4"])
@pytest.mark.parametrize(
    ("axis", "block", "scales"),
    [
        (1, 0, ()),
        (1, 0, (7,)),
        (-1, 0, (33,)),
        (0, 2, (2, 7, 33)),
        (1, 3, (3, 3, 33)),
        (2, 16, (3, 7, 3)),
        (2, 40, (3, 7, 1)),
    ],
)
def test_codes_of_blocks_and_of_four_bits_equal_onnxruntime(
    make_session: MakeSession, dtype: str, axis: int, block: int, scales: tuple[int, ...]
) -> None:
    """[3, 7, 33] elements: rows of four bits begin within a byte. The codes are computed, so both steps run."""
    kind = {"int8": np.int8, "uint8": np.uint8}.get(dtype) or getattr(ml_dtypes, dtype)
    zero = RNG.integers(*((-8, 8) if dtype.startswith("i") else (0, 16)), scales).astype(kind)
    scale = RNG.uniform(0.05, 0.2, scales).astype(np.float32)
    graph = f"""g (float[3, 7, 33] x) => (float[3, 7, 33] y, {dtype}[3, 7, 33] q) {{
            q = QuantizeLinear <axis = {axis}, block_size = {block}> (x, scale, zero)
            y = DequantizeLinear <axis = {axis}, block_size = {block}> (q, scale, zero)
        }}"""
    model = ir.to_proto(testing.parse(graph, scale=scale, zero=zero))
    x = {"x": onnxruntime.OrtValue.ortvalue_from_numpy(RNG.uniform(-3, 3, (3, 7, 33)).astype(np.float32))}
    stock = onnxruntime.InferenceSession(model.SerializeToString(), UNOPTIMISED, providers=["CPUExecutionProvider"])
    for found, expected in zip(*(s.run_with_ort_values(None, x) for s in (make_session(model), stock)), strict=True):
        assert _bytes(found) == _bytes(expected)


def _bytes(value: onnxruntime.OrtValue) -> bytes:
    """The value's memory, for which NumPy has no type; half a byte behind the last of 4 bits is left out."""
    bits = {"float": 32, "int8": 8, "uint8": 8, "int4": 4, "uint4": 4}[value.data_type()[len("tensor(") : -1]]
    return ctypes.string_at(value.data_ptr(), math.prod(value.shape()) * bits // 8)

# SPDX-License-Identifier: Apache-2.0
"""The types of all inputs and outputs decide whether a node is taken, not that of the first input alone."""

import numpy as np
import onnx.parser
import onnxruntime
import pytest

from tests.ep.conftest import MakeSession, reference

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

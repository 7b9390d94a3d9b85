# SPDX-License-Identifier: Apache-2.0
import copy
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.upgrades.opset import raise_opset
from flownpu.ops.definitions.onnx_function import OPSET

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 6, 8)).astype(np.float32)
HEADER = '<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]>'
# Operators that changed on the way, and operators that ONNX Runtime has in ONNX's domain before ONNX, or alone.
GRAPHS = {
    "reduction": "g (float[B,N,8] x) => (float[B,N,1] y) { y = ReduceMean <axes = [-1]> (x) }",
    "split": "g (float[B,6,8] x) => (float[B,3,8] y, float[B,3,8] z) { y, z = Split <axis = 1> (x) }",
    "layer norm": "g (float[B,N,8] x) => (float[B,N,8] y) { y = LayerNormalization <axis = -1> (x, w, w) }",
    "RMS norm": "g (float[B,N,8] x) => (float[B,N,8] y) { y = SimplifiedLayerNormalization <axis = -1> (x, w) }",
    "of ONNX Runtime": "g (float[B,N,8] x) => (float[B,N,8] y) { a = com.microsoft.FastGelu (x) "
    "y = com.microsoft.SkipSimplifiedLayerNormalization (a, x, w) }",
    "branches": "g (float[B,N,8] x) => (float[B,N,1] y) { y = If (c) <"
    "then_branch = a () => (float[B,N,1] p) { n = SimplifiedLayerNormalization <axis = -1> (x, w) "
    "p = ReduceSum (n, last) }, else_branch = b () => (float[B,N,1] q) { q = ReduceMean <axes = [-1]> (x) }> }",
}


def _model(graph: str, opset: int) -> ir.Model:
    model = onnx.parser.parse_model(HEADER.format(opset=opset) + graph)
    constants: dict[str, Any] = {"w": RNG.standard_normal(8).astype(np.float32), "c": np.array(True), "last": [-1]}
    used = {name for name in constants if name in graph.replace("(", " ").replace(")", " ").replace(",", " ").split()}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array(constants[name]), name) for name in sorted(used)
    )
    return ir.from_proto(model)


@pytest.mark.parametrize("opset", [13, 14, 17])
@pytest.mark.parametrize("graph", GRAPHS)
def test_model_of_older_opset_computes_same_when_upgraded(graph: str, opset: int) -> None:
    model = _model(GRAPHS[graph], opset)
    before = testing.run(ir.from_proto(copy.deepcopy(ir.to_proto(model))), {"x": X})
    raise_opset(model)
    assert model.opset_imports.items() <= {"": OPSET, "com.microsoft": 1}.items()
    model.ir_version = 10
    for expected, found in zip(before, testing.run(model, {"x": X}), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_newer_opset_stays_as_it_is() -> None:
    model = _model("g (float[B] x) => (float[B] y) { y = Relu (x) }", 22)
    raise_opset(model)
    assert model.opset_imports[""] == 22


@pytest.mark.parametrize(
    ("graph", "opset", "reason"),
    [
        ("g (float[2,4,3] x) => (float[2,4,3] y) { y = GroupNormalization <num_groups = 2> (x, w, w) }", 18,
         "ONNX opset 18, expected 21 or one that can be converted to it: .*shape"),
        ("g (float[B,2] x) => (float[B,2] y) { y = Upsample <height_scale = 1.0> (x) }", 1,
         "ONNX opset 1, expected 21 or one that can be converted to it: .*Upsample"),
    ],
)  # fmt: skip
def test_model_without_upgrade_is_refused_with_reason(graph: str, opset: int, reason: str) -> None:
    """No part of the model is left to be converted wrongly, and the error quotes the converter."""
    model = _model(graph, opset)
    for value in model.graph.inputs:
        value.shape = None
    with pytest.raises(ValueError, match=reason):
        raise_opset(model)


def test_model_without_opset_is_refused() -> None:
    model = _model(GRAPHS["split"], 14)
    del model.opset_imports[""]
    with pytest.raises(ValueError, match="does not say of which ONNX opset it is"):
        raise_opset(model)

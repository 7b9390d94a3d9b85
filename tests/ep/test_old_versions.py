# SPDX-License-Identifier: Apache-2.0
"""Operators of old opsets, where axes and sizes are attributes, or an attribute has another meaning."""

import numpy as np
import pytest

from tests.ep.conftest import MakeSession, reference

X = np.arange(24, dtype=np.float32).reshape(1, 4, 1, 6)


def model(opset: int, body: str, result: str = "float[] y", shape: str = "1,4,1,6") -> str:
    return f'<ir_version: 7, opset_import: ["": {opset}]> g (float[{shape}] x) => ({result}) {{ {body} }}'


@pytest.mark.parametrize("opset", [8, 11, 12])
@pytest.mark.parametrize(
    ("body", "result"),
    [
        pytest.param("y = Squeeze <axes = [0]> (x)", "float[4,1,6] y", id="one axis"),
        pytest.param("y = Squeeze <axes = [0, 2]> (x)", "float[4,6] y", id="two axes"),
        pytest.param("y = Squeeze (x)", "float[4,6] y", id="all axes"),
        pytest.param("y = Unsqueeze <axes = [0, 3]> (x)", "float[1,1,4,1,1,6] y", id="unsqueeze"),
        pytest.param("y, z = Split <axis = 1, split = [1, 3]> (x)", "float[1,1,1,6] y, float[1,3,1,6] z", id="sizes"),
        pytest.param("y, z = Split <axis = 1> (x)", "float[1,2,1,6] y, float[1,2,1,6] z", id="halves"),
        pytest.param("y = ReduceSum <axes = [1], keepdims = 0> (x)", "float[1,1,6] y", id="sum"),
        pytest.param("y = Softmax <axis = 3> (x)", "float[1,4,1,6] y", id="last axis"),
    ],
)
def test_attributes_of_old_opsets_equal_onnxruntime(
    make_session: MakeSession, opset: int, body: str, result: str
) -> None:
    graph = model(opset, body, result)
    for ours, expected in zip(make_session(graph).run(None, {"x": X}), reference(graph, {"x": X}), strict=True):
        # Softmax: some 20 roundings of numbers up to 1 on either side; the others are exact.
        np.testing.assert_allclose(ours, expected, rtol=0, atol=40 * 2.0**-24 if "Softmax" in body else 0, strict=True)


@pytest.mark.parametrize("axis", ["", "<axis = 1>"])
def test_softmax_over_several_axes_equals_onnxruntime(make_session: MakeSession, axis: str) -> None:
    """Before opset 13 Softmax flattened all axes from `axis` (default 1) on into one."""
    graph = model(11, f"y = Softmax {axis} (x)", "float[1,4,1,6] y")
    (ours,) = make_session(graph).run(None, {"x": X})
    # As above.
    np.testing.assert_allclose(ours, reference(graph, {"x": X})[0], rtol=0, atol=40 * 2.0**-24)

# SPDX-License-Identifier: Apache-2.0
"""A small network of images in a session of ONNX Runtime on device=gpu, against its CPU provider in float32."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

pytestmark = [pytest.mark.opencl, pytest.mark.usefixtures("pocl")]

CHANNELS = 8


def network() -> onnx.ModelProto:
    """Convolutions with norms and SiLU, a level of half the size, a skip, attention over pixels; of any size."""
    rng = np.random.default_rng(3)
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def constant(array: np.ndarray) -> str:
        constants.append(numpy_helper.from_array(array, f"c{len(constants)}"))
        return constants[-1].name

    def weight(*shape: int) -> str:
        return constant((rng.standard_normal(shape) * np.prod(shape[1:]) ** -0.5).astype(np.float32))

    def node(kind: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [f"v{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    def normed(x: str, channels: int) -> str:
        ones, zeros = constant(np.ones(channels, np.float32)), constant(np.zeros(channels, np.float32))
        made = node("GroupNormalization", x, ones, zeros, num_groups=2)
        return node("Mul", made, node("Sigmoid", made))

    def convolved(x: str, channels: int, into: int = CHANNELS, **attributes: Any) -> str:
        size = 1 if attributes.get("pads") is None else 3
        return node("Conv", x, weight(into, channels, size, size), weight(into), **attributes)

    around = {"pads": [1, 1, 1, 1]}
    skip = convolved("x", 4, **around)
    low = convolved(normed(skip, CHANNELS), CHANNELS, **around, strides=[2, 2])
    scales = constant(np.array([1, 1, 2, 2], np.float32))
    high = node("Resize", low, "", scales, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    joined = node("Concat", node("Sin", high), skip, axis=1)
    images = convolved(normed(joined, 2 * CHANNELS), 2 * CHANNELS)
    sizes = node("Shape", images)
    flat = node("Reshape", images, constant(np.array([0, CHANNELS, -1])))
    tokens = node("Transpose", flat, perm=[0, 2, 1])
    rows = node("LayerNormalization", tokens, weight(CHANNELS), weight(CHANNELS))
    query, key, value = (node("MatMul", rows, weight(CHANNELS, CHANNELS)) for _ in range(3))
    scores = node("MatMul", query, node("Transpose", key, perm=[0, 2, 1]))
    seen = node("MatMul", node("Softmax", scores, axis=-1), value)
    back = node("Reshape", node("Transpose", node("Add", seen, tokens), perm=[0, 2, 1]), sizes)
    left, right = (convolved(back, CHANNELS, **around) for _ in range(2))
    node("Add", left, right)
    nodes[-1].output[0] = "y"
    shapes = {"x": ["batch", 4, "height", "width"], "y": ["batch", CHANNELS, "height", "width"]}
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    graph = helper.make_graph(nodes, "network", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_network_equals_cpu_provider_and_moves_nothing_between(ep_devices: Any, tmp_path: Path) -> None:
    """Sizes change from run to run; only the image goes to the device, and only the result comes back."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "gpu")
    placement = {"placement": str(tmp_path / "placement.json")}
    options.add_provider_for_devices(ep_devices, {"device": "gpu", "on_unsupported": "error", **placement})
    session = onnxruntime.InferenceSession(network().SerializeToString(), options)
    stock = onnxruntime.InferenceSession(network().SerializeToString(), providers=["CPUExecutionProvider"])
    moved = [0, 0]
    for shape in ((2, 4, 8, 8), (1, 4, 6, 10), (2, 4, 8, 8)):
        x = np.random.default_rng(shape[0]).standard_normal(shape, dtype=np.float32)
        (found,), (expected,) = session.run(None, {"x": x}), stock.run(None, {"x": x})
        # Twelve layers in turn, each of sums of up to 72 terms of magnitudes near those of their results.
        np.testing.assert_allclose(found, expected, rtol=0, atol=12 * 72 * 2.0**-24 * np.abs(expected).max())
        moved[0] += x.nbytes
        moved[1] += expected.nbytes
    events = [event.get("args", {}) for event in json.loads(Path(session.end_profiling()).read_text())]
    kernels = [event for event in events if event.get("array") == "gpu"]
    assert len(kernels) > 3 * 20
    assert [sum(int(event[f"bytes_to_{place}"]) for event in kernels) for place in ("device", "host")] == moved
    # All steps but Shape, which reads no pixels.
    told = re.findall(r"(\d+) of (\d+) steps on the device", (tmp_path / "placement.json").read_text())
    assert {int(all_of_them) - int(on_device) for on_device, all_of_them in told} == {1}

# SPDX-License-Identifier: Apache-2.0
"""Convolutions on the emulated array, in sessions: one after the other, and those of the small diffusion model.

The numbers are whole, -3 to 3, so that block floating point holds them and f32 their sums: a convolution's only error
is that its sums come back in bf16.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from flownpu.npu.artifacts import build_artifacts
from flownpu.selftest.reference.projections import convolved
from tests.aie.host_kernels import BF16_ROUNDING
from tests.end_to_end.emulated_operators import session_of, stems
from tests.ops.stock_onnxruntime import model_of, node

PADS = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}


def fixed(name: str, *shape: int) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))


def whole(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def convolution(x: np.ndarray, w: np.ndarray, stride: int = 1, pad: int = 1) -> np.ndarray:
    """In float64, [batch, C, height, width] as ONNX has it."""
    channels_last = x.astype(np.float64).transpose(0, 2, 3, 1)
    return convolved(channels_last, w.astype(np.float64), stride, (pad,) * 4).transpose(0, 3, 1, 2)


def run_nodes(
    folder: Path, devices: list[Any], nodes: list[ir.Node], feeds: dict[ir.Value, np.ndarray],
    constants: dict[ir.Value, np.ndarray],
) -> tuple[np.ndarray, list[str]]:  # fmt: skip
    """The last node's output, and the designs of the dispatches."""
    model = model_of(nodes, list(feeds), constants)
    model.graph.outputs[:] = model.graph.outputs[-1:]
    file = folder / "model.onnx"
    ir.save(model, file)
    build_artifacts(file)
    found, dispatches = session_of(file, devices[:1]).run({given.name: array for given, array in feeds.items()})
    return found[0], stems(dispatches)


def test_fused_convolution_equals_definition(tmp_path: Path, ep_devices: list[Any]) -> None:
    """Three pictures, a pair and one, of few channels; a bias, a picture that is added, and Relu."""
    x, w, b, z = whole(1, 3, 4, 5, 7), whole(2, 6, 4, 3, 3), whole(3, 6), whole(4, 3, 6, 5, 7)
    values = [fixed(name, *array.shape) for name, array in zip("xwbz", (x, w, b, z), strict=True)]
    conv = node("Conv", values[:3], domain="", **PADS)
    conv.outputs[0].shape = ir.Shape(z.shape)
    conv.outputs[0].type = values[0].type
    add = node("Add", [conv.outputs[0], values[3]], domain="")
    relu = node("Relu", [add.outputs[0]], domain="")
    feeds, constants = {values[0]: x, values[3]: z}, {values[1]: w, values[2]: b}
    found, designs = run_nodes(tmp_path, ep_devices, [conv, add, relu], feeds, constants)
    assert designs == ["gemm", "gemm"]
    sums = convolution(x, w)
    expected = np.maximum(sums + b[:, None, None] + z, 0)
    assert np.all(np.abs(found - expected) <= BF16_ROUNDING * np.abs(sums))


def test_convolution_of_stride_two_and_enlarged_picture_equal_definition(tmp_path: Path, ep_devices: list[Any]) -> None:
    """The second convolution's input is the first one's output, made twice as large by repetition."""
    x, w, other = whole(1, 2, 2, 8, 6), np.sign(whole(2, 32, 2, 3, 3)), whole(3, 40, 32, 3, 3)
    given, first, second = (fixed(n, *a.shape) for n, a in (("x", x), ("w", w), ("other", other)))
    scales = fixed("scales", 4)
    half = node("Conv", [given, first], domain="", strides=[2, 2], **PADS)
    half.outputs[0].type, half.outputs[0].shape = given.type, ir.Shape([2, 32, 4, 3])
    twice = node(
        "Resize", [half.outputs[0], None, scales], domain="", mode="nearest",
        coordinate_transformation_mode="asymmetric", nearest_mode="floor",
    )  # fmt: skip
    conv = node("Conv", [twice.outputs[0], second], domain="", **PADS)
    constants = {first: w, second: other, scales: np.array([1, 1, 2, 2], np.float32)}
    found, designs = run_nodes(tmp_path, ep_devices, [half, twice, conv], {given: x}, constants)
    assert designs == ["gemm", "gemm"]
    between = convolution(x, w, stride=2)
    assert np.abs(between).max() < 64  # so bfp16 holds it, too: of 7 bits
    expected = convolution(between.repeat(2, 2).repeat(2, 3), other)
    assert np.all(np.abs(found - expected) <= BF16_ROUNDING * np.abs(expected))


def test_convolution_of_unknown_pictures_stays_on_host(tmp_path: Path, ep_devices: list[Any]) -> None:
    """Beside one that the array takes; the report says why."""
    x, w, other = whole(1, 1, 4, 5, 7), whole(2, 6, 4, 3, 3), whole(3, 6, 4, 3, 3)
    known, filters, others = (fixed(n, *a.shape) for n, a in (("x", x), ("w", w), ("other", other)))
    unknown = ir.Value(name="y", type=known.type, shape=ir.Shape([1, 4, "h", "w"]))
    nodes = [node("Conv", [x, w], domain="", **PADS) for x, w in ((known, filters), (unknown, others))]
    file = tmp_path / "model.onnx"
    ir.save(model_of(nodes, [known, unknown], {filters: w, others: other}), file)
    build_artifacts(file)
    emulated = session_of(file, ep_devices[:1])
    (_, found), dispatches = emulated.run({"x": x, "y": x})
    assert stems(dispatches) == ["gemm"]
    np.testing.assert_array_equal(found, convolution(x, other))
    assert "Conv on the host: Conv 'node_Conv_1'" in emulated.placement["lowered"][0]
    assert "of a height and width that the graph fixes" in emulated.placement["lowered"][0]

# SPDX-License-Identifier: Apache-2.0
"""ops/lowering: weights of MatMulNBits and GatherBlockQuantized, against ORT's kernels and bytes of ops.q4nx."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from flownpu.ops import q4nx

F32 = TensorProto.FLOAT


def session(ep_devices: list[Any], model: onnx.ModelProto, **options: str) -> onnxruntime.InferenceSession:
    configuration = onnxruntime.SessionOptions()
    configuration.add_provider_for_devices(ep_devices, options)
    return onnxruntime.InferenceSession(model.SerializeToString(), configuration)


def stock(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def codes_of(rng: np.random.Generator, rows: int, columns: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes packed as MatMulNBits has them, and scales that bf16 holds exactly, so that Q4NX rounds nothing of them."""
    blocks = -(-columns // block)
    codes = rng.integers(0, 256, (rows, blocks, block // 2), np.uint8)
    scales = (rng.integers(128, 256, (rows, blocks)) * 2.0**-14).astype(np.float32)
    return codes, scales


def points_of(rng: np.random.Generator, kind: str, rows: int, blocks: int) -> np.ndarray | None:
    """Zero points: none, packed with whole bytes a row, as floats, or all 8 in either form."""
    if kind == "none":
        return None
    if kind == "packed":
        return rng.integers(0, 256, (rows, -(-blocks // 2)), np.uint8)
    if kind == "packed eights":
        points = np.full((rows, -(-blocks // 2)), 0x88, np.uint8)
        points[:, -1] ^= 0x30 * (blocks % 2)  # padding behind the last block, which must not be read
        return points
    if kind == "eights":
        return np.full((rows, blocks), 8, np.float32)
    return rng.integers(0, 16, (rows, blocks)).astype(np.float32)


def numbers_of(points: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
    """Zero points as floats, one for each scale."""
    if points is None:
        return np.full(shape, 8, np.float32)
    if points.dtype == np.uint8:
        points = np.stack([points & 15, points >> 4], -1).reshape(len(points), -1)[:, : shape[1]]
    return points.astype(np.float32)


def unpacked(codes: np.ndarray, columns: int) -> np.ndarray:
    return np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)[:, :columns]


def dequantized(
    codes: np.ndarray, scales: np.ndarray, points: np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """The weight and the blocks' minima, in float64."""
    block = codes.shape[2] * 2
    scale, point = (np.repeat(values.astype(np.float64), block, 1)[:, :columns] for values in (scales, points))
    return scale * (unpacked(codes, columns) - point), -scales.astype(np.float64) * points


def matmul(rows: int, columns: int, block: int, constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    inputs = ["x", *(name if name in constants else "" for name in ("codes", "scales", "points", "g_idx", "bias"))]
    while inputs[-1] == "":
        inputs.pop()
    node = helper.make_node(
        "MatMulNBits", inputs, ["y"], "product", domain="com.microsoft", N=rows, K=columns, bits=4, block_size=block
    )
    initializers = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    values = (
        helper.make_tensor_value_info("x", F32, ["tokens", columns]),
        helper.make_tensor_value_info("y", F32, ["tokens", rows]),
    )
    graph = helper.make_graph([node], "g", [values[0]], [values[1]], initializers)
    return helper.make_model(
        graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    )


def compiled(ep_devices: list[Any], model: onnx.ModelProto, folder: Path) -> bytes:
    """The constants of a compiled model."""
    onnx.save(model, folder / "m.onnx")
    configuration = onnxruntime.SessionOptions()
    configuration.add_session_config_entry("ep.context_enable", "1")
    configuration.add_provider_for_devices(ep_devices, {})
    onnxruntime.InferenceSession(str(folder / "m.onnx"), configuration)
    # Small models' nodes fill less than the first page (ep/context/file.h).
    return (folder / "m_ctx.0.flownpu").read_bytes()[4096:]


def quantized(codes: np.ndarray, scales: np.ndarray, points: np.ndarray | None, columns: int) -> q4nx.Quantized:
    """The same weight for ops.q4nx: codes, scales and minima."""
    repeats, groups = codes.shape[2] * 2 // q4nx.GROUP, -(-columns // q4nx.GROUP)
    minima = -scales * numbers_of(points, scales.shape)
    return q4nx.from_affine(
        unpacked(codes, columns), *(np.repeat(values, repeats, 1)[:, :groups] for values in (scales, minima))
    )


LAYOUTS = {
    "none": q4nx.SYMMETRIC,
    "packed eights": q4nx.SYMMETRIC,
    "eights": q4nx.SYMMETRIC,
    "packed": q4nx.NARROW,
    "numbers": q4nx.NARROW,
}


@pytest.mark.parametrize("points", LAYOUTS)
@pytest.mark.parametrize(("rows", "columns", "block"), [(40, 96, 32), (96, 320, 64)])
def test_packed_bytes_equal_file_rule(
    ep_devices: list[Any], tmp_path: Path, rows: int, columns: int, block: int, points: str
) -> None:
    """A session packs the bytes that `flownpu convert` packs with ops.q4nx; a compiled model keeps them."""
    rng = np.random.default_rng(rows)
    codes, scales = codes_of(rng, rows, columns, block)
    constants = {"codes": codes, "scales": scales}
    zero_points = points_of(rng, points, rows, scales.shape[1])
    if zero_points is not None:
        constants["points"] = zero_points
    found = compiled(ep_devices, matmul(rows, columns, block, constants), tmp_path)
    expected = q4nx.pack(*quantized(codes, scales, zero_points, columns), LAYOUTS[points])
    assert found == expected.tobytes()


@pytest.mark.parametrize("points", [("none", "none"), ("none", "packed"), ("numbers", "eights")])
def test_joined_weights_have_no_minima_if_no_part_has(
    ep_devices: list[Any], tmp_path: Path, points: tuple[str, str]
) -> None:
    """A gate and an up projection, each padded to blocks of 32 rows."""
    rng = np.random.default_rng(1)
    rows, columns = 40, 96
    nodes, constants, parts = [], {}, []
    for name, kind in zip(("gate", "up"), points, strict=True):
        codes, scales = codes_of(rng, rows, columns, 32)
        zero_points = points_of(rng, kind, rows, columns // 32)
        given = {"codes": codes, "scales": scales} | ({} if zero_points is None else {"points": zero_points})
        (node,) = matmul(rows, columns, 32, given).graph.node
        node.name, node.input[1:], node.output[0] = name, [f"{name}.{key}" for key in given], name
        nodes.append(node)
        constants |= {f"{name}.{key}": value for key, value in given.items()}
        parts.append(quantized(codes, scales, zero_points, columns))
    nodes.append(helper.make_node("FastGelu", ["gate"], ["activated"], "activation", domain="com.microsoft"))
    nodes.append(helper.make_node("Mul", ["activated", "up"], ["y"], "gated"))
    model = matmul(rows, columns, 32, constants)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    layout = q4nx.SYMMETRIC if {LAYOUTS[kind] for kind in points} == {q4nx.SYMMETRIC} else q4nx.NARROW
    assert compiled(ep_devices, model, tmp_path) == q4nx.pack_gated(*parts, layout).tobytes()


def test_weights_with_same_codes_keep_own_scales(ep_devices: list[Any]) -> None:
    """Codes are shared by two products, whose scales are not the same."""
    rng = np.random.default_rng(2)
    rows, columns = 32, 64
    codes, scales = codes_of(rng, rows, columns, 32)
    both = {"first": scales, "second": scales[::-1].copy()}
    model = matmul(rows, columns, 32, {"codes": codes, **both})
    (product,) = model.graph.node
    del model.graph.node[:], model.graph.output[:]
    for name in both:
        node = model.graph.node.add()
        node.CopyFrom(product)
        node.name, node.input[1:], node.output[0] = name, ["codes", name], f"y.{name}"
        model.graph.output.append(helper.make_tensor_value_info(f"y.{name}", F32, ["tokens", rows]))
    # Rows of the identity read a weight column by column; bf16 holds them exactly.
    found = session(ep_devices, model, activations="bf16").run(None, {"x": np.eye(columns, dtype=np.float32)})
    for each, product_of_ones in zip(both.values(), found, strict=True):
        weight, _ = dequantized(codes, each, numbers_of(None, each.shape), columns)
        np.testing.assert_array_equal(product_of_ones.T, weight)


def test_tied_table_is_packed_once(ep_devices: list[Any], tmp_path: Path) -> None:
    """An embedding that is the LM head, too, is one constant, though the graph reshapes it for the lookup."""
    rng = np.random.default_rng(3)
    rows, columns = 64, 96
    codes, scales = codes_of(rng, rows, columns, 32)
    product = matmul(rows, columns, 32, {"codes": codes, "scales": scales}).graph
    shape = onnx.numpy_helper.from_array(np.array([rows, columns // 2]), "shape")
    nodes = [
        helper.make_node("Reshape", ["codes", "shape"], ["table"]),
        helper.make_node(
            "GatherBlockQuantized", ["table", "tokens", "scales"], ["x"], "rows", domain="com.microsoft",
            bits=4, block_size=32, gather_axis=0, quantize_axis=1,
        ),
        *product.node,
    ]  # fmt: skip
    tokens = helper.make_tensor_value_info("tokens", TensorProto.INT64, ["n"])
    graph = helper.make_graph(nodes, "g", [tokens], list(product.output), [*product.initializer, shape])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, ir_version=10, opset_imports=opsets)
    feeds = {"tokens": np.array([0, 63, 5])}
    found = session(ep_devices, model, activations="bf16").run(None, feeds)[0]
    expected = stock(model).run(None, feeds)[0]
    weight, _ = dequantized(codes, scales, numbers_of(None, scales.shape), columns)
    # As above; a minimum of -8 scales is exact.
    x = weight[feeds["tokens"]]
    np.testing.assert_array_less(np.abs(found - expected), 6 * 2.0**-9 / np.sqrt(3) * np.sqrt((x**2) @ (weight**2).T))
    assert len(compiled(ep_devices, model, tmp_path)) == np.prod(q4nx.blocks_shape(rows, columns, q4nx.SYMMETRIC))

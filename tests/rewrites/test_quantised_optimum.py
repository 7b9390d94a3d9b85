# SPDX-License-Identifier: Apache-2.0
"""Exports of optimum whose weights ONNX Runtime's tools quantised: codes are kept, and attention is folded as ever."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantFormat
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from flownpu.convert import convert
from flownpu.graph_rewrites.testing import Array
from flownpu.ops import q4nx
from tests.rewrites.optimum_reference import (
    BFLOAT16_TOLERANCE,
    FLOAT32_TOLERANCE,
    calls,
    check_close,
    feeds_of,
    open_session,
    valid,
)

BLOCK = 32


def nbits(bits: int, **options: Any) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    """Quantises products, and with 4 bits the words' table, by ONNX Runtime's tool."""

    def quantise(model: onnx.ModelProto) -> onnx.ModelProto:
        chosen = {"bits": bits, "block_size": BLOCK, "quant_format": QuantFormat.QOperator} | options
        tool = MatMulNBitsQuantizer(model, **chosen)
        tool.process()
        return tool.model.model

    return quantise


def int8_rows(model: onnx.ModelProto) -> onnx.ModelProto:
    """QDQ of int8 with a scale for each row of W [M, K], as ONNX Runtime's static quantisation stores weights."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for index in reversed(range(len(model.graph.node))):
        node = model.graph.node[index]
        if node.op_type == "MatMul" and node.input[1] in tensors:
            name, weight = node.input[1], numpy_helper.to_array(tensors[node.input[1]])
            scales = np.abs(weight).max(0) / 127
            codes = np.rint(weight / scales).astype(np.int8)
            tensors[name].CopyFrom(numpy_helper.from_array(codes, name))
            model.graph.initializer.append(numpy_helper.from_array(scales, f"{name}_scales"))
            made = helper.make_node("DequantizeLinear", [name, f"{name}_scales"], [f"{name}_floats"], axis=1)
            node.input[1] = made.output[0]
            model.graph.node.insert(index, made)
    return model


TABLE, PRODUCTS = ("MatMul", "Gather"), ("MatMul",)
FORMS: dict[str, tuple[Callable[[onnx.ModelProto], onnx.ModelProto], q4nx.Layout]] = {
    "4 bits": (nbits(4, is_symmetric=True, op_types_to_quantize=TABLE), q4nx.SYMMETRIC),
    "4 bits with zero points": (nbits(4, is_symmetric=False, op_types_to_quantize=TABLE), q4nx.NARROW),
    "8 bits": (nbits(8, is_symmetric=True, op_types_to_quantize=PRODUCTS), q4nx.EIGHT_BITS),
    "QDQ of 4 bits": (
        nbits(4, is_symmetric=True, op_types_to_quantize=PRODUCTS, quant_format=QuantFormat.QDQ),
        q4nx.SYMMETRIC,
    ),
    "QDQ of int8": (int8_rows, q4nx.EIGHT_BITS),
}


def _write(source: Path, folder: Path, quantise: Callable[[onnx.ModelProto], onnx.ModelProto]) -> onnx.ModelProto:
    """Writes the quantised export, with scales of 4 bits, whose products with zero points bfloat16 holds, too."""
    folder.mkdir()
    model = quantise(onnx.load(source / "model.onnx"))
    for tensor in model.graph.initializer:
        if tensor.name.endswith("_scales"):
            mantissa, exponent = np.frexp(numpy_helper.to_array(tensor))
            rounded = np.ldexp(np.rint(mantissa * 16) / 16, exponent).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
    onnx.save(model, folder / "model.onnx")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return model


def _weights(model: onnx.ModelProto) -> dict[str, Array]:
    """The weights [M, K] that the codes of products stand for, by their codes' names without the tool's suffixes."""
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type == "MatMulNBits":
            codes, scales = (tensors[name] for name in node.input[1:3])
            middle = 1 << attributes["bits"] - 1
            if attributes["bits"] == 4:
                codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], -1)
            points = np.full_like(scales, middle)
            if len(node.input) > 3:
                both = tensors[node.input[3]].reshape(len(scales), -1)
                points = np.stack([both & 15, both >> 4], -1).reshape(len(scales), -1)[:, : scales.shape[1]]
            weight = (codes.astype(np.float32) - points[..., None]) * scales[..., None]
            found[node.input[1].rpartition("_Q")[0]] = weight.reshape(len(scales), -1)[:, : attributes["K"]]
        elif node.op_type == "DequantizeLinear":
            codes, scales = (np.atleast_2d(tensors[name]) for name in node.input[:2])
            spread = np.repeat(scales, attributes.get("block_size", 1), 0)[: len(codes)]
            found[node.input[0].removesuffix("_DQ_Q4")] = (codes.astype(np.float32) * spread).T
    return found


@pytest.mark.parametrize("form", FORMS)
def test_codes_are_kept_and_outputs_equal_source(
    form: str, references: dict[str, Path], ep_devices: list[Any], tmp_path: Path
) -> None:
    quantise, layout = FORMS[form]
    expected = _weights(_write(references["llama"], tmp_path / "source", quantise))
    convert(tmp_path / "source", tmp_path / "model")
    tensors = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "model" / "model.onnx").graph.initializer}
    alone = {name: blocks for name, blocks in tensors.items() if name.startswith("onnx::MatMul") and "Q4NX" in name}
    # Queries, keys and values are joined, and so are the gate and the up projection: the outputs tell about these.
    assert len(alone) == 2 * 2 + 1
    for name, blocks in alone.items():
        weight = expected[name.split("_Q")[0].removesuffix("_DQ")]
        assert q4nx.layout_of(blocks) == layout
        np.testing.assert_array_equal(q4nx.dequantize(blocks, *weight.shape), weight)

    manifest = json.loads((tmp_path / "model" / "flownpu_manifest.json").read_text())["quantisation"]
    assert [attention["folding_level"] for attention in manifest["rewrites"]["attentions"]] == [3, 3]
    # Optimised, ONNX Runtime rounds what it multiplies with QDQ's weights to int8.
    session = open_session(tmp_path / "source", optimised=False)
    options = ort.SessionOptions()
    options.add_provider_for_devices(ep_devices[:1], {"device": "cpu", "activations": "bf16"})
    others = {FLOAT32_TOLERANCE: None, BFLOAT16_TOLERANCE: options}
    for tolerance, chosen in others.items():
        other = open_session(tmp_path / "model", chosen)
        for arguments in calls("llama"):
            feeds = feeds_of(session, **arguments)
            outputs = [valid(session, one.run(None, feeds), feeds) for one in (session, other)]
            check_close(*outputs, tolerance=tolerance)

# SPDX-License-Identifier: Apache-2.0
"""References: optimum's exports with weights that went through Q4NX, their inputs, and the comparison of outputs."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from flownpu.graph_rewrites.testing import BFLOAT16_ROUNDING, FLOAT32_ROUNDING, Array
from flownpu.ops import q4nx
from tests.rewrites.optimum_export import DECODER, DECODERS, WINDOW

# Products that a value goes through, one after the other: four of each layer and two of its attention, and the last.
PRODUCTS = 6 * DECODER["num_hidden_layers"] + 1
# Two evaluations in float32: a sum of K terms is off by about sqrt(K) roundings of its size, K is at most the
# feed-forward's, and independent errors add up in quadrature. float32_tolerance in tests/decoding.py has the factor 4.
FLOAT32_TOLERANCE = 4 * math.sqrt(2 * PRODUCTS * DECODER["intermediate_size"]) * FLOAT32_ROUNDING
# The CPU device rounds what it multiplies to bfloat16, once before each product.
BFLOAT16_TOLERANCE = PRODUCTS * BFLOAT16_ROUNDING


def write_reference(source: Path, folder: Path) -> Path:
    """Copies an export, its weights rounded as those of the folded model are; returns `folder`."""
    shutil.copytree(source, folder)
    model = onnx.load(source / "model.onnx")
    weights = _quantised(model)
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            array = numpy_helper.to_array(tensor)
            rounded = _through_q4nx(array.T).T if weights[tensor.name] else _through_q4nx(array)
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(rounded), tensor.name))
    onnx.save(model, folder / "model.onnx")
    return folder


def _quantised(model: onnx.ModelProto) -> dict[str, bool]:
    """Names of the weights of products and of the words' table, and whether they are stored as [K, M]."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in shapes:
            found[node.input[1]] = True
        elif node.op_type == "Gemm" and min(shapes[node.input[1]]) >= q4nx.BLOCK_ROWS:
            found[node.input[1]] = not any(a.name == "transB" and a.i for a in node.attribute)
        elif node.op_type == "Gather" and any(part in node.input[0] for part in ("embed_tokens", "word_", "token_emb")):
            found[node.input[0]] = False
    return found


def _through_q4nx(weight: Array) -> Array:
    return q4nx.dequantize_codes(q4nx.quantize(np.ascontiguousarray(weight)))


def open_session(
    folder: Path, options: ort.SessionOptions | None = None, *, optimised: bool = True
) -> ort.InferenceSession:
    """A session of a folder's model, on ONNX Runtime's CPU provider unless the options say otherwise."""
    options = options or ort.SessionOptions()
    options.log_severity_level = 3
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(folder / "model.onnx"), options)


def feeds_of(session: ort.InferenceSession, *, past: int = 0, new: int = 11, pad: str = "right") -> dict[str, Array]:
    """Inputs for a session: a batch of two whose first row has three tokens of padding.

    Parts of a prompt, with a past and several new tokens, are a batch of one; with a past only `pad="left"` pads.
    """
    generator = np.random.default_rng(3)
    batch = 2 if past == 0 or new == 1 else 1
    mask = np.ones((batch, past + new), np.int64)
    mask[0, slice(None, 3) if pad == "left" else slice(-3, None)] = (
        0 if batch > 1 and (past == 0 or pad == "left") else 1
    )
    made = {
        "input_ids": lambda: _end(generator.integers(4, 260, (batch, new)), mask[:, -new:]),
        "token_type_ids": lambda: generator.integers(0, 2, (batch, new)),
        "attention_mask": lambda: mask,
        "position_ids": lambda: np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -new:],
        "pixel_values": lambda: generator.standard_normal((batch, 3, 30, 30), np.float32),
    }
    heads, size = DECODER["num_key_value_heads"], DECODER["head_dim"]
    return {
        value.name: made[value.name]()
        if value.name in made
        else generator.standard_normal((batch, heads, past, size), np.float32)
        for value in session.get_inputs()
    }


def _end(ids: Array, mask: Array) -> Array:
    """Ends each text: CLIP's embedding is that of the end token or, without one, of the first token, maybe padding."""
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    ids[np.arange(len(ids)), last] = DECODER["eos_token_id"]
    return ids


def valid(session: ort.InferenceSession, outputs: list[Any], feeds: dict[str, Array]) -> dict[str, Array]:
    """Outputs by name, without the tokens that are padding."""
    found = {}
    for value, output in zip(session.get_outputs(), outputs, strict=True):
        array = output
        if value.name in {"last_hidden_state"} or (value.name == "logits" and output.ndim == 3):
            array = output[feeds["attention_mask"][:, -output.shape[1] :] == 1]
        elif value.name.startswith("present"):
            array = output.swapaxes(1, 2)[feeds["attention_mask"] == 1]
        found[value.name] = array
    return found


def check_close(expected: dict[str, Array], found: dict[str, Array], tolerance: float) -> None:
    """Asserts that outputs have the same shapes and differ, in norm, by at most `tolerance` times the expected norm."""
    for name, array in expected.items():
        assert found[name].shape == array.shape
        assert np.linalg.norm(found[name] - array) <= tolerance * np.linalg.norm(array), name


CALLS = {
    "right": {"pad": "right"},
    "left": {"pad": "left"},
    "decode": {"past": WINDOW + 3, "new": 1, "pad": "left"},
    "chunk": {"past": 5, "new": 6},
}


def calls(name: str) -> list[dict[str, Any]]:
    """Arguments of feeds_of: padding on either side; for a decoder also single tokens and parts of a prompt."""
    return [arguments for arguments in CALLS.values() if name in DECODERS or "past" not in arguments]

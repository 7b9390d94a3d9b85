# SPDX-License-Identifier: Apache-2.0
"""optimum's exports, folded: against the export itself with the weights that the folded model has."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from flownpu.convert import ConversionError, convert
from flownpu.graph_rewrites.testing import BFLOAT16_ROUNDING, FLOAT32_ROUNDING, Array
from flownpu.ops import q4nx
from tests.rewrites.optimum_export import DECODER, DECODERS, ENCODER, NEW_TOKENS, TASKS, WINDOW, call, family

if TYPE_CHECKING:
    from pathlib import Path

EP = "FlowNPUExecutionProvider"
# on_unsupported is `error`: a session that starts has left no node to another provider.
OPTIONS = {"device": "cpu", "activations": "bf16"}

# Products that a value goes through, one after the other: four of a layer and two of its attention, and the last.
PRODUCTS = 6 * DECODER["num_hidden_layers"] + 1
# Two evaluations in float32: a sum of K terms is off by K roundings of them; K is at most the feed-forward's size.
FLOAT32_TOLERANCE = 2 * PRODUCTS * DECODER["intermediate_size"] * FLOAT32_ROUNDING
# The CPU device rounds what it multiplies to bfloat16, once before each product.
BFLOAT16_TOLERANCE = PRODUCTS * BFLOAT16_ROUNDING


@pytest.fixture(scope="module")
def references(optimum_exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The exports, plain as they are, with weights that went through Q4NX."""
    folder = tmp_path_factory.mktemp("references")
    for name, source in optimum_exports.items():
        shutil.copytree(source, folder / name)
        model = onnx.load(source / "model.onnx")
        weights = _quantised(model)
        for tensor in model.graph.initializer:
            if tensor.name in weights:
                array = numpy_helper.to_array(tensor)
                rounded = _through_q4nx(array.T).T if weights[tensor.name] else _through_q4nx(array)
                tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(rounded), tensor.name))
        onnx.save(model, folder / name / "model.onnx")
    return {name: folder / name for name in optimum_exports}


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


def _session(
    folder: Path, options: ort.SessionOptions | None = None, *, optimised: bool = True
) -> ort.InferenceSession:
    options = options or ort.SessionOptions()
    options.log_severity_level = 3
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(str(folder / "model.onnx"), options)


def _flownpu(device: Any, folder: Path, **more: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.add_provider_for_devices([device], {**OPTIONS, **more})
    return _session(folder, options)


def _feeds(session: ort.InferenceSession, *, past: int = 0, new: int = 11, pad: str = "right") -> dict[str, Array]:
    """A batch of two; in the first row, three tokens are padding."""
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
    """The texts with an end: CLIP's embedding is of that token, and of the first, which may be padding, without it."""
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    ids[np.arange(len(ids)), last] = DECODER["eos_token_id"]
    return ids


def _valid(session: ort.InferenceSession, outputs: list[Any], feeds: dict[str, Array]) -> dict[str, Array]:
    """Outputs by name, without those of padding."""
    found = {}
    for value, output in zip(session.get_outputs(), outputs, strict=True):
        array = output
        if value.name in {"last_hidden_state"} or (value.name == "logits" and output.ndim == 3):
            array = output[feeds["attention_mask"][:, -output.shape[1] :] == 1]
        elif value.name.startswith("present"):
            array = output.swapaxes(1, 2)[feeds["attention_mask"] == 1]
        found[value.name] = array
    return found


def _check_close(expected: dict[str, Array], found: dict[str, Array], tolerance: float) -> None:
    for name, array in expected.items():
        assert found[name].shape == array.shape
        assert np.linalg.norm(found[name] - array) <= tolerance * np.linalg.norm(array), name


CALLS = {
    "right": {"pad": "right"},
    "left": {"pad": "left"},
    "decode": {"past": WINDOW + 3, "new": 1, "pad": "left"},
    "chunk": {"past": 5, "new": 6},
}


def _calls(name: str) -> list[dict[str, Any]]:
    return [arguments for arguments in CALLS.values() if name in DECODERS or "past" not in arguments]


@pytest.mark.parametrize("name", TASKS)
def test_every_attention_is_folded(name: str, folded: dict[str, Path]) -> None:
    manifest = json.loads((folded[name] / "flownpu_manifest.json").read_text())
    rewrites = manifest["quantisation"]["rewrites"]
    layers = ENCODER["num_hidden_layers"] * (2 if name == "clip" else 1)
    assert [attention["folding_level"] for attention in rewrites["attentions"]] == [3] * layers
    assert rewrites["operators"]["ai.flownpu.FlowQKVAttention"] == layers
    assert not {"Softmax", "Erf", "RotaryEmbedding"} & set(rewrites["operators"])
    for attention in rewrites["attentions"]:
        assert attention["kind"] == ("GQA" if name in DECODERS else "MHA")
        assert attention["causal"] == attention["cached"] == (name in DECODERS)
    windows = [attention["window"] for attention in rewrites["attentions"]]
    assert windows == ([WINDOW, -1] if name.startswith("gemma") else [-1] * layers)
    # All that a rule saw and left; token_type_ids have 2 rows, and so has a classifier.
    small = {"bert": {"embedding"}, "bert-classification": {"embedding", "projection"}, "vit": {"projection"}}
    assert {miss["rule"] for miss in rewrites["misses"]} == small.get(family(name), set())


@pytest.mark.parametrize("optimised", [True, False], ids=["optimised", "as it is"])
@pytest.mark.parametrize("name", TASKS)
def test_same_outputs_where_flownpu_is_not_installed(
    name: str, optimised: bool, folded: dict[str, Path], references: dict[str, Path]
) -> None:
    expected, found = _session(references[name]), _session(folded[name], optimised=optimised)
    for arguments in _calls(name):
        feeds = _feeds(expected, **arguments)
        outputs = [_valid(expected, session.run(None, feeds), feeds) for session in (expected, found)]
        _check_close(*outputs, tolerance=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("name", TASKS)
def test_same_outputs_on_the_cpu_device(
    name: str, folded: dict[str, Path], references: dict[str, Path], ep_devices: list[Any], tmp_path: Path
) -> None:
    report = tmp_path / "placement.json"
    expected, found = _session(references[name]), _flownpu(ep_devices[0], folded[name], placement=str(report))
    for arguments in _calls(name):
        feeds = _feeds(expected, **arguments)
        outputs = [_valid(expected, session.run(None, feeds), feeds) for session in (expected, found)]
        _check_close(*outputs, tolerance=BFLOAT16_TOLERANCE)
    placement = json.loads(report.read_text())
    assert (placement["left"], placement["inlined"], placement["partitions"]) == ([], [], 1)
    if name in DECODERS:
        assert placement["whole_prompts"] == []  # long prompts are computed some hundred tokens at a time


@pytest.fixture(scope="module")
def generated(
    folded: dict[str, Path], references: dict[str, Path], optimum_python: Path, library: Path, tmp_path_factory: Any
) -> dict[tuple[str, str, str], dict[str, Array]]:
    """What ORTModelForCausalLM generates, by (model, padding, engine)."""
    folder = tmp_path_factory.mktemp("generated")
    generator = np.random.default_rng(9)
    ids = generator.integers(4, 260, (2, 10))
    engines = {
        "reference": (references, "CPUExecutionProvider", {}),
        "onnxruntime": (folded, "CPUExecutionProvider", {}),
        "flownpu": (folded, EP, OPTIONS),
    }
    runs = {}
    for pad in ("left", "right"):
        mask = np.ones_like(ids)
        mask[0, slice(None, 4) if pad == "left" else slice(-4, None)] = 0
        inputs = folder / f"{pad}.npz"
        np.savez(inputs, input_ids=np.where(mask == 1, ids, DECODER["pad_token_id"]), attention_mask=mask)
        for name in DECODERS:
            for engine, (models, provider, options) in engines.items():
                runs[name, pad, engine] = {
                    "model": str(models[name]),
                    "provider": provider,
                    "options": options,
                    "inputs": str(inputs),
                    "output": str(folder / f"{name}-{pad}-{engine}.npz"),
                }
    call(optimum_python, "generate", library=str(library), runs=list(runs.values()))
    return {key: dict(np.load(run["output"])) for key, run in runs.items()}


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_optimum_generates_the_same_tokens(name: str, pad: str, generated: Any) -> None:
    reference = generated[name, pad, "reference"]
    np.testing.assert_array_equal(generated[name, pad, "onnxruntime"]["tokens"], reference["tokens"])
    found, same = generated[name, pad, "flownpu"], 0
    for row in range(2):
        for step in range(NEW_TOKENS):
            expected, logits = reference["logits"][row, step], found["logits"][row, step]
            error = BFLOAT16_TOLERANCE * np.linalg.norm(expected)
            assert np.linalg.norm(logits - expected) <= error
            ours, theirs = found["tokens"][row, step], reference["tokens"][row, step]
            if ours != theirs:  # only between logits that rounding may swap; then the texts part
                assert expected[theirs] - expected[ours] <= 2 * np.max(np.abs(logits - expected))
                break
            same += 1
    assert same >= NEW_TOKENS


def _changed(source: Path, folder: Path, change: Any) -> Path:
    shutil.copytree(source, folder)
    model = onnx.load(folder / "model.onnx")
    change(model)
    onnx.save(model, folder / "model.onnx")
    return folder


def _to_float16(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float16), tensor.name))


def _to_custom(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "Erf")
    node.domain, node.op_type = "somebody.else", "FastErf"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_to_custom, "somebody.else.FastErf: operators that ONNX Runtime does not have"),
        (_to_float16, "expected products with float32 weights, and none of them can be used"),
    ],
)
def test_refused(change: Any, reason: str, optimum_exports: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=reason):
        convert(_changed(optimum_exports["bert"], tmp_path / "source", change), tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_folder_refused(optimum_exports: dict[str, Path], folded: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="is a model for FlowNPU already"):
        convert(folded["vit"], tmp_path / "output")
    with pytest.raises(ConversionError, match="a KV cache in float32 that grows"):
        convert(optimum_exports["llama"], tmp_path / "output", kv_dtype="fp16")
    with pytest.raises(ConversionError, match="expected a context length of 1 to 512, got 513"):
        convert(optimum_exports["llama"], tmp_path / "output", context_length=513)
    source = tmp_path / "parts"
    shutil.copytree(optimum_exports["vit"], source)
    (source / "model.onnx").rename(source / "encoder_model.onnx")
    with pytest.raises(ConversionError, match=r"a model in one graph, and found encoder_model\.onnx"):
        convert(source, tmp_path / "output")

# SPDX-License-Identifier: Apache-2.0
"""`flownpu convert` of a GenAI model folder: its output, its refusals, and runs in GenAI."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime_genai as og
import pytest

from flownpu.convert import ConversionError, convert
from flownpu.explain.overview import explain
from tests.decoding import DecoderSession, float32_tolerance
from tests.rewrites.genai_export import SIZES, WINDOW

PROMPT = "The for statement is used to iterate over"


@pytest.fixture
def source(exports: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the tiny Gemma3 export that a test may spoil."""
    return shutil.copytree(exports["gemma3"], tmp_path / "source")


def test_converted_folder_has_exact_weights(source: Path, tmp_path: Path) -> None:
    before = _config(source)
    convert(source, tmp_path / "model")
    folder = tmp_path / "model"
    expected = {"model.onnx", "model.onnx.data", "genai_config.json", "flownpu_manifest.json"}
    assert {path.name for path in folder.iterdir()} == expected | {"tokenizer.json", "tokenizer_config.json"}

    config = _config(folder)
    assert config["model"]["decoder"]["session_options"].pop("provider_options") == [{"FlowNPUExecutionProvider": {}}]
    # Caches have the whole context, so GenAI must not size them by the window; all else is as in the source.
    assert before["model"]["decoder"].pop("sliding_window")["layers"] == [0, 1]
    before["model"]["decoder"]["session_options"].pop("provider_options")
    assert config == before

    manifest = json.loads((folder / "flownpu_manifest.json").read_text())
    assert manifest["source"]["kind"] == "genai"
    assert set(manifest["source"]["files"]) >= {"model.onnx", "model.onnx.data", "genai_config.json"}
    assert set(manifest["files"]) == {path.name for path in folder.iterdir()} - {"flownpu_manifest.json"}
    errors = manifest["quantisation"]["relative_error"]
    assert len(errors) == 3 * 4 + 1
    assert set(errors.values()) == {0.0}  # the export's scales are values of bf16
    assert manifest["quantisation"]["rewrites"]["misses"] == []


def test_tensors_are_aligned_and_in_order_of_use(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "model")
    path = tmp_path / "model" / "model.onnx"
    graph = onnx.load(path, load_external_data=False).graph
    offsets = {}
    for tensor in graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            assert entries["location"] == "model.onnx.data"
            offsets[tensor.name] = int(entries["offset"])
    assert offsets
    assert all(offset % 4096 == 0 for offset in offsets.values())
    first_use = dict.fromkeys(name for node in graph.node for name in node.input if name in offsets)
    assert [offsets[name] for name in first_use] == sorted(offsets.values())


def test_window_sized_caches_are_kept_when_asked_for(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "model", sliding_window_cache=True)
    assert _config(tmp_path / "model")["model"]["decoder"]["sliding_window"] == {
        **_config(source)["model"]["decoder"]["sliding_window"],
        "window_size": 16,
        "slide_key_value_cache": False,
        "layers": [0, 1],
    }


@pytest.mark.parametrize("layers", [[], [1]], ids=str)
def test_window_only_in_configuration_is_converted(layers: list[int], exports: dict[str, Path], tmp_path: Path) -> None:
    """As GenAI's builder writes Mistral; an empty list means all layers. Reference: ORT with windows in the graph."""
    source, folder, expected = tmp_path / "source", tmp_path / "model", tmp_path / "expected"
    shutil.copytree(exports["llama"], source)
    shutil.copytree(source, expected)
    model = onnx.load(expected / "model.onnx", load_external_data=False)
    attentions = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    for layer in layers or range(len(attentions)):
        next(a for a in attentions[layer].attribute if a.name == "local_window_size").i = WINDOW
    onnx.save(model, expected / "model.onnx")
    _edit_decoder(source, sliding_window={"window_size": WINDOW, "slide_key_value_cache": False, "layers": layers})
    convert(source, folder, kv_dtype="fp32", logits="all")
    assert "sliding_window" not in _config(folder)["model"]["decoder"]
    ids = np.random.default_rng(2).integers(4, 260, (1, 2 * WINDOW))
    reference, whole = DecoderSession(expected)(ids), DecoderSession(exports["llama"])(ids)
    atol = float32_tolerance(reference, SIZES["num_hidden_layers"], SIZES["intermediate_size"])
    np.testing.assert_allclose(DecoderSession(folder)(ids), reference, rtol=0, atol=atol)
    assert np.abs(whole[:, WINDOW:] - reference[:, WINDOW:]).max() > 100 * atol
    # Where caches have the window's size, genai_config.json keeps its section, with the layers listed.
    convert(source, tmp_path / "windowed", sliding_window_cache=True)
    section = _config(tmp_path / "windowed")["model"]["decoder"]["sliding_window"]
    assert section["layers"] == (layers or [0, 1, 2])


@pytest.mark.parametrize("opset", [14, 18, 20])
def test_older_opset_is_converted(opset: int, exports: dict[str, Path], tmp_path: Path) -> None:
    """As GenAI's builder wrote models until 2025, with other nodes' semantics unchanged: the logits are the same."""
    source = shutil.copytree(exports["llama"], tmp_path / "source")
    _set_opset(source, opset)
    convert(source, tmp_path / "model", logits="all")
    convert(exports["llama"], tmp_path / "expected", logits="all")
    ids = np.random.default_rng(3).integers(4, 260, (1, 12))
    logits, expected = (DecoderSession(tmp_path / name)(ids) for name in ("model", "expected"))
    np.testing.assert_array_equal(logits, expected)
    explanation = explain(source, {"device": "cpu"}, bandwidth=1e9)
    assert (explanation.source, explanation.misses) == ("genai", ())


def test_context_length_is_limited_by_model(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "model", context_length=100)
    config = _config(tmp_path / "model")
    assert config["model"]["context_length"] == config["search"]["max_length"] == 100
    with pytest.raises(ConversionError, match="expected a context length of 1 to 512, got 513"):
        convert(source, tmp_path / "other", context_length=513)


@pytest.mark.parametrize(
    ("kv_dtype", "sliding_window_cache"),
    [("fp32", False), ("fp32", True), ("bf16", True), ("fp16", True), ("int8", True)],
)
def test_genai_generates_from_converted_folder(
    kv_dtype: str, sliding_window_cache: bool, exports: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    convert(exports["topics"], folder, kv_dtype=kv_dtype, sliding_window_cache=sliding_window_cache)
    config = _config(folder)
    config["model"]["decoder"]["session_options"]["provider_options"] = []  # ORT's CPU provider, through the functions
    (folder / "genai_config.json").write_text(json.dumps(config))
    # 70 tokens, beyond the window of 64, in caches that GenAI shares between past and present; and the same in caches
    # that grow. They could differ only where the two likeliest tokens are equal but for float32's last bits.
    tokens = _generate(folder, 70)
    decoder, prompt = DecoderSession(folder), tokens[:-70]

    def likeliest(new: list[int]) -> int:
        logits = decoder(np.array([new]))[0, -1]
        logits[config["model"]["eos_token_id"]] = -np.inf  # GenAI's min_length forbids them too
        return int(logits.argmax())

    expected = [*prompt, likeliest(prompt)]
    while len(expected) < len(tokens):
        expected.append(likeliest(expected[-1:]))
    assert tokens == expected
    if kv_dtype == "fp32":  # the export's own type, so the same numbers too
        assert tokens == _generate(exports["topics"], 70)


def _to_custom(folder: Path, domain: str = "somebody.else", operator: str = "Norm") -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "SkipSimplifiedLayerNormalization")
    node.domain, node.op_type = domain, operator
    model.opset_import.append(onnx.helper.make_opsetid("somebody.else", 1))
    onnx.save(model, folder / "model.onnx")


def _set_opset(folder: Path, version: int) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    next(opset for opset in model.opset_import if opset.domain == "").version = version
    onnx.save(model, folder / "model.onnx")


def _spoil_scales(folder: Path) -> None:
    """Overwrites the scales of the first layer's QKV projection with NaN."""
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    tensor = next(
        t for t in model.graph.initializer if "layers.0" in t.name and t.name.endswith("qkv_proj.MatMul.weight_scales")
    )
    entries = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
    with (folder / "model.onnx.data").open("r+b") as file:
        file.seek(entries["offset"])
        file.write(b"\xff" * entries["length"])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda s: (s / "model.onnx").write_bytes(b"not a model"), "model.onnx: cannot be read as an ONNX model"),
        (lambda s: (s / "model.onnx").unlink(), "model.onnx: genai_config.json names this file, and it is missing"),
        (
            lambda s: (s / "model.onnx.data").unlink(),
            "model.onnx.data: the model's weights are in this file; it is miss",
        ),
        (
            lambda s: _truncate(s / "model.onnx.data"),
            r"model.onnx.data: expected \d+ bytes of tensor .* at \d+, and the",
        ),
        (lambda s: _move_data(s, "../model.onnx.data"), "is stored outside of the folder, in '../model.onnx.data'"),
        (lambda s: _edit(s, vision={}), r"the model has parts that cannot be converted \(vision\); export its decoder"),
        (
            lambda s: _edit_decoder(
                s, sliding_window={"window_size": 8, "slide_key_value_cache": False, "layers": [0, 3]}
            ),
            "expected a GroupQueryAttention for layer 3, and there are 3",
        ),
        (lambda s: _edit(s, decoder=None), "expected model.decoder to be an object, got None"),
        (
            lambda s: _edit_decoder(s, filename="../model.onnx"),
            "expected model.decoder.filename to be the name of a file beside it, got '../model.onnx'",
        ),
        (
            lambda s: _drop_attribute(s, "MatMulNBits", "N"),
            "the graph is damaged, .*: MatMulNBits '.*': expected the attribute 'N', got none",
        ),
        (
            lambda s: _edit_inputs(s, lambda names: names[:2]),
            "MatMulNBits .*: expected 3 inputs, got 2; ONNX",
        ),
        (
            lambda s: _edit_inputs(s, lambda names: [*names[:2], "x"]),
            "MatMulNBits .*: nothing makes its input x; .*=false",
        ),
        (lambda s: _set_opset(s, 99), r"ONNX opset 99, expected \d+ or older"),
        (lambda s: _set_opset(s, 18), r"of ONNX opset 18, which does not have Gelu \(opset 20\)"),
        (
            lambda s: _for_each_matmul(s, lambda _: 3),
            r"(?s)expected weights of 4 or 8 bits .* and 15 more: bits=3: Q4NX stores codes",
        ),
        (
            lambda s: _for_each_matmul(s, lambda _: 8, "block_size"),
            r"(?s)expected weights of 4 or 8 bits .* and 15 more: block_size=8: Q4NX has one scale for 32 columns",
        ),
        (_to_custom, "somebody.else.Norm: operators that ONNX Runtime does not have"),
        (lambda s: _to_custom(s, "com.microsoft"), "com.microsoft.Norm: operators that ONNX Runtime does not have"),
        (lambda s: _to_custom(s, ""), "ai.onnx.Norm: operators that ONNX Runtime does not have"),
        (_spoil_scales, "the graph is damaged, .*: MatMulNBits '.*': .*holds a scale that is not finite"),
        (lambda s: (s / "genai_config.json").write_text("{"), "genai_config.json: cannot be read as JSON"),
    ],
)
def test_unfit_source_is_refused(spoil: Any, reason: str, source: Path, tmp_path: Path) -> None:
    spoil(source)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConversionError, match=reason):
        convert(source, tmp_path / "model")
    assert sorted(tmp_path.iterdir()) == before


def test_converted_model_is_refused(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "model")
    with pytest.raises(ConversionError, match="is a model for FlowNPU already"):
        convert(tmp_path / "model", tmp_path / "again")


def test_left_nodes_are_logged(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _for_each_matmul(source, lambda name: 2 if "layers.1/attn/o_proj" in name else 4)
    convert(source, tmp_path / "model")
    (message,) = caplog.messages
    assert "left by q4nx_matmul: /model/layers.1/attn/o_proj/MatMul_Q4: bits=2" in message


def test_operators_of_no_device_are_logged(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, ep_devices: list[Any]
) -> None:
    model = onnx.load(source / "model.onnx", load_external_data=False)
    lookup = next(node for node in model.graph.node if "input_ids" in node.input)
    lookup.input[list(lookup.input).index("input_ids")] = "absolute"
    model.graph.node.insert(0, onnx.helper.make_node("Sign", ["input_ids"], ["absolute"], name="/absolute"))
    # The sign of a constant is computed when the session is made, so the warning is not to name it.
    one = onnx.helper.make_tensor("one", onnx.TensorProto.INT64, [1], [1])
    model.graph.initializer.append(one)
    model.graph.node.insert(0, onnx.helper.make_node("Sign", ["one"], ["absolute_one"], name="/constant"))
    model.graph.node.insert(2, onnx.helper.make_node("Mul", ["absolute", "absolute_one"], ["product"], name="/product"))
    lookup.input[list(lookup.input).index("absolute")] = "product"
    onnx.save(model, source / "model.onnx")
    convert(source, tmp_path / "model")
    said = [message for message in caplog.messages if "does not run" in message]
    assert len(said) == 1
    assert "model: FlowNPU does not run Sign (/absolute): `flownpu run` and sessions want --option on_unsup" in said[0]
    with pytest.raises(Exception, match="Sign '/absolute'"):
        DecoderSession(tmp_path / "model", ep_devices[:1])


def test_existing_output_without_force_is_kept(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "model")
    written = (tmp_path / "model" / "flownpu_manifest.json").read_bytes()
    with pytest.raises(ConversionError, match="exists"):
        convert(source, tmp_path / "model", kv_dtype="fp16")
    assert (tmp_path / "model" / "flownpu_manifest.json").read_bytes() == written
    convert(source, tmp_path / "model", kv_dtype="fp16", force=True)
    assert (tmp_path / "model" / "flownpu_manifest.json").read_bytes() != written


def _generate(folder: Path, count: int) -> list[int]:
    model = og.Model(str(folder))
    tokens = og.Tokenizer(model).encode(PROMPT)
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(do_sample=False, max_length=len(tokens) + count, min_length=len(tokens) + count)
    generator = og.Generator(model, parameters)
    generator.append_tokens(tokens)
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)]


def _config(folder: Path) -> Any:
    return json.loads((folder / "genai_config.json").read_text())


def _edit(folder: Path, **changed: Any) -> None:
    config = _config(folder)
    config["model"] |= changed
    (folder / "genai_config.json").write_text(json.dumps(config))


def _edit_decoder(folder: Path, **changed: Any) -> None:
    _edit(folder, decoder=_config(folder)["model"]["decoder"] | changed)


def _truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _move_data(folder: Path, location: str) -> None:
    shutil.move(folder / "model.onnx.data", folder / location)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    onnx.save(model, folder / "model.onnx")


def _for_each_matmul(folder: Path, value: Any, attribute: str = "bits") -> None:
    model = ir.load(folder / "model.onnx")
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            node.attributes[attribute] = ir.AttrInt64(attribute, value(node.name))
    ir.save(model, folder / "model.onnx")


def _drop_attribute(folder: Path, operator: str, name: str) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == operator)
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
    onnx.save(model, folder / "model.onnx")


def _edit_inputs(folder: Path, edit: Callable[[list[str]], list[str]]) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    names = edit(list(node.input))
    del node.input[:]
    node.input.extend(names)
    onnx.save(model, folder / "model.onnx")

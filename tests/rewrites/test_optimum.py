# SPDX-License-Identifier: Apache-2.0
"""Folded exports of optimum compute what the exports themselves compute with the same weights."""

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from flownpu.convert import ConversionError, convert
from flownpu.convert.sources.optimum_cache import unlike_the_graph
from flownpu.embed import EmbeddingModel
from flownpu.graph_rewrites.testing import Array
from tests.rewrites.optimum_export import (
    DECODER,
    DECODERS,
    ENCODER,
    NEW_TOKENS,
    OLD_OPSET,
    TASKS,
    WIDE,
    WIDE_SIZE,
    WINDOW,
    call,
    family,
)
from tests.rewrites.optimum_reference import (
    BFLOAT16_TOLERANCE,
    FLOAT32_TOLERANCE,
    calls,
    check_close,
    feeds_of,
    open_session,
    valid,
    write_reference,
)

EP = "FlowNPUExecutionProvider"
# Decoders of an older opset generate as the others do, by the outputs that tests here compare.
GENERATING = tuple(name for name in DECODERS if name not in OLD_OPSET)
# on_unsupported is `error`: a session that starts has left no node to another provider.
OPTIONS = {"device": "cpu", "activations": "bf16"}


def _flownpu(device: Any, folder: Path, **more: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.add_provider_for_devices([device], {**OPTIONS, **more})
    return open_session(folder, options)


@pytest.mark.parametrize("name", TASKS)
def test_export_is_folded_as_expected(name: str, folded: dict[str, Path]) -> None:
    rewrites = json.loads((folded[name] / "flownpu_manifest.json").read_text())["quantisation"]["rewrites"]
    assert not {"Softmax", "Erf", "RotaryEmbedding"} & set(rewrites["operators"])
    for attention in rewrites["attentions"]:
        assert attention["folding_level"] == 3
        assert attention["kind"] == ("GQA" if name in DECODERS else "MHA")
        assert attention["causal"] == attention["cached"] == (name in DECODERS)
    windows = [attention["window"] for attention in rewrites["attentions"]]
    layers = ENCODER["num_hidden_layers"] * (2 if name == "clip" else 1)
    assert windows == ([WINDOW, -1] if name.startswith("gemma") else [-1] * layers)
    # All that rules looked at and left: the token types' table has 2 rows, and so has a classifier.
    small = {"bert": {"embedding"}, "bert-classification": {"embedding", "projection"}, "vit": {"projection"}}
    assert {miss["rule"] for miss in rewrites["misses"]} == small.get(family(name), set())


@pytest.mark.parametrize("optimised", [True, False], ids=["optimised", "as it is"])
@pytest.mark.parametrize("name", TASKS)
def test_folded_graph_gives_same_outputs_without_flownpu(
    name: str, optimised: bool, folded: dict[str, Path], references: dict[str, Path]
) -> None:
    expected, found = open_session(references[name]), open_session(folded[name], optimised=optimised)
    for arguments in calls(name):
        feeds = feeds_of(expected, **arguments)
        outputs = [valid(expected, session.run(None, feeds), feeds) for session in (expected, found)]
        check_close(*outputs, tolerance=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("name", DECODERS)
def test_batches_and_parts_of_prompts_equal_source(
    name: str, folded: dict[str, Path], references: dict[str, Path], ep_devices: list[Any], tmp_path: Path
) -> None:
    report = tmp_path / "placement.json"
    expected, found = open_session(references[name]), _flownpu(ep_devices[0], folded[name], placement=str(report))
    for arguments in calls(name):
        feeds = feeds_of(expected, **arguments)
        outputs = [valid(expected, session.run(None, feeds), feeds) for session in (expected, found)]
        check_close(*outputs, tolerance=BFLOAT16_TOLERANCE)
    # Long prompts are computed some hundred tokens at a time.
    assert json.loads(report.read_text())["whole_prompts"] == []


@pytest.fixture(scope="module")
def generated(
    folded: dict[str, Path], references: dict[str, Path], optimum_python: Path, library: Path, tmp_path_factory: Any
) -> dict[tuple[str, str, str], dict[str, Array]]:
    """The tokens that ORTModelForCausalLM generates, by (model, padding, engine)."""
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
        for name, engine in [*product(GENERATING, engines), *product([WIDE], [*engines, "not told"])]:
            models, provider, options = engines["reference" if engine == "not told" else engine]
            runs[name, pad, engine] = {
                "model": str(models[name]),
                "provider": provider,
                "options": options,
                "inputs": str(inputs),
                "output": str(folder / f"{name}-{pad}-{engine}.npz"),
                "head_size": WIDE_SIZE if name == WIDE and engine != "not told" else 0,
            }
    call(optimum_python, "generate", library=str(library), runs=list(runs.values()))
    return {key: dict(np.load(run["output"])) for key, run in runs.items()}


@pytest.mark.parametrize("pad", ["left", "right"])
@pytest.mark.parametrize("name", GENERATING)
def test_optimum_generates_same_tokens(name: str, pad: str, generated: Any) -> None:
    reference = generated[name, pad, "reference"]
    np.testing.assert_array_equal(generated[name, pad, "onnxruntime"]["tokens"], reference["tokens"])
    found, same = generated[name, pad, "flownpu"], 0
    for row in range(2):
        for step in range(NEW_TOKENS):
            expected, logits = reference["logits"][row, step], found["logits"][row, step]
            error = BFLOAT16_TOLERANCE * np.linalg.norm(expected)
            assert np.linalg.norm(logits - expected) <= error
            ours, theirs = found["tokens"][row, step], reference["tokens"][row, step]
            if ours != theirs:  # only if rounding may swap the logits; from there on the texts differ
                assert expected[theirs] - expected[ours] <= 2 * np.max(np.abs(logits - expected))
                break
            same += 1
    assert same >= NEW_TOKENS


@pytest.mark.parametrize(
    ("family", "size", "mend"),
    [
        ("qwen3", 64, "takes 2 of 64; set after loading: model.embed_size_per_head = 64"),
        ("gemma2", 32, "takes 2 of 32; set after loading: model.num_key_value_heads = 2"),
        ("phi3", 64, "2 of 64; set after loading: model.num_key_value_heads = 2; model.embed_size_per_head = 64"),
        ("gemma3_text", 64, ""),
        ("llama", 32, ""),
    ],
)
def test_inputs_unlike_graph_are_named_with_remedy(family: str, size: int, mend: str) -> None:
    shape = ir.Shape(["batch_size", 2, "past_sequence_length", size])
    graph = ir.Graph([ir.Value(name="past_key_values.0.key", shape=shape)], [], nodes=[])
    said = unlike_the_graph({"model_type": family, "hidden_size": 128, "num_attention_heads": 4}, graph)
    assert said.endswith(mend)
    assert bool(said) == bool(mend)


def test_optimum_feeds_no_heads_of_their_own_size(
    generated: Any, optimum_exports: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads of 64 where hidden size / heads is 32: the error and the setting of docs/use/bring-your-model.md."""
    convert(optimum_exports[WIDE], tmp_path / "model")
    assert "feeds 2 heads of 32 where this graph takes 2 of 64" in caplog.text
    assert re.search(r"past_key_values.*\n.*Got: 32 Expected: 64", str(generated[WIDE, "left", "not told"]["error"]))
    expected, found = (generated[WIDE, "left", engine]["logits"][:, 0] for engine in ("reference", "flownpu"))
    assert np.linalg.norm(found - expected) <= BFLOAT16_TOLERANCE * np.linalg.norm(expected)


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


def _to_opset_99(model: onnx.ModelProto) -> None:
    next(opset for opset in model.opset_import if opset.domain == "").version = 99


@pytest.mark.parametrize("place", ["model.onnx", "onnx/model.onnx"])
def test_embedding_folder_pools_as_its_files_say(place: str, optimum_exports: dict[str, Path], tmp_path: Path) -> None:
    """Laid out by sentence-transformers, with optimum's graph: EmbeddingModel pools as the folder's files say."""
    source = tmp_path / "source"
    shutil.copytree(optimum_exports["bert"], source)
    (source / place).parent.mkdir(exist_ok=True)
    shutil.move(source / "model.onnx", source / place)
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "the", "river", "runs"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))  # noqa: S106  (no password)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(source / "tokenizer.json"))
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    convert(source, tmp_path / "model")
    assert (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    found = EmbeddingModel(tmp_path / "model", options=OPTIONS).embed(["the river runs", "the"]).vectors
    reference = open_session(write_reference(optimum_exports["bert"], tmp_path / "reference"))
    for vector, ids in zip(found, ([2, 3, 4], [2]), strict=True):
        feeds = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
        feeds["token_type_ids"] = np.zeros_like(feeds["input_ids"])
        pooled = reference.run(["last_hidden_state"], feeds)[0][0].mean(0)
        assert np.linalg.norm(vector - pooled / np.linalg.norm(pooled)) <= BFLOAT16_TOLERANCE


def _to_int8(model: onnx.ModelProto) -> None:
    """Makes products what ONNX Runtime's dynamic quantisation makes of them."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in tensors:
            codes = np.ones(tensors[node.input[1]].dims, np.uint8)
            tensors[node.input[1]].CopyFrom(numpy_helper.from_array(codes, node.input[1]))
            node.op_type, node.domain = "MatMulIntegerToFloat", "com.microsoft"
            node.input.extend(["scale_of_both"] * 2)
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1), "scale_of_both"))


def _to_custom(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "Erf")
    node.domain, node.op_type = "somebody.else", "FastErf"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_to_custom, "somebody.else.FastErf: operators that ONNX Runtime does not have"),
        (_to_opset_99, r"ONNX opset 99, expected \d+ or older; export with an older opset"),
        (_to_float16, "expected products with weights in float32, or of 4 or 8 bits, and none of them can be used"),
        (_to_int8, "expected products with weights in float32, or of 4 or 8 bits, and none of them can be used"),
    ],
)
def test_unfit_export_is_refused(change: Any, reason: str, optimum_exports: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=reason):
        convert(_changed(optimum_exports["bert"], tmp_path / "source", change), tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_unfit_folder_is_refused(optimum_exports: dict[str, Path], folded: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="is a model for FlowNPU already"):
        convert(folded["vit"], tmp_path / "output")
    with pytest.raises(ConversionError, match="a KV cache in float32 that grows"):
        convert(optimum_exports["llama"], tmp_path / "output", kv_dtype="fp16")
    with pytest.raises(ConversionError, match="float32 that grows"):
        convert(optimum_exports["llama"], tmp_path / "output", kv_dtype="int8")
    with pytest.raises(ConversionError, match="expected a context length of 1 to 512, got 513"):
        convert(optimum_exports["llama"], tmp_path / "output", context_length=513)
    source = tmp_path / "parts"
    shutil.copytree(optimum_exports["vit"], source)
    (source / "model.onnx").rename(source / "encoder_model.onnx")
    with pytest.raises(ConversionError, match=r"a model in one graph, and found encoder_model\.onnx"):
        convert(source, tmp_path / "output")

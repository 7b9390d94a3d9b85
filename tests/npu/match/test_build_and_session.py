# SPDX-License-Identifier: Apache-2.0
"""`flownpu build` makes artifacts for exactly those models whose layers a session gives to the array.

Where one refuses, the other gives the same reason. tests/rewrites/test_unconverted.py has models of GenAI's builder.
"""

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from flownpu.convert import convert
from flownpu.npu.artifacts import build_artifacts
from flownpu.npu.layers import decoder_of_model, read_decoder, read_encoder
from flownpu.ops.definitions import add_functions
from tests.convert.conftest import write_tiny
from tests.convert.picture_models import write_pictures_checkpoint
from tests.convert.sources.gguf_files import write_gguf
from tests.npu.match.verdicts import assert_same_decoder, told_by_build, told_by_session
from tests.npu.models import Models

Change = Callable[[ir.Model], None]

ATTENTION, PRODUCT, NORM = "FlowQKVAttention", "Q4NXMatMul", "SkipSimplifiedLayerNormalization"
ATTENTION_BIAS, HEAD_SINK = 10, 14  # inputs of attention
HEADS = 4


# --- Decoders as they are converted -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("trained", {}, ""),
        ("gemma3_text", {}, ""),
        ("gemma3_text", {"sliding_window_cache": True, "kv_dtype": "fp32"}, ""),
        ("llama", {}, ""),
        ("llama", {"logits": "all"}, ""),
        ("qwen3", {}, ""),
        ("uneven", {}, ""),
        ("narrow", {}, ""),
        ("odd", {}, ""),
        ("biases", {}, ""),
        ("llama with biases", {}, "to be read by one node, the gate and up projection, got 2 that read it"),
        ("gemma2", {}, ""),
        ("olmo2", {}, ""),
        ("experts", {}, ""),
    ],
)
def test_converted_decoders_match_in_build_and_session(
    name: str, options: dict[str, Any], reason: str, models: Models, ep_devices: list[Any], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models.converted(name, **options), folder)
    told = assert_same_decoder(folder, ep_devices[:1])
    assert reason in told
    assert bool(reason) == bool(told)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_decoders_of_gguf_files_match(family: str, ep_devices: list[Any], tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", write_tiny(family, tmp_path / "checkpoint").reference)
    convert(tmp_path / "model.gguf", tmp_path / "model")
    assert_same_decoder(tmp_path / "model", ep_devices[:1])


# --- Decoders that are changed ----------------------------------------------------------------------------------------


def nodes_of(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


def attribute(op_type: str, number: int, **values: Any) -> Change:
    def change(model: ir.Model) -> None:
        for made in ir.convenience.convert_attributes(values):
            nodes_of(model, op_type)[number].attributes[made.name] = made

    return change


def set_input(node: ir.Node, place: int, value: ir.Value) -> None:
    node.resize_inputs(max(place + 1, len(node.inputs)))
    node.replace_input_with(place, value)


def constant(op_type: str, number: int, place: int, array: np.ndarray, name: str = "given") -> Change:
    """Makes a constant an input of a node."""

    def change(model: ir.Model) -> None:
        tensor = ir.tensor(array)
        value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
        model.graph.register_initializer(value)
        set_input(nodes_of(model, op_type)[number], place, value)

    return change


def sinks_of_all_layers(model: ir.Model) -> None:
    for number in range(len(nodes_of(model, ATTENTION))):
        constant(ATTENTION, number, HEAD_SINK, np.ones(HEADS, np.float32), f"sinks.{number}")(model)


def fed(place: int, dtype: ir.DataType, dims: list[Any]) -> Change:
    """Makes a new input of the graph an input of the second layer's attention."""

    def change(model: ir.Model) -> None:
        value = ir.Value(name="given", type=ir.TensorType(dtype), shape=ir.Shape(dims))
        model.graph.inputs.append(value)
        set_input(nodes_of(model, ATTENTION)[1], place, value)

    return change


def without_a_product(model: ir.Model) -> None:
    """Removes the first layer's output projection: the projection's readers get its input."""
    output = nodes_of(model, PRODUCT)[1]
    ir.convenience.replace_all_uses_with(output.outputs[0], nodes_of(model, ATTENTION)[0].outputs[0])
    model.graph.remove(output, safe=True)


def a_sum_that_is_an_output(model: ir.Model) -> None:
    value = nodes_of(model, NORM)[2].outputs[0]
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", "tokens", 288])
    model.graph.outputs.append(value)


def apart_from_its_reader(model: ir.Model) -> None:
    """Puts a node that no device takes between the first layer's attention and its output projection."""
    attention = nodes_of(model, ATTENTION)[0]
    sine = ir.node("Sin", [attention.outputs[0]], name="between")
    model.graph.insert_after(attention, sine)
    ir.convenience.replace_all_uses_with(attention.outputs[0], sine.outputs[0])
    sine.replace_input_with(0, attention.outputs[0])


def a_head_without_its_last_rows(model: ir.Model) -> None:
    """Makes M smaller than the weight's rows: no contract compares an attribute with a constant's size."""
    head = nodes_of(model, PRODUCT)[-1]
    rows = head.attributes["M"].as_int() - 64
    head.attributes["M"] = ir.AttrInt64("M", rows)
    logits = head.outputs[0]
    logits.shape = ir.Shape([*logits.shape[:2], rows])


CHANGES: dict[str, tuple[Change, str]] = {
    "nothing": (lambda _: None, ""),
    "another window": (attribute(ATTENTION, 1, local_window_size=24), ""),
    "head_sink": (sinks_of_all_layers, ""),
    "attention_bias of one layer": (fed(ATTENTION_BIAS, ir.DataType.FLOAT, [1, 1, "tokens", "total"]), ""),
    "a bias of one layer": (constant(PRODUCT, 4, 2, np.ones(256, np.float32)), ""),
    "a bias of one output": (constant(PRODUCT, 1, 2, np.ones(288, np.float32)), ""),
    "no output projection": (without_a_product, "expected a Q4NXMatMul, the output projection"),
    "a sum for others": (a_sum_that_is_an_output, "and an output of the graph"),
    "a node that no device takes": (apart_from_its_reader, "Sin 'between': expected a Q4NXMatMul, "),
    "one that only its kernel refuses": (a_head_without_its_last_rows, "expected weight"),
    "too large a window": (
        attribute(ATTENTION, 1, local_window_size=2**40), "attribute 'local_window_size': expected -1 to ",
    ),
}  # fmt: skip


def changed(source: Path, folder: Path, file: str, change: Change) -> None:
    """A copy of a model's folder with one of its graphs changed."""
    shutil.copytree(source, folder)
    model = ir.load(source / file)
    change(model)
    for identifier in [identifier for identifier in model.functions if identifier[0] == "ai.flownpu"]:
        del model.functions[identifier]
    add_functions(model)
    (folder / file).unlink()
    ir.save(model, folder / file, external_data=f"{file}.changed.data")


@pytest.mark.parametrize("name", CHANGES)
def test_changed_decoders_match_in_build_and_session(
    name: str, models: Models, ep_devices: list[Any], tmp_path: Path
) -> None:
    change, reason = CHANGES[name]
    changed(models.converted("gemma3_text"), tmp_path / "model", "model.onnx", change)
    told = assert_same_decoder(tmp_path / "model", ep_devices[:1])
    assert reason in told
    assert bool(reason) == bool(told)


# --- Reading a file ---------------------------------------------------------------------------------------------------


def test_cyclic_graph_is_refused(models: Models) -> None:
    model = ir.load(models.converted("gemma3_text") / "model.onnx")
    cast = nodes_of(model, "Cast")[0]
    cast.replace_input_with(0, cast.outputs[0])
    with pytest.raises(ValueError, match=r"Cast '.*': expected what makes '.*' to come before it"):
        decoder_of_model(model, 256)


def test_weights_stay_in_their_file(models: Models) -> None:
    """Reading a decoder takes no memory that grows with its weights."""
    read_decoder(models.converted("llama"))  # imports all modules
    peaks, sizes = [], []
    for name in ("llama", "wide"):
        folder = models.converted(name)
        tracemalloc.start()
        read_decoder(folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append((folder / "model.onnx.data").stat().st_size)
    assert sizes[1] > 4 * sizes[0]
    assert peaks[1] - peaks[0] < (sizes[1] - sizes[0]) / 16


# --- Models of images -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_pictures_checkpoint(folder / "checkpoint")
    convert(folder / "checkpoint", folder / "model")
    return folder / "model"


ENCODER_CHANGES: dict[str, tuple[Change, str]] = {
    "nothing": (lambda _: None, ""),
    "softcap": (attribute(ATTENTION, 0, softcap=30.0), "expected no softcap"),
    "causal": (attribute(ATTENTION, 0, causal=1), "expected causal = 0"),
}


@pytest.mark.parametrize("name", ENCODER_CHANGES)
def test_encoders_match_in_build_and_session(name: str, pictures: Path, ep_devices: list[Any], tmp_path: Path) -> None:
    change, reason = ENCODER_CHANGES[name]
    folder = tmp_path / "model"
    changed(pictures, folder, "vision.onnx", change)
    told = told_by_build(folder, read_encoder)
    assert reason in told
    assert bool(reason) == bool(told)
    if not told:
        build_artifacts(folder)
    assert told_by_session(folder / "vision.onnx", ep_devices[:1]) == ({told} if told else set())


def test_decoder_with_images_matches_in_build_and_session(
    pictures: Path, ep_devices: list[Any], tmp_path: Path
) -> None:
    # A copy: artifacts are built into it, with which other tests' sessions would give other reasons.
    folder = Path(shutil.copytree(pictures, tmp_path / "model"))
    assert not assert_same_decoder(folder, ep_devices[:1])

# SPDX-License-Identifier: Apache-2.0
"""An encoder of images on the emulated array, through the device: matching, packing and results."""

import re

import numpy as np
import pytest
import torch

from flownpu.aie.designs.bias import bias_column
from flownpu.convert import convert
from flownpu.model.onnx_file import load_model
from flownpu.npu.artifacts import build_artifacts, programs_of_model
from flownpu.npu.layers import encoder_of_model, read_encoder
from flownpu.ops import q4nx
from tests.aie.host_kernels import bf16, panels
from tests.convert.picture_models import VISION, reference, stored_matrices, write_pictures_checkpoint
from tests.npu.decoders import GivenNode, in_eight_bits, in_layout, npu, partition, read_nodes
from tests.npu.rounding import encoder_error
from tests.ops.device import _argument

SIDE, TOKENS, FEATURES = VISION["image_size"], 256, 128


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures") / "checkpoint"
    write_pictures_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def converted(checkpoint):
    """Folders of the converted model, by the type of its encoder's weights."""
    made = {}

    def folder(weights="bf16"):
        if weights not in made:
            made[weights] = checkpoint.parent / weights
            convert(checkpoint, made[weights], vision_weights=weights)
        return made[weights]

    return folder


@pytest.fixture(scope="module")
def built(converted):
    """The result of `flownpu build MODEL --for emulate`."""
    return build_artifacts(converted())


def lowered(device, folder):
    nodes, outputs = read_nodes(folder, "vision.onnx")
    return device.lower(partition(nodes), outputs=outputs)


# --- Numbers ----------------------------------------------------------------------------------------------------------


def test_features_are_near_transformers(rng, built, converted, checkpoint):
    """The features of two images, against transformers, which computes in float32.

    The bound is twice an estimate of the errors' rms (tests/npu/rounding.py), which takes roundings for independent and
    evenly spread, though they are not quite. A wrong bias, scale or patch changes features by about their own spread.
    """
    device = npu.NpuDevice(str(built.folder))
    found = lowered(device, converted())
    assert found.on_host == []
    assert [node.op_type for node in found.nodes] == ["EncoderLayers"]
    assert found.summary == "an encoder's 2 layers in 11 dispatches an image"
    step = device.prepare(found.nodes[0])
    pixels = rng.uniform(-1, 1, (2, 3, SIDE, SIDE)).astype(np.float32)
    given = [_argument(pixels)]
    assert step.infer(given, 1) == [[2, TOKENS, FEATURES]]
    features = np.full((2, TOKENS, FEATURES), np.nan, np.float32)
    before = device.counts()
    step.run(given, [_argument(features)])
    assert device.counts()["dispatches"] - before["dispatches"] == 2 * 11

    model = reference(checkpoint, converted())
    with torch.no_grad():
        expected = model.model.get_image_features(torch.from_numpy(pixels)).pooler_output.numpy()
    errors = np.sqrt(np.square(features - expected).mean((1, 2)))
    bound = 2 * encoder_error(model, pixels)
    assert (errors < bound).all()
    assert bound < expected.std() / 16

    for shape in ((1, 3, SIDE, SIDE // 2), (1, 1, SIDE, SIDE), (3, SIDE, SIDE)):
        with pytest.raises(RuntimeError, match=re.escape("expected pixels of shape [images, 3, 128, 128]")):
            step.infer([_argument(np.zeros(shape, np.float32))], 1)


# --- Packing ----------------------------------------------------------------------------------------------------------


def padded(weight, bias):
    """The panels of a weight [K, N] and its bias, whose row is the next multiple of 32 (docs/npu.md)."""
    k, n = weight.shape
    place = bias_column(k)
    rows = -(-(k if bias is None else place + 1) // 256) * 256
    wide = np.zeros((rows, max(-(-n // 32) * 32, 256)), np.float32)
    wide[:k, :n] = weight
    if bias is not None:
        wide[place, :n] = bias
    return panels(bf16(wide))


def constants_of(folder):
    """Initializers by name."""
    nodes, _ = read_nodes(folder, "vision.onnx")
    return {value[0]: value[3] for node in nodes for value in node.inputs if value[3] is not None}


def packed(folder, change=lambda nodes: nodes):
    """The node EncoderLayers of a folder's encoder, after a change of its nodes."""
    nodes, outputs = read_nodes(folder, "vision.onnx")
    given = partition(change(nodes))
    (node,) = npu.lower_layers(given, outputs).nodes
    KEPT.append(given)  # packed constants point to its initializers
    return node


KEPT = []


@pytest.mark.parametrize("weights", ["bf16", "int8", "q4nx"])
def test_weights_of_every_type_become_panels(weights, converted):
    constants = constants_of(converted(weights))
    stored = stored_matrices(converted(weights) / "vision.onnx")
    tower = "vision_tower.embeddings"
    kernel = constants[f"{tower}.patch_embedding.weight"]
    expected = [padded(kernel.reshape(len(kernel), -1).T, constants[f"{tower}.patch_embedding.bias"])]
    for layer in range(VISION["num_hidden_layers"]):
        for part in ("self_attn.qkv_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2"):
            name = f"vision_tower.encoder.layers.{layer}.{part}"
            expected.append(padded(stored[name].T, constants[f"{name}.bias"]))
    expected.append(padded(stored["multi_modal_projector.mm_input_projection"].T, None))
    assert packed(converted(weights)).packed("weights") == np.concatenate(expected).tobytes()


@pytest.mark.parametrize("layout", [q4nx.NARROW, q4nx.SYMMETRIC, q4nx.TABLE], ids=["narrow", "symmetric", "table"])
def test_panels_do_not_depend_on_layout_of_q4nx(layout, converted):
    found, expected = (
        packed(converted("q4nx"), lambda nodes, of=of: in_layout(nodes, of, symmetric=not layout.minima))
        for of in (layout, q4nx.WIDE)
    )
    assert found.packed("weights") == expected.packed("weights")


def test_panels_of_eight_bits_equal_those_of_four(converted):
    """The same weights, number by number."""
    found, expected = (packed(converted("q4nx"), change) for change in (in_eight_bits, lambda nodes: nodes))
    assert found.packed("weights") == expected.packed("weights")


def test_packed_vectors_equal_constants(converted):
    constants, tower = constants_of(converted()), "vision_tower"
    norms = [f"{tower}.encoder.layers.{layer}.layer_norm{n}" for layer in range(2) for n in (1, 2)]
    names = [f"{tower}.embeddings.position_embedding.weight"]
    names += [f"{norm}.{part}" for norm in (*norms, f"{tower}.post_layernorm") for part in ("weight", "bias")]
    names.append("multi_modal_projector.mm_soft_emb_norm")
    expected = np.concatenate([bf16(constants[name]).reshape(-1) for name in names])
    assert packed(converted()).packed("vectors") == expected.tobytes()


# --- Finding it -------------------------------------------------------------------------------------------------------


def node_of(nodes, op_type, number=0):
    """A node of this type."""
    return [node for node in nodes if node.op_type == op_type][number]


def apart(nodes):
    """The graph with Cast, MatMul, Add and Gelu in place of each DenseMatMul."""
    plain = []
    for node in nodes:
        if node.op_type != "DenseMatMul":
            plain.append(node)
            continue
        x, weight, _, bias, residual = node.inputs
        value, steps = [f"{node.name}/0", "float", None, None], []
        wide = [f"{node.name}/weight", "float", weight[2], None]
        steps.append(GivenNode(f"{node.name}/cast", "Cast", "", {"to": 1}, [weight], [wide]))
        steps.append(GivenNode(node.name, "MatMul", "", {}, [x, wide], [value]))

        def follow(op_type, other, attributes=(), node=node, steps=steps):
            made = [f"{node.name}/{len(steps)}", "float", None, None]
            inputs = [steps[-1].outputs[0], other] if other else [steps[-1].outputs[0]]
            steps.append(GivenNode(made[0], op_type, "", dict(attributes), inputs, [made]))

        if bias[0]:
            follow("Add", bias)
        if node.attributes.get("activation", "none") != "none":
            follow("Gelu", None, {"approximate": "tanh"})
        if residual[0]:
            follow("Add", residual)
        steps[-1].outputs = node.outputs
        plain += steps
    return plain


def test_encoder_of_standard_operators_is_matched(built, converted):
    nodes, outputs = read_nodes(converted(), "vision.onnx")
    given = partition(apart(nodes))
    found = npu.NpuDevice(str(built.folder)).lower(given, outputs=outputs)
    assert [node.op_type for node in found.nodes] == ["EncoderLayers"]
    assert found.nodes[0].packed("weights") == packed(converted()).packed("weights")


def set_attribute(op_type, name, value, number=0):
    def change(nodes):
        node_of(nodes, op_type, number).attributes[name] = value

    return change


def set_input(op_type, place, value, number=0):
    def change(nodes):
        node = node_of(nodes, op_type, number)
        node.inputs[place] = value(node) if callable(value) else value

    return change


CHANGES = {
    "overlapping patches": (set_attribute("Conv", "strides", [2, 2]), "square patches: strides as large as the kernel"),
    "padded patches": (set_attribute("Conv", "pads", [1, 1, 1, 1]), "no pads"),
    "another order of tokens": (set_attribute("Transpose", "perm", [0, 1, 2]), "perm = 0, 2, 1"),
    "a window": (set_attribute("FlowQKVAttention", "local_window_size", 64, 1), "no window"),
    "grouped heads": (set_attribute("FlowQKVAttention", "kv_num_heads", 1), "heads without grouping"),
    "narrow heads": (
        set_attribute("FlowQKVAttention", "head_size", 36), "expected a weight [144,216], got [144,432]",
    ),
    "another scale": (set_attribute("FlowQKVAttention", "scale", 0.5, 1), "the same heads and scale in all layers"),
    "another epsilon": (set_attribute("LayerNormalization", "epsilon", 0.5, 2), "epsilon of all layer norms"),
    "exact GELU": (set_attribute("DenseMatMul", "activation", "gelu", 2), "activation = gelu_tanh"),
    "no residual": (set_input("DenseMatMul", 4, ["", "float", None, None], 1), "the residual stream to be added"),
    "a residual of another place": (
        set_input("DenseMatMul", 4, lambda node: node.inputs[0], 3), "to be read by one node, the down product",
    ),
    "a computed bias": (
        set_input("DenseMatMul", 3, lambda node: [*node.inputs[3][:3], None]), "input 3 to be an initializer",
    ),
    "a transposed weight": (
        set_attribute("DenseMatMul", "transposed", 1, 3), "input 3 to be an initializer, float [288]",
    ),
    "overlapping squares": (set_attribute("AveragePool", "strides", [1, 1]), "squares that tile the grid"),
    "another grid": (
        set_input("Reshape", 1, ["grid", "int64", [4], np.array([0, 144, 16, 64])], 1), "to make [N,144,32,32]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_unfit_encoder_is_left_with_reason(change, converted):
    """All nodes stay on the host as they were, with one reason."""
    nodes, outputs = read_nodes(converted(), "vision.onnx")
    mutate, reason = CHANGES[change]
    mutate(nodes)
    found = npu.lower_layers(partition(nodes), outputs)
    assert [node.op_type for node in found.nodes] == [node.op_type for node in nodes]
    told = {reason for _, _, reason in found.on_host}
    assert len(told) == 1
    assert reason in told.pop()
    assert {op_type for _, op_type, _ in found.on_host} == {"Conv", "DenseMatMul", "FlowQKVAttention"}


def test_missing_artifacts_leave_encoder_on_host(tmp_path, converted):
    found = lowered(npu.NpuDevice(str(tmp_path / "nowhere")), converted())
    assert {op_type for _, op_type, _ in found.on_host} == {"Conv", "DenseMatMul", "FlowQKVAttention"}
    assert all("nowhere" in reason for _, _, reason in found.on_host)
    assert "EncoderLayers" not in {node.op_type for node in found.nodes}


# --- Building ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_decoder_of_image_model_is_built_too(built, converted):
    """The decoder gets a program for a block with the tokens of an image."""
    assert built.context == 1024
    programs, left_out = programs_of_model(converted(), "npu2")
    assert built.left_out == left_out == []
    assert {(each.kind, each.tokens) for each in programs} >= {("decode", 1), ("block", TOKENS), ("encode", 4 * TOKENS)}


def test_context_without_room_for_image_is_reported(converted):
    _, left_out = programs_of_model(converted(), "npu2", context=128)
    assert left_out[-1].on_host
    assert str(left_out[-1]) == (
        "images of 256 tokens (prompts with images are refused): expected a context of 256 or more, got 128"
    )


def test_encoder_attributes_equal_graph(converted):
    found = read_encoder(converted())
    assert found == read_encoder(converted("int8"))
    assert found == read_encoder(converted("q4nx"))
    attributes = packed(converted()).attributes
    assert {key: getattr(found, key) for key in attributes} == pytest.approx(attributes)


@pytest.mark.parametrize(
    ("op_type", "reason"),
    [
        ("Conv", "expected a Q4NXMatMul that makes its query, keys and values"),  # no Conv: no encoder of images
        ("DenseMatMul", "expected the QKV product"),
        ("Add", "expected the sum of embeddings and their positions"),
    ],
)
def test_unfit_graph_is_refused(op_type, reason, converted):
    model = load_model(converted() / "vision.onnx", purpose="this test")
    for node in list(model.graph):
        if node.op_type == op_type:
            node.op_type = "Other"
    with pytest.raises(ValueError, match=reason):
        encoder_of_model(model)

# SPDX-License-Identifier: Apache-2.0
"""The models that peers are measured with have the exported weights, and compute what the exported model computes."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flownpu.convert import convert
from flownpu.errors import FlowNPUError
from flownpu.ops import q4nx
from flownpu.peers import llama_cpp, onnxruntime_genai
from flownpu.peers.export import encode, export_model, taken_over
from flownpu.peers.exported import ExportedModel
from tests.convert.conftest import CONFIGS, SIZES, TinyModel, is_projection, write_tiny
from tests.convert.test_numbers import random_ids, tolerance
from tests.decoding import DecoderSession

FAMILIES = tuple(CONFIGS)
Exported = Callable[..., tuple[ExportedModel, TinyModel]]
# llama.cpp has no other attention scale than 1 / sqrt(d), which is also that of the public Gemma3 up to 12B.
FOR_LLAMA_CPP = {"gemma3_text": {"query_pre_attn_scalar": SIZES["head_dim"]}, "llama": {}, "qwen3": {}}


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """w = scale * (code - 8), as `exported.py` says it."""
    values = np.empty((codes.shape[0], 2 * codes.shape[1]), np.float32)
    values[:, 0::2] = codes & 15
    values[:, 1::2] = codes >> 4
    return (values - 8) * np.repeat(scales.astype(np.float32), 32, axis=1)


@given(st.integers(0, 2**32 - 1), st.integers(-12, 8))
def test_representable_weights_are_kept(seed: int, exponent: int):
    codes = np.random.default_rng(seed).integers(-8, 8, (3, 64)).astype(np.float32)
    codes[:, ::32] = -8  # the scale's own code
    weight = codes * np.float32(2.0**exponent)
    np.testing.assert_array_equal(decode(*encode(weight)), weight)


def symmetric(scale: np.ndarray) -> q4nx.Quantized:
    """Weights with minima of -8 scales and without a code 0: encoding their values again would choose other scales."""
    codes = np.random.default_rng(0).integers(3, 16, (len(scale), 32 * scale.shape[1]), np.uint8)
    scale = scale.astype(q4nx.BFLOAT16)
    return q4nx.Quantized(codes, scale, q4nx.BFLOAT16.type(-8) * scale)


def test_symmetric_weights_are_taken_over():
    # Negative scales, as GGUF has them, 0, and the least and largest that float16 has too: 2^-24 and 255/128 * 2^15.
    weight = symmetric(np.array([[0.5, -0.0125, 0.0], [2.0**-24, 65280.0, -3.0]]))
    found = taken_over(weight)
    assert found is not None
    np.testing.assert_array_equal(decode(*found), q4nx.dequantize_codes(weight))


@pytest.mark.parametrize("scale", [2.0**-25, 1.5 * 2.0**-24, 65536.0])
def test_weights_outside_float16_are_not_taken_over(scale: float):
    assert taken_over(symmetric(np.array([[1.0, scale]]))) is None


def test_weights_with_minima_are_not_taken_over():
    weight = symmetric(np.ones((2, 2)))
    weight.minimum[1, 1] = -7
    assert taken_over(weight) is None


def test_encoding_is_off_by_half_step():
    weight = np.random.default_rng(0).standard_normal((64, 96), dtype=np.float32)
    weight[5, 32:64] = 0
    codes, scales = encode(weight)
    step = np.repeat(np.abs(scales.astype(np.float32)), 32, axis=1)
    # Off by half a step; near the end that has no code (8), by up to a whole step. A scale is rounded to 11 bits, and
    # the largest value is 8 scales.
    assert np.all(np.abs(decode(codes, scales) - weight) <= step * (1 + 8 * 2.0**-11))
    inside = np.abs(weight) <= 7 * step
    assert np.all(np.abs(decode(codes, scales) - weight)[inside] <= step[inside] * (0.5 + 8 * 2.0**-11))


def test_q4_0_is_read_by_gguf():
    codes, scales = encode(np.random.default_rng(0).standard_normal((5, 96), dtype=np.float32))
    blocks = llama_cpp.q4_0(codes, scales)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(values, decode(codes, scales))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A tiny model, exported, and transformers' model with the exported weights."""
    made: dict[str, tuple[ExportedModel, TinyModel]] = {}

    def make(family: str, **changes: int) -> tuple[ExportedModel, TinyModel]:
        key = " ".join([family, *changes])
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            tiny = write_tiny(family, folder / "checkpoint", **changes)
            convert(tiny.folder, folder / "model", kv_dtype="fp32")
            (folder / "exported").mkdir()
            export_model(folder / "model", folder / "exported")
            model = ExportedModel.read(folder / "exported")
            with torch.no_grad():
                for name, parameter in tiny.reference.named_parameters():
                    if is_projection(name):
                        short = name.removeprefix("model.").removesuffix(".weight")
                        weight = decode(model.codes(short), model.scales(short))
                        # The same weights, but for their second rounding.
                        difference = np.linalg.norm(weight - parameter.numpy()) / np.linalg.norm(parameter.numpy())
                        # A step of the largest value / 8 has the error step / sqrt(12), and of 32 normal weights the
                        # largest is some 2.1 deviations: 2.1 / 8 / sqrt(12) = 0.08. Twice that is surely wrong.
                        assert difference < 0.16, short
                        parameter.copy_(torch.from_numpy(weight))
            made[key] = model, tiny
        return made[key]

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_graph_for_onnxruntime_equals_transformers(family: str, exported, tmp_path: Path):
    model, tiny = exported(family)
    onnxruntime_genai.convert(model, tmp_path)
    graph = ir.load(tmp_path / "model.onnx")
    for node in graph.graph:
        # int8 activations are what makes it fast; without them it must compute what transformers computes.
        node.attributes.pop("accuracy_level", None)
    ir.save(graph, tmp_path / "model.onnx")
    ids = random_ids(1, 40)
    expected = tiny.logits(ids)
    decoder = DecoderSession(tmp_path)
    for start, stop in ((0, 20), (20, 33), *((i, i + 1) for i in range(33, 40))):
        logits = decoder(ids[:, start:stop], np.ones((1, stop), np.int64))
        assert logits.shape == (1, 1, 300)
        # ONNX Runtime's polynomial for Gelu's tanh and its rational function for sigmoid are good to some 2^-20.
        atol = 16 * tolerance(expected, tiny.reference.config)
        np.testing.assert_allclose(logits[0, 0], expected[0, stop - 1], rtol=0, atol=atol)


def test_accuracy_level_4_is_asked_for(exported, tmp_path: Path):
    onnxruntime_genai.convert(exported("llama")[0], tmp_path)
    nodes = [node for node in ir.load(tmp_path / "model.onnx").graph if node.op_type == "MatMulNBits"]
    # qkv, output, gate, up and down in 3 layers, and the LM head.
    assert len(nodes) == 3 * 5 + 1
    assert {node.attributes["accuracy_level"].as_int() for node in nodes} == {4}


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_holds_model(family: str, exported, tmp_path: Path):
    model, tiny = exported(family, **FOR_LLAMA_CPP[family])
    architecture = family.removesuffix("_text")
    llama_cpp.convert(model, tmp_path)
    reader = gguf.GGUFReader(tmp_path / "model-q4_0.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = tiny.reference.config
    settings = {
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
    }
    for key, value in settings.items():
        assert reader.get_field(f"{architecture}.{key}").contents() == value, key
    named = {
        name.removeprefix("model."): parameter.detach().numpy() for name, parameter in tiny.reference.named_parameters()
    }
    down = tensors["blk.1.ffn_down.weight"]
    values = gguf.quants.dequantize(down.data, down.tensor_type)
    np.testing.assert_array_equal(values, named["layers.1.mlp.down_proj.weight"])
    query = tensors["blk.2.attn_q.weight"]
    values = gguf.quants.dequantize(query.data, query.tensor_type)
    expected = named["layers.2.self_attn.q_proj.weight"]
    if family == "llama":
        # Row 2i and 2i + 1 of a head are what was row i of its first and of its second half.
        expected = expected.reshape(6, 2, 8, 96).transpose(0, 2, 1, 3).reshape(96, 96)
        plain = reader.get_field("llama.rope.freq_base").contents() ** (-np.arange(8) / 8)
        frequencies = tiny.reference.model.rotary_emb.inv_freq.numpy()
        # Frequencies were read back from cos and sin of 1 radian a position, each with an error of 2^-24.
        np.testing.assert_allclose(plain / tensors["rope_freqs.weight"].data, frequencies, atol=2.0**-22)
    elif family == "qwen3":
        assert reader.get_field("qwen3.rope.freq_base").contents() == config.rope_parameters["rope_theta"]
    else:
        full, local = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
        assert reader.get_field("gemma3.rope.freq_base").contents() == full["rope_theta"]
        assert reader.get_field("gemma3.rope.freq_base_swa").contents() == local["rope_theta"]
        assert reader.get_field("gemma3.rope.scaling.factor").contents() == full["factor"]
        windows = [kind == "sliding_attention" for kind in config.layer_types]
        assert reader.get_field("gemma3.attention.sliding_window_pattern").contents() == windows
        assert reader.get_field("gemma3.attention.sliding_window").contents() == config.sliding_window
        norm = tensors["blk.1.post_ffw_norm.weight"].data
        np.testing.assert_array_equal(norm, 1 + named["layers.1.post_feedforward_layernorm.weight"])
    np.testing.assert_array_equal(values, expected)


def test_model_unfit_for_llama_cpp_is_refused(exported, tmp_path: Path):
    # The tiny Gemma scales by 1 / sqrt(24), with heads of 16.
    with pytest.raises(ValueError, match=r"1 / sqrt\(16\), not by 0\.204"):
        llama_cpp.convert(exported("gemma3_text")[0], tmp_path)


# Experts of whole groups of 32 columns. llama.cpp's OLMoE has as many KV heads as heads, as the public one.
EXPERTS = {"qwen3_moe": {"moe_intermediate_size": 64}, "olmoe": {"intermediate_size": 96, "num_key_value_heads": 6}}


@pytest.fixture(scope="module")
def exported_experts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[ExportedModel, TinyModel]]:
    """A tiny mixture of experts, exported, and transformers' model with the exported weights."""

    def make(family: str) -> tuple[ExportedModel, TinyModel]:
        folder = tmp_path_factory.mktemp(family)
        tiny = write_tiny(family, folder / "checkpoint", **EXPERTS[family])
        convert(tiny.folder, folder / "model", kv_dtype="fp32")
        (folder / "exported").mkdir()
        export_model(folder / "model", folder / "exported")
        model = ExportedModel.read(folder / "exported")
        with torch.no_grad():
            for name, parameter in tiny.reference.named_parameters():
                if not is_projection(name):
                    continue
                short = name.removeprefix("model.").removesuffix(".weight")
                parts = [short]
                if short.endswith("gate_up_proj"):
                    parts = [short.replace("gate_up", part) for part in ("gate", "up")]
                values = [decode(model.codes(part), model.scales(part)) for part in parts]
                experts = model.experts if "experts" in short else 1
                weight = np.concatenate([part.reshape(experts, -1, part.shape[1]) for part in values], axis=1)
                weight = weight.reshape(parameter.shape)
                # `exported` says why the bound is 0.16.
                assert np.linalg.norm(weight - parameter.numpy()) / np.linalg.norm(parameter.numpy()) < 0.16, short
                parameter.copy_(torch.from_numpy(weight))
        return model, tiny

    return make


@pytest.mark.parametrize("family", EXPERTS)
def test_gguf_holds_experts(family: str, exported_experts, tmp_path: Path):
    model, tiny = exported_experts(family)
    llama_cpp.convert(model, tmp_path)
    reader = gguf.GGUFReader(tmp_path / "model-q4_0.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = {"qwen3_moe": "qwen3moe"}.get(family, family)
    for key, value in (("expert_count", 5), ("expert_used_count", 2), ("expert_feed_forward_length", None)):
        expected = model.feed_forward_size if value is None else value
        assert reader.get_field(f"{architecture}.{key}").contents() == expected
    experts = tiny.reference.model.layers[1].mlp.experts
    gate, up = np.split(experts.gate_up_proj.detach().numpy(), 2, axis=1)
    for name, expected in (("gate", gate), ("up", up), ("down", experts.down_proj.detach().numpy())):
        stored = tensors[f"blk.1.ffn_{name}_exps.weight"]
        assert stored.shape.tolist() == list(expected.shape[::-1])
        np.testing.assert_array_equal(gguf.quants.dequantize(stored.data, stored.tensor_type), expected)
    router = tiny.reference.model.layers[1].mlp.gate.weight.detach().numpy()
    np.testing.assert_array_equal(tensors["blk.1.ffn_gate_inp.weight"].data, router)
    assert "blk.1.ffn_gate.weight" not in tensors


def test_experts_unknown_to_peer_are_refused(exported_experts, tmp_path: Path):
    model, _ = exported_experts("olmoe")
    with pytest.raises(ValueError, match="no mixtures of experts, and no norms of all heads at once"):
        onnxruntime_genai.convert(model, tmp_path)
    with pytest.raises(ValueError, match=r"llama.cpp's olmoe has other weights of experts \(normalised or not\)"):
        llama_cpp.convert(dataclasses.replace(model, normalized_experts=True), tmp_path)
    with pytest.raises(ValueError, match=r"no architecture of llama\.cpp's for granite with experts"):
        llama_cpp.convert(dataclasses.replace(model, family="granite"), tmp_path)


def test_settings_are_configurations(exported):
    model, _ = exported("gemma3_text")
    assert model.windows == [8, -1, 8]
    assert model.rotaries == [0, 1, 0]
    assert model.embedding_scale == pytest.approx(math.sqrt(96))
    assert model.attention_scale == pytest.approx(24**-0.5)
    assert (model.gating, model.qk_norm, model.sandwich_norms, model.tied_embeddings) == ("geglu", True, True, True)
    # Linear scaling by 8.
    assert model.vector("rotary.1")[0] == pytest.approx(1 / 8)


def test_graph_of_other_converter_is_refused(exported, tmp_path: Path):
    model, _ = exported("llama")
    onnxruntime_genai.convert(model, tmp_path)
    (tmp_path / "exported").mkdir()
    with pytest.raises(FlowNPUError, match="which a model that `flownpu convert` made of a checkpoint has"):
        export_model(tmp_path, tmp_path / "exported")


def test_symmetric_model_is_exported_unchanged(tmp_path: Path):
    tiny = write_tiny("llama", tmp_path / "checkpoint")
    convert(tiny.folder, tmp_path / "model", kv_dtype="fp32")
    graph = ir.load(tmp_path / "model" / "model.onnx")
    weights = {}
    for node in graph.graph:
        if node.op_type == "Q4NXMatMul":
            tensor, columns = node.inputs[1].const_value, node.attributes["K"].as_int()
            weight = q4nx.unpack(tensor.numpy(), 32 * tensor.shape[0], columns)
            weight = weight._replace(minimum=q4nx.BFLOAT16.type(-8) * weight.scale)
            weights[tensor.name] = q4nx.dequantize_codes(weight)
            blocks = ir.tensor(q4nx.pack(*weight, q4nx.SYMMETRIC), name=tensor.name)
            node.inputs[1].const_value, node.inputs[1].shape = blocks, blocks.shape
    ir.save(graph, tmp_path / "model" / "model.onnx")
    (tmp_path / "exported").mkdir()
    export_model(tmp_path / "model", tmp_path / "exported")
    model, config = ExportedModel.read(tmp_path / "exported"), tiny.reference.config
    query = config.num_attention_heads * config.head_dim
    for name, initializer, first in (
        ("layers.0.self_attn.k_proj", "layers.0.self_attn.qkv_proj", query),
        ("layers.0.mlp.gate_proj", "layers.0.mlp.gate_up_proj", 0),
        ("layers.2.mlp.up_proj", "layers.2.mlp.gate_up_proj", config.intermediate_size),
        ("layers.1.mlp.down_proj", "layers.1.mlp.down_proj", 0),
    ):
        values = decode(model.codes(name), model.scales(name))
        np.testing.assert_array_equal(values, weights[initializer][first : first + len(values)])


def test_exported_form_has_named_sizes(exported):
    model, _ = exported("qwen3")
    fields = json.loads((model.folder / "decoder.json").read_text())
    codes, scales = model.codes("layers.0.mlp.gate_proj"), model.scales("layers.0.mlp.gate_proj")
    assert codes.shape == (fields["feed_forward_size"], fields["hidden_size"] // 2)
    assert scales.shape == (fields["feed_forward_size"], fields["hidden_size"] // 32)
    assert (codes.dtype, scales.dtype) == (np.uint8, np.float16)

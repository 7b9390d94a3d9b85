# SPDX-License-Identifier: Apache-2.0
"""`flownpu build MODEL`: the artifacts of a converted model, for the emulator and, with stand-ins, for an NPU."""

import json
import struct

import numpy as np
import onnx
import pytest

from flownpu.aie.call_family import Positions
from flownpu.aie.designs.decode_layer import LayerShape
from flownpu.npu_calls import CHUNKS, DecoderCalls
from flownpu.npu_decoder import Decoder, read_decoder
from flownpu.npu_models import MODELS
from tests.aie.words import read_family, read_index, words_of

CONTEXT = 192  # positions, three chunks of the cache; prompts come in chunks of 64 tokens, not of 256
# A token; two norms; four products, each with its weight; RoPE by two tables; attention with and without a window.
CALLS = 1 + 2 + 2 * 4 + 2 + 2


def attributes(folder):
    """The attributes of all calls, by operator."""
    *_, calls = read_index(folder)
    found = {}
    for call in calls:
        found.setdefault(call["operator"], []).append(call["attributes"])
    return found


def float_of(bits):
    return struct.unpack("<f", struct.pack("<i", bits))[0]


# --- For the emulator -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(model, tmp_path_factory):
    """The folder for the emulator."""
    from flownpu.npu_artifacts import build_artifacts

    return build_artifacts(model, context=CONTEXT, output=tmp_path_factory.mktemp("built") / "emulate").folder


def test_the_calls_are_those_of_the_model(built, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    calls = attributes(built)
    (decode,) = calls["decode_layer"]
    sizes = {key: values[0] for key, values in decode.items() if len(values) == 1}
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    # 480, of which the dequantisation engine weaves 64 columns at a time.
    feed_forward = -(-config["intermediate_size"] // 64) * 64
    assert sizes | {"epsilon": float_of(sizes["epsilon"]), "scale": float_of(sizes["scale"])} == {
        "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_size": config["head_dim"],
        "feed_forward": feed_forward, "geglu": 1, "post_norms": 1, "qk_norm": 1,
        "epsilon": np.float32(config["rms_norm_eps"]), "scale": np.float32(config["query_pre_attn_scalar"] ** -0.5),
        "context": CONTEXT, "first": 0, "layers": len(sliding), "n_tables": 2, "vocabulary": config["vocab_size"],
    }  # fmt: skip
    assert decode["windows"] == tuple(config["sliding_window"] if kind else 0 for kind in sliding)
    assert decode["tables"] == tuple(0 if kind else 1 for kind in sliding)
    products = {(call["rows"], call["k"], call["n"], call["epilogue"]) for call in calls["gemm"]}
    packed, attention = (heads + 2 * kv_heads) * config["head_dim"], heads * config["head_dim"]
    assert products == {
        ((64,), (hidden,), (packed,), (0,)), ((64,), (attention,), (hidden,), (0,)),
        ((64,), (hidden,), (feed_forward,), (1,)), ((64,), (feed_forward,), (hidden,), (0,)),
    }  # fmt: skip
    engines = {(call["m"][0], call["k"][0], call["gated"][0]) for call in calls["dequant_engine"]}
    assert engines == {(n, k, int(epilogue == 1)) for _, (k,), (n,), (epilogue,) in products}
    assert {call["table"] for call in calls["norm_rope"]} == {(0,), (1,)}
    assert {call["window"] for call in calls["flow_qkv"]} == {(config["sliding_window"],), (0,)}
    assert calls.keys() - {"decode_layer", "gemm", "dequant_engine", "norm_rope", "flow_qkv"} == {
        "rms_norm", "rms_norm_add",
    }  # fmt: skip


def test_a_second_build_derives_nothing(flownpu, model_copy):
    arguments = ("build", model_copy, "--for", "emulate", "--context", CONTEXT - 1)
    done = flownpu(*arguments)
    assert (done.code, done.out) == (0, "")
    assert f"{model_copy}/artifacts/emulate: {CALLS} calls over {CONTEXT} positions, {CALLS} made" in done.err
    again = flownpu(*arguments, "--json")
    assert json.loads(again.out) == {
        "for": "emulate", "target": "npu2", "folder": f"{model_copy}/artifacts/emulate", "context": CONTEXT,
        "calls": CALLS, "made": 0, "left_out": [], "missing": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--context", "2049"], 1, "expected a context of 2048 or less, which the model is made for, got 2112"),
        (["--target", "npu1"], 1, "[decode_layer] expected npu2, got npu1"),
        (["--model", "gemma3-1b"], 2, "expected one MODEL folder, without --model and --emit"),
        (["gemm"], 2, "expected one MODEL folder, without --model and --emit"),
    ],
)
def test_what_cannot_be_built_is_refused(flownpu, model, tmp_path, options, code, words):
    done = flownpu("build", model, *options, "--for", "emulate", "--output", tmp_path / "out")
    assert done.code == code
    assert words in done.err
    assert not (tmp_path / "out").exists()


def test_what_is_no_model_is_refused(flownpu, tmp_path):
    done = flownpu("build", tmp_path / "none", "--for", "emulate")
    assert (done.code, "no such folder" in done.err) == (1, True)
    done = flownpu("build", "gemm", "--context", 128)
    assert (done.code, "go with a MODEL folder" in done.err) == (2, True)


# --- For an NPU -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_tools")
def test_without_a_toolchain_plans_and_mlir_are_written(flownpu, model, tmp_path):
    done = flownpu("build", model, "--context", CONTEXT, "--output", tmp_path / "out")
    assert done.code == 0
    assert f"{CALLS} calls over {CONTEXT} positions, as plans and MLIR. Nothing was compiled:" in done.err
    assert "aiecc was not found" in done.err
    assert len(list((tmp_path / "out").rglob("*.mlir"))) == CALLS
    assert not list((tmp_path / "out").rglob("*.words"))


def test_compiled_families_are_the_instructions(flownpu, tools, model, tmp_path, monkeypatch):
    """All but a stride that the stand-in, as a compiler, leaves out where a chunk is alone: steps of it are 0 more.

    Without the products, which are as other calls that do not move.
    """
    monkeypatch.setattr(DecoderCalls, "prefill", lambda self, tokens: [*self._norms(tokens), *self._attention(tokens)])
    folder = tmp_path / "out"
    done = flownpu("build", model, "--for", "xclbin", "--context", CONTEXT, "--output", folder)
    assert done.code == 0, done.err
    target, emulated, _, arrays, calls = read_index(folder)
    assert (target, emulated) == ("npu2", 0)
    compared = left_out = 0
    for call in calls:
        array, xclbin, _ = arrays[call["array"]]
        assert (folder / xclbin).read_text().startswith("--xclbin-name with [")
        _, _, family = read_family(words_of(folder / call["file"]))
        compiled = {file: file.stem.partition("-position") for file in (folder / array).glob("*.insts")}
        found = {file: int(at or "5") for file, (name, _, at) in compiled.items() if name == call["name"]}
        assert found
        for file, position in found.items():
            expected = np.fromfile(file, "<u4")
            differ = np.flatnonzero(family.at(position) != expected)
            assert not expected[differ].any(), file
            assert not expected[differ - 1].any(), file
            compared += 1
            left_out += len(differ)
    assert compared > 2 * len(calls)
    assert left_out
    tools.commands()
    assert flownpu("build", model, "--for", "xclbin", "--context", CONTEXT, "--output", folder).code == 0
    assert tools.commands() == []


# --- The decoder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "attribute", "value", "words"),
    [
        ("FlowQKVAttention", "softcap", 30.0, "expected no softcap: the array has none"),
        ("FlowQKVAttention", "causal", 0, "expected causal = 1"),
        ("FlowQKVAttention", "do_rotary", 0, "expected do_rotary = 1"),
        ("FlowQKVAttention", "scale", 0.5, "scale 0.5 and a QK-norm as in the layers before, got 4, 2, 64, 0.125"),
        ("SimplifiedLayerNormalization", "epsilon", 0.5, "expected the epsilon of all norms to be 0.5, got 1e-06"),
    ],
)
def test_a_layer_that_the_designs_have_no_place_for_is_refused(flownpu, model_copy, operator, attribute, value, words):
    path = model_copy / "model.onnx"
    proto = onnx.load(path, load_external_data=False)
    node = next(node for node in proto.graph.node if node.op_type == operator)
    kept = [each for each in node.attribute if each.name != attribute]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(attribute, value)])
    onnx.save(proto, path)
    done = flownpu("build", model_copy, "--for", "emulate")
    assert done.code == 1
    assert f"{path}: the NPU's designs have no place for its layers: " in done.err
    assert words in done.err


def test_the_decoder_is_the_same_in_every_spelling(model):
    decoder = read_decoder(model)
    assert decoder.shape == LayerShape(256, 4, 2, 64, 512, "geglu", post_norms=True, qk_norm=True)
    assert (decoder.vocabulary, decoder.positions, decoder.table_count) == (4096, 2048, 2)


# A tile has 4096 / d rows or fewer, 32 at most, in eights: tokens x query heads of a KV head (4, 3, 4).
@pytest.mark.parametrize(("name", "tokens_of_a_tile"), [("gemma3-1b", 4), ("llama3.2-3b", 8), ("qwen3-8b", 8)])
def test_prefill_of_full_sizes_is_valid(name, tokens_of_a_tile):
    """At the last position; `catalogue` has the decode layers of all models."""
    model, context = MODELS[name], 4096
    shape = LayerShape(
        model.hidden, model.heads, model.kv_heads, model.head_size, model.feed_forward, model.activation,
        model.post_norms, model.head_norms,
    )  # fmt: skip
    decoder = Decoder(shape, 1e-6, 0.1, (model.window or 0, 0), (0, 1), model.vocabulary, context)
    calls = DecoderCalls(decoder, "npu2", context)
    for call in calls.prefill(CHUNKS[0]):
        plan = call.plan(call.last)  # which the checker takes
        assert call.positions == Positions(context) or call.moves
        if call.operator == "gemm":  # rows of A are not padded, but what is read behind the last one
            ((rows,), (k,)) = call.attributes["rows"], call.attributes["k"]
            assert plan.sequence.buffers[0].type.bytes == 2 * ((rows - 1) * k + -(-k // 256) * 256)
        if call.operator == "flow_qkv":
            block = 4 * tokens_of_a_tile
            assert [part.offset for part in call.positions.sweeps] == list(range(0, CHUNKS[0], block))


def test_a_decoder_too_small_for_prefill_decodes():
    shape = LayerShape(128, 2, 1, 64, 128, "swiglu")
    calls = DecoderCalls(Decoder(shape, 1e-6, 0.125, (0,), (0,), 256, 128), "npu2", 128)
    (decode,) = calls.decode()
    assert decode.plan(decode.last).sequence.buffers[-1].name == "logits"
    with pytest.raises(ValueError, match=r"\[gemm\] expected N in multiples of 32, 256 or more"):
        _ = [call.plan(call.last) for call in calls.prefill(CHUNKS[0])]

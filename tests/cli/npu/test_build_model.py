# SPDX-License-Identifier: Apache-2.0
"""`flownpu build MODEL`: the artifacts of a converted model, for the emulator and, with stand-ins, for an NPU."""

import dataclasses
import json
import re
import struct
import subprocess

import numpy as np
import pytest

from flownpu.aie.artifacts import compiled as compiled_artifacts
from flownpu.aie.mlir.module import to_mlir
from flownpu.aie.plan.limits import NPU2
from flownpu.aie.programs import prefill
from flownpu.aie.programs.program import calls_of
from flownpu.npu.artifacts import build_artifacts, programs_of_model
from tests.aie.words import read_family, read_index, words_of

CONTEXT = 320  # positions, five chunks of the cache; prompts come in chunks of 256 tokens, not of 512
# A token's call; dequantisation of weights of four sizes; products of three sizes, for QKV and output are padded to the
# same; attention with a window only, for the one layer without a window is the last, whose attention no prompt needs.
CALLS = 1 + 4 + 3 + 1


def operators(program, calls, host_calls):
    """The operators of the steps of each dispatch."""
    return [
        [(host_calls if host else calls)[step[0]]["operator"] for step in steps]
        for host, steps in program["dispatches"]
    ]


def bits_of(value):
    return struct.unpack("<i", struct.pack("<f", value))[0]


# --- For the emulator -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(model, tmp_path_factory):
    """The folder of artifacts for the emulator."""
    from flownpu.npu.artifacts import build_artifacts

    return build_artifacts(model, context=CONTEXT, output=tmp_path_factory.mktemp("built") / "emulate").folder


def test_model_programs_match_configuration(built, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    *_, calls, host_calls, programs = read_index(built)
    assert [program["kind"] for program in programs] == ["decode", "prefill"]
    hidden, d, feed_forward = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    for program in programs:
        found = program["attributes"]
        assert {key: values[0] for key, values in found.items() if len(values) == 1} == {
            "hidden": hidden, "attention.heads": heads, "attention.kv_heads": kv_heads, "attention.head_size": d,
            "feed_forward.size": feed_forward, "layer.post_norms": 1, "layer.norms_before": 1,
            "attention.qkv_bias": 0, "attention.output_bias": 0, "attention.softcap": 0, "attention.int8_cache": 0,
            "attention.sinks": 0, "attention.output_gate": 0, "head_eight_bits": 0, "layer.eight_bits": 0,
            "epsilon": bits_of(config["rms_norm_eps"]), "layers": len(sliding), "vocabulary": config["vocab_size"],
            "attention.scale": bits_of(config["query_pre_attn_scalar"] ** -0.5), "feed_forward.experts": 0,
            "feed_forward.experts_per_token": 0, "feed_forward.normalized_experts": 0,
            "feed_forward.expert_vectors": 0, "feed_forward.swiglu_alpha": bits_of(1.0),
            "feed_forward.swiglu_beta": 0, "feed_forward.swiglu_limit": 0,
        }  # fmt: skip
        assert bytes(found["feed_forward.activation"]) == b"geglu"
        assert bytes(found["attention.qk_norm"]) == b"each head"
        assert found["attention.window"] == tuple(config["sliding_window"] if kind else 0 for kind in sliding)
        assert found["attention.table"] == tuple(0 if kind else 1 for kind in sliding)
    decode, prefill = programs
    assert decode["sizes"] == {"tokens": 1, "fewest": 1, "context": CONTEXT}
    assert operators(decode, calls, host_calls) == [["decode_layer"]]
    assert (prefill["sizes"]["tokens"], prefill["sizes"]["context"]) == (256, CONTEXT)
    # All of each layer but the last, which only makes keys and values; weights of four layers at a time.
    layer = [["gemm"], ["norm_rope"], ["flow_qkv"] * 2, ["gemm"], ["rms_norm_add"], ["gemm"] * 2, ["rms_norm_add"]]
    groups = [range(4), range(4, len(sliding) - 1)]
    assert operators(prefill, calls, host_calls) == [
        ["rms_norm"], ["dequant_engine"] * 16, *layer * len(groups[0]),
        ["dequant_engine"] * (4 * len(groups[1]) + 1), *layer * len(groups[1]), *layer[:2],
    ]  # fmt: skip
    padded = -(-feed_forward // 64) * 64  # the dequantisation engine weaves 64 columns at a time
    steps = [calls[step[0]] for host, dispatch in prefill["dispatches"] for step in dispatch if not host]
    products = [call["buffers"][2][1] // (2 * 256) for call in steps if call["operator"] == "gemm"]
    # N of a narrow product is padded to a megatile's columns: 8 columns of tiles, each with 2 tiles of 64.
    wide = 8 * 2 * 64
    assert max((heads + 2 * kv_heads) * d, hidden) < wide
    assert products == [*[wide, wide, padded, wide] * (len(sliding) - 1), wide]
    attends = [call["name"].rpartition("window")[2] for call in steps if call["operator"] == "flow_qkv"]
    assert attends == [str(config["sliding_window"] if kind else 0) for kind in sliding[:-1] for _ in range(2)]


def test_second_build_derives_nothing(flownpu, model_copy):
    arguments = ("build", model_copy, "--for", "emulate", "--context", CONTEXT - 1)
    done = flownpu(*arguments)
    assert (done.code, done.out) == (0, "")
    assert f"{model_copy}/artifacts/emulate: {CALLS} calls over {CONTEXT} positions, {CALLS} made" in done.err
    again = flownpu(*arguments, "--json")
    assert json.loads(again.out) == {
        "for": "emulate", "target": "npu2", "folder": f"{model_copy}/artifacts/emulate", "context": CONTEXT,
        "calls": CALLS, "made": 0, "left_out": [], "missing": [],
    }  # fmt: skip


def test_built_model_runs_like_cpu(flownpu, model_copy):
    """The greedy text after a prompt that is read in a chunk is that of the CPU device with bf16 activations."""
    assert flownpu("build", model_copy, "--for", "emulate", "--context", CONTEXT).code == 0
    prompt = 4 * "The with statement is used to wrap the execution of a block with methods. "
    ask = "run", model_copy, "-p", prompt, "--max-new-tokens", 24, "--temperature", 0
    ours, theirs = (flownpu(*ask, "--device", device, "--option", "activations=bf16") for device in ("emulate", "cpu"))
    assert (ours.code, theirs.code) == (0, 0), ours.err + theirs.err
    assert ours.out == theirs.out
    assert len(ours.out) > 24


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--context", "2049"], 1, "expected a context of 2048 or less, which the model is made for, got 2112"),
        (["--target", "npu3"], 2, "'npu3' is not one of 'npu1', 'npu2'"),
    ],
)
def test_model_that_cannot_be_built_is_refused(flownpu, model, tmp_path, options, code, words):
    done = flownpu("build", model, *options, "--for", "emulate", "--output", tmp_path / "out")
    assert done.code == code
    assert words in done.err
    assert not (tmp_path / "out").exists()


def test_path_without_model_is_refused(flownpu, tmp_path):
    done = flownpu("build", tmp_path / "none", "--for", "emulate")
    assert (done.code, "expected a model folder or an .onnx file" in done.err) == (1, True)


# --- For an NPU -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_tools")
def test_missing_toolchain_still_writes_mlir(flownpu, model, tmp_path):
    done = flownpu("build", model, "--context", CONTEXT, "--output", tmp_path / "out")
    assert done.code == 0
    assert f"{CALLS} calls over {CONTEXT} positions, as MLIR. Nothing was compiled:" in done.err
    assert "aiecc was not found" in done.err
    assert len(list((tmp_path / "out").rglob("*.mlir"))) == CALLS
    assert not list((tmp_path / "out").rglob("*.words"))


# At most this many positions of a call that depends on the position are compiled; all other words are derived from
# these. (flow_qkv with a context of 8192 has 363.)
FEW = 12


@pytest.fixture
def without_products(monkeypatch):
    """Programs without products: their calls do not depend on the position, and other such calls are left."""
    monkeypatch.setattr(prefill._Chunk, "_dequantise", lambda *_: None)
    monkeypatch.setattr(prefill._Chunk, "_multiply", lambda *_: None)


def compiled_by(tools, call, position, folder):
    """The stand-in's words of a call's program at a position, outside of a build."""
    mlir, file = folder / "design.mlir", folder / "design.insts"
    mlir.write_text(to_mlir(call.plan(position)))
    subprocess.run([tools.aiecc, mlir, f"--npu-insts-name={file}"], check=True)
    return np.fromfile(file, "<u4")


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize(("known", "context"), [(True, CONTEXT), (False, 128)], ids=["pieces", "without pieces"])
def test_compiled_families_are_instructions(flownpu, tools, model, tmp_path, known, context):
    """The words of a call at a position equal a compiler's for its plan there.

    This also holds at positions that were not compiled, and with a compiler whose instructions have unknown pieces.
    Only the stride of a dimension of one step may differ: the stand-in writes it as 0, as a compiler does.
    """
    tools.unknown.write_text("") if not known else None
    folder = tmp_path / "out"
    done = flownpu("build", model, "--for", "xclbin", "--context", context, "--output", folder)
    assert done.code == 0, done.err
    assert ("all classes of positions are compiled" in done.err) is not known
    target, emulated, _, arrays, calls, _, _ = read_index(folder)
    assert (target, emulated) == ("npu2", 0)
    programs, _ = programs_of_model(model, "npu2", context)
    by_name = {call.name: call for call in calls_of(programs)}
    arrays_of_calls = json.loads((folder / "manifest.json").read_text())["arrays"]
    buffers = {
        place: max(len(call["buffers"]) for call in arrays_of_calls[name]["calls"].values())
        for place, (name, _, _) in enumerate(arrays)
    }
    assert max(buffers.values()) > 5  # a decode layer's
    words = r"(\d+) programs of (\d+) arrays are compiled in (\d+) calls of aiecc"
    programs_said, *said = (int(number) for number in re.search(words, done.err).groups())
    assert said == [len(arrays), len(arrays)], "each array is compiled once"
    commands = [command[0] for command in tools.commands()].count("aiecc")
    made = len(list(folder.rglob("*.insts")))
    assert (made == programs_said, commands == len(arrays)) == (known, known)
    assert commands <= len(arrays) + (0 if known else len(calls)), "all classes of a call at once"
    for record in calls:
        array, xclbin, _ = arrays[record["array"]]
        arguments, _, pdi = (folder / xclbin).read_text().partition(" arguments, ")
        assert pdi.startswith("--pdi-name with [")
        assert int(arguments) == 3 + max(5, buffers[record["array"]])
        _, _, family = read_family(words_of(folder / record["file"]))
        call = by_name[record["name"]]
        compiled = {int(file.stem.partition("-position")[2] or call.last) for file in (folder / array).glob("*.insts")}
        assert call.last in compiled
        if known:
            assert len(compiled) <= FEW
        for position in sorted({0, call.last // 2, call.last - 1} if call.moves else {call.last}):
            expected = compiled_by(tools, call, position, tmp_path)
            differ = np.flatnonzero(family.at(position) != expected)
            assert not (expected[differ] & 0xFFFFF).any(), (call.name, position)
            assert not (expected[differ] >> 20).any(), (call.name, position)
    tools.commands()
    assert flownpu("build", model, "--for", "xclbin", "--context", context, "--output", folder).code == 0
    assert tools.commands() == []


@pytest.mark.usefixtures("without_products", "tools")
def test_instructions_beyond_controller_heap_are_refused(model, tmp_path, monkeypatch):
    limits = dataclasses.replace(NPU2, heap_bytes=4000)
    monkeypatch.setattr(compiled_artifacts, "LIMITS", {"npu2": limits})
    with pytest.raises(ValueError, match=r"instructions of 4000 bytes or less together.* got \d+ bytes"):
        build_artifacts(model, kind="xclbin", context=CONTEXT, output=tmp_path / "out")
    assert not (tmp_path / "out" / "index.words").exists()

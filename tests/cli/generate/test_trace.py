# SPDX-License-Identifier: Apache-2.0
"""`flownpu trace`: one file with nodes and dispatches on one clock, and the bytes and dispatches of a token."""

import gzip
import itertools
import json

import pytest

from flownpu.npu.artifacts import build_artifacts

TOKENS = 4
# Long enough for the array to read it as a chunk.
TEXT = 10 * "The with statement is used to wrap the execution of a block with methods. "
PROMPT = ("-p", TEXT, "--max-new-tokens", TOKENS)


@pytest.fixture(scope="module")
def artifacts(model, tmp_path_factory):
    return build_artifacts(model, context=256, output=tmp_path_factory.mktemp("trace") / "artifacts").folder


@pytest.fixture(scope="module")
def runs():
    """The results of the command's one run on the emulator: see `emulated`."""
    return []


@pytest.fixture
def emulated(flownpu, model, artifacts, tmp_path, runs):
    """The command's report and the trace's events, of a run that all tests share."""
    if not runs:
        path = tmp_path / "trace.json"
        done = flownpu("trace", model, *PROMPT, "--device", "emulate", "--option", f"artifacts={artifacts}",
                       "-o", path, "--json")  # fmt: skip
        assert done.code == 0, done.err
        runs.append((json.loads(done.out), json.loads(path.read_text())["traceEvents"]))
    return runs[0]


def test_token_is_one_dispatch_without_weights_and_keys(emulated):
    report, _ = emulated
    each = report["per_token"]
    assert each["dispatches"] == 1
    # The token's embedding, and zeros for the update that is still to be added to it, D = 256 in bf16 each; the logits
    # of 4096 words.
    assert each["bytes_to_device"] == 2 * 256 * 2
    assert each["bytes_to_host"] == 4096 * 2
    # Only the words that depend on the position; all words of the call are some 80 KB.
    assert 0 < each["word_bytes"] < 1000


def test_decoder_operators_are_all_dispatched(emulated):
    report, events = emulated
    assert report["placement"]["on_host"] == report["placement"]["left"] == []
    assert "6 layers and the LM head in 1 dispatch a token" in report["placement"]["summary"]
    on_array = {operator["operator"] for operator in report["operators"] if operator["place"] == "array (estimate)"}
    assert on_array == {"dequant_engine", "gemm", "flow_qkv", "decode_layer"}
    names = [event["name"] for event in events if event.get("args", {}).get("op_name") == "dispatch"]
    assert sum(name.startswith("decode_layer, layers 0-5, position ") for name in names) == TOKENS


def test_host_steps_lie_between_dispatches(emulated):
    """Each host step of the program is there once, under its label, in order, and never during a dispatch."""
    report, events = emulated
    ours = [event for event in events if event.get("args", {}).get("op_name") in ("dispatch", "host step")]
    steps = [event for event in ours if event["args"]["op_name"] == "host step"]
    # A norm before the first layer; norms and RoPE of heads in each layer; in each but the last, the norms after
    # attention and after the feed-forward.
    layers = range(6)
    labels = ["rms_norm, layer 0", *(f"norm_rope, layer {layer}" for layer in layers)]
    labels += 2 * [f"rms_norm_add, layer {layer}" for layer in layers[:-1]]
    assert sorted(event["name"].partition(", positions 0-")[0] for event in steps) == sorted(labels)
    assert {event["args"]["array"] for event in steps} == {"host"}
    ours.sort(key=lambda event: event["ts"])
    for before, after in itertools.pairwise(ours):
        assert before["ts"] + before["dur"] <= after["ts"] + 1
    found = {each["operator"]: each["count"] for each in report["operators"] if each["place"] == "host"}
    assert found == {"rms_norm": 1, "norm_rope": 6, "rms_norm_add": 10}


def test_dispatches_lie_inside_their_step(emulated):
    _, events = emulated
    ours = [event for event in events if event.get("args", {}).get("provider") == "FlowNPUExecutionProvider"]
    dispatches = [event for event in ours if event["args"].get("op_name") == "dispatch"]
    steps = [event for event in ours if event["args"].get("op_name") == "DecoderLayers"]
    assert len(steps) == TOKENS
    for dispatch in dispatches:
        # All times are cut to whole microseconds.
        assert any(
            step["ts"] - 1 <= dispatch["ts"] and dispatch["ts"] + dispatch["dur"] <= step["ts"] + step["dur"] + 2
            for step in steps
        )


def test_cpu_products_are_compared_with_memory_roof(flownpu, model, tmp_path):
    path = tmp_path / "trace.json.gz"
    done = flownpu("trace", model, *PROMPT, "--device", "cpu", "-o", path, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    (products,) = (each for each in report["operators"] if each["operator"] == "Q4NXMatMul")
    # 25 products a token; Q4NX blocks of all projections, and the LM head's.
    assert products["count"] == 25 * (TOKENS - 1)
    assert products["bytes"] % 640 == 0
    assert report["read_roof"] > 0
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]

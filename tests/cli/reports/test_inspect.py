# SPDX-License-Identifier: Apache-2.0
"""`flownpu inspect`: its numbers, counted another way."""

import json
import math

import numpy as np
import onnx
import pytest

from flownpu.convert import convert
from flownpu.ops import q4nx, q4nx_file


@pytest.fixture(scope="module")
def sizes(checkpoint):
    return json.loads((checkpoint / "config.json").read_text())


def q4nx_bytes(rows, columns):
    """32 x 32 weights take 640 bytes."""
    return math.ceil(rows / 32) * math.ceil(columns / 32) * 640


def test_q4nx_bytes_follow_from_checkpoints_sizes(flownpu, model, sizes):
    hidden, heads, kv, d = (
        sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    feed_forward, layers = sizes["intermediate_size"], sizes["num_hidden_layers"]
    layer = (
        q4nx_bytes((heads + 2 * kv) * d, hidden)
        + q4nx_bytes(hidden, heads * d)
        + 2 * q4nx_bytes(feed_forward, hidden)
        + q4nx_bytes(hidden, feed_forward)
    )
    summary = json.loads(flownpu("inspect", model, "--json").out)
    assert summary["weight_bytes"]["q4nx"] == layers * layer + q4nx_bytes(sizes["vocab_size"], hidden)
    elements = sum(math.prod(weight["shape"]) for weight in summary["weights"] if weight["type"] == "q4nx")
    weights_of_a_layer = hidden * (heads + 2 * kv) * d + heads * d * hidden + 3 * hidden * feed_forward
    assert elements == layers * weights_of_a_layer + sizes["vocab_size"] * hidden


@pytest.mark.parametrize(("kv_dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_kv_bytes_per_token_equal_hand_count(flownpu, checkpoint, sizes, tmp_path, kv_dtype, size):
    convert(checkpoint, tmp_path / "model", kv_dtype=kv_dtype)
    summary = json.loads(flownpu("inspect", tmp_path / "model", "--json").out)
    # Keys and values of each KV head of each layer.
    expected = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"] * size
    assert summary["kv_bytes_per_token"] == expected


def test_inspected_operators_equal_graph(flownpu, model):
    graph = onnx.load(model / "model.onnx", load_external_data=False).graph
    summary = json.loads(flownpu("inspect", model, "--json").out)
    assert sum(summary["operators"].values()) == len(graph.node)
    assert summary["operators"]["ai.flownpu:FlowQKVAttention"] == 6
    assert [value["name"] for value in summary["inputs"]] == [value.name for value in graph.input]
    assert [value["name"] for value in summary["outputs"]] == [value.name for value in graph.output]


def test_inspect_reads_no_weights(flownpu, model, model_copy):
    (model_copy / "model.onnx.data").unlink()
    whole = json.loads(flownpu("inspect", model, "--json").out)
    without = json.loads(flownpu("inspect", model_copy, "--json").out)
    assert without["weights"] == whole["weights"]


def test_text_report_has_rows(flownpu, model):
    done = flownpu("inspect", model)
    assert done.code == 0
    for text in ("ai.flownpu:Q4NXMatMul", "past_key_values.*.key (6)", "KV cache: 3.0 KiB a token", "gemma3-topics"):
        assert text in done.out
    assert "Quantisation error" in done.out


def test_quantisation_error_is_that_of_manifest(flownpu, model):
    errors = json.loads((model / "flownpu_manifest.json").read_text())["quantisation"]["relative_error"]
    worst = max(errors, key=errors.get)
    assert f"worst {100 * errors[worst]:.2f} % in {worst}" in flownpu("inspect", model).out


def test_onnx_file_equals_its_folder(flownpu, model):
    by_file = json.loads(flownpu("inspect", model / "model.onnx", "--json").out)
    by_folder = json.loads(flownpu("inspect", model, "--json").out)
    assert by_file == {**by_folder, "manifest": {}}


def test_q4nx_file_lists_tensors(flownpu, tmp_path):
    weight = np.random.default_rng(1).standard_normal((64, 300), dtype=np.float32)
    blocks = q4nx.pack(*q4nx.quantize(weight))
    norm = np.ones(300, dtype=q4nx.BFLOAT16)
    q4nx_file.write(tmp_path / "model.q4nx", {"q_proj.weight": blocks, "norm.weight": norm})
    summary = json.loads(flownpu("inspect", tmp_path / "model.q4nx", "--json").out)
    assert summary["weight_bytes"] == {"q4nx": 4 * 5120, "bfloat16": 600}
    shapes = {weight["name"]: weight["shape"] for weight in summary["weights"]}
    assert shapes == {"q_proj.weight": [4, 5120], "norm.weight": [300]}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.onnx", None, "no such file or folder"),
        ("model.onnx", b"not a model", "is not an ONNX model"),
        ("model.q4nx", b"\xff" * 64, "is not a .q4nx file, or is damaged"),
        ("model.gguf", b"GGUF", "expected a model folder, an .onnx file or a .q4nx file"),
    ],
)
def test_path_without_model_is_refused(flownpu, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = flownpu("inspect", tmp_path / name)
    assert (done.code, done.out) == (1, "")
    assert words in done.err
    assert name in done.err


def test_check_finds_nothing_in_whole_model(flownpu, model):
    assert flownpu("inspect", model, "--check").code == 0


def test_check_names_tensor_of_flipped_bit(flownpu, model_copy):
    tensors = json.loads((model_copy / "flownpu_manifest.json").read_text())["tensors"]
    place = tensors["layers.2.mlp.down_proj"]
    data = bytearray((model_copy / "model.onnx.data").read_bytes())
    data[place["offset"] + 777] ^= 4
    (model_copy / "model.onnx.data").write_bytes(data)
    done = flownpu("inspect", model_copy, "--check")
    assert done.code == 1
    end = place["offset"] + place["bytes"]
    assert "model.onnx.data has other contents than were written" in done.err
    assert f"tensor layers.2.mlp.down_proj (bytes {place['offset']} to {end}) is damaged" in done.err
    assert done.err.count("is damaged") == 2  # the folder, and that tensor alone


def test_check_finds_truncated_and_missing_files(flownpu, model_copy):
    data = (model_copy / "model.onnx.data").read_bytes()
    (model_copy / "model.onnx.data").write_bytes(data[:-4096])
    (model_copy / "tokenizer.json").unlink()
    done = flownpu("inspect", model_copy, "--check")
    assert done.code == 1
    assert f"model.onnx.data has {len(data) - 4096} bytes, expected {len(data)}" in done.err
    assert "tokenizer.json is missing" in done.err


def test_check_needs_manifest(flownpu, model_copy):
    (model_copy / "flownpu_manifest.json").unlink()
    done = flownpu("inspect", model_copy, "--check")
    assert done.code == 1
    assert "holds no flownpu_manifest.json" in done.err

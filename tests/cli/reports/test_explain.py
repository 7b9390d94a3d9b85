# SPDX-License-Identifier: Apache-2.0
"""`flownpu explain`: its numbers, derived in another way, and its reasons."""

import json
import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from flownpu.explain.placement import layer_of
from flownpu.npu.artifacts import programs_of_model
from flownpu.npu.layers import read_decoder
from flownpu.ops.definitions import add_functions

HEADER = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1, "ai.flownpu": 1]>'


@pytest.fixture
def explained(flownpu):
    """Runs `flownpu explain --json` with a given bandwidth, so that none is measured; returns the document."""

    def run(*arguments):
        done = flownpu("explain", *arguments, "--json", "--bandwidth", 10)
        assert done.code == 0, done.err
        return json.loads(done.out)

    return run


@pytest.fixture
def graph_file(tmp_path):
    """Writes a graph in ONNX's textual syntax, with its initializers."""

    def write(text, **initializers):
        model = onnx.parser.parse_model(HEADER + text)
        if not model.functions and any(node.domain == "ai.flownpu" for node in model.graph.node):
            defined = ir.from_proto(model)
            add_functions(defined)
            model = ir.to_proto(defined)
        model.graph.initializer.extend(
            onnx.numpy_helper.from_array(array, name) for name, array in initializers.items()
        )
        for number, node in enumerate(model.graph.node):
            node.name = node.name or f"{node.op_type}_{number}"
        path = tmp_path / "graph.onnx"
        onnx.save(model, path)
        return path

    return write


def four_bits(rows, columns, bits=4):
    """Random codes and scales for a MatMulNBits in blocks of 32."""
    generator = np.random.default_rng(1)
    codes = generator.integers(0, 256, (rows, columns // 32, 32 * bits // 8), np.uint8)
    return codes, generator.uniform(0.5, 1, rows * columns // 32).astype(np.float32)


# --- Placement --------------------------------------------------------------------------------------------------------


def test_converted_model_is_all_on_device(explained, model):
    graph = onnx.load(model / "model.onnx", load_external_data=False).graph
    document = explained(model, "--device", "cpu")
    assert document["source"] == "converted"
    assert document["placement"]["counts"] == {"flownpu": len(graph.node)}
    assert [node["node"] for node in document["placement"]["nodes"]] == [node.name for node in graph.node]
    assert {node["layer"] for node in document["placement"]["nodes"]} == {None, *range(6)}
    assert document["misses"] == []


def test_unsupported_node_has_reason(explained, graph_file):
    path = graph_file("g (float[4, 64] x) => (float[4, 64] y) { a = Add(x, x) b = Tan(a) y = Mul(b, b) }")
    document = explained(path, "--device", "cpu")
    nodes = {node["node"]: node for node in document["placement"]["nodes"]}
    assert (nodes["Tan_1"]["place"], nodes["Tan_1"]["reason"]) == ("cpu", "the cpu device has no ai.onnx::Tan")
    # The nodes beside it would not pay for the hand-over.
    assert nodes["Add_0"]["reason"] == nodes["Mul_2"]["reason"]
    assert nodes["Add_0"]["reason"].startswith("too little work for another provider")
    assert document["placement"]["counts"] == {"flownpu": 0, "cpu": 3}
    assert document["speed"]["points"] == []


def test_host_nodes_of_npu_have_reason(explained, model_copy):
    counts = explained(model_copy, "--device", "emulate")
    nodes = [node for node in counts["placement"]["nodes"] if node["place"] == "host"]
    # No design was compiled for this model: its layers' operators are what an NPU would compute.
    assert {node["operator"] for node in nodes} == {"ai.flownpu:Q4NXMatMul", "ai.flownpu:FlowQKVAttention"}
    assert all("flownpu build" in node["reason"] for node in nodes)


def test_folded_constants_run_nowhere(explained, graph_file):
    text = "g (float[4] x) => (float[4] y) { b = Sqrt(a) y = Add(x, b) }"
    document = explained(graph_file(text, a=np.ones(4, np.float32)))
    assert {node["operator"]: node["place"] for node in document["placement"]["nodes"]}["Sqrt"] == "folded"


def test_operators_replaced_by_their_definition_are_reported(explained, graph_file):
    path = graph_file(
        "g (float[4] x) => (float[4] z) { y = Tan(x) z = ai.flownpu.Twice(y) }"
        ' <domain: "ai.flownpu", opset_import: ["": 21]> Twice (a) => (b) { b = Add(a, a) }'
    )
    document = explained(path, "--device", "cpu")
    nodes = {node["node"]: node for node in document["placement"]["nodes"]}
    assert nodes["Twice_1"]["place"] == "cpu"
    assert "replaced by its definition" in nodes["Twice_1"]["reason"]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("/model/layers.3/attn/q_proj/MatMul", 3),
        ("/layers.12.mlp.down_proj", 12),
        ("/encoder/layer.0/attention/self/Softmax", 0),
        ("/h.7/Add", 7),
        ("/model/norm/Mul_1", None),
        ("/vision/multilayers.3/Add", None),
    ],
)
def test_layers_are_read_from_names(name, layer):
    assert layer_of(name) == layer


# --- Rules ------------------------------------------------------------------------------------------------------------


def test_unpackable_weight_gives_reason_of_rule(explained, graph_file):
    codes, scales = four_bits(64, 64)
    narrow, narrow_scales = four_bits(64, 64, bits=2)
    path = graph_file(
        "g (float[1, 64] x) => (float[1, 64] y) {"
        "  a = com.microsoft.MatMulNBits <N = 64, K = 64, bits = 4, block_size = 32> (x, codes, scales)"
        "  y = com.microsoft.MatMulNBits <N = 64, K = 64, bits = 2, block_size = 32> (a, narrow, narrow_scales)"
        "}",
        codes=codes, scales=scales, narrow=narrow, narrow_scales=narrow_scales,
    )  # fmt: skip
    document = explained(path)
    assert document["source"] == "genai"
    assert {
        "rule": "q4nx_matmul",
        "reason": "bits=2: Q4NX stores codes of 4 or 8 bits; export this weight with these",
        "nodes": ["MatMulNBits_1"],
    } in document["misses"]
    # Without zero points there are no minima: 32 x 32 weights take 576 bytes.
    assert document["converted_weight_bytes"] == 4 * 576 + narrow.nbytes + narrow_scales.nbytes


def test_softmax_without_attention_gives_reason_of_rule(explained, flownpu, graph_file):
    path = graph_file("g (float[2, 8] x) => (float[2, 8] y) { a = Softmax(x) y = Tan(a) }")
    document = explained(path)
    assert document["source"] == "plain"
    (attention,) = document["attentions"]
    assert (attention["node"], attention["prompt_level"]) == ("Softmax_0", 1)
    (miss,) = document["misses"]
    assert miss["rule"] == "scaled_dot_product_attention"
    assert attention["prompt_reason"] == miss["reason"]
    assert miss["reason"] in flownpu("explain", path, "--bandwidth", 10).out


# --- Attention --------------------------------------------------------------------------------------------------------


def test_all_attentions_are_folded(explained, model, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    attentions = explained(model)["attentions"]
    assert [attention["layer"] for attention in attentions] == list(range(config["num_hidden_layers"]))
    for attention, kind in zip(attentions, config["layer_types"], strict=True):
        assert (attention["prompt_level"], attention["token_level"]) == (3, 3)
        assert (attention["heads"], attention["kv_heads"]) == (4, 2)
        assert attention["kind"] == "GQA"
        assert attention["window"] == (config["sliding_window"] if kind == "sliding_attention" else -1)


@pytest.mark.parametrize(
    # Level 3: a tile's queries in bf16, sums in f32 and an eighth of the output in bf16 take 6 1/4 bytes a number, for
    # at least 8 rows; two chunks take 4 bytes a number, for at least 8 positions: 50 d + 32 d bytes, and 876 for
    # scores, sums and counts of rows. L1 has 64 KB, less 1 KB of stack and 1 KB for constants.
    # Level 2: a tile's 8 rows of scores take 6 bytes a key, in f32 and bf16, beside 8 queries and 8 keys.
    ("d", "tokens", "level"),
    [(256, 1024, 3), (512, 1024, 3), (768, 1024, 1), (768, 256, 2)],
)
def test_head_beyond_tile_is_not_folded(explained, graph_file, d, tokens, level):
    path = graph_file(
        f"g (float[1, {tokens}, {d}] q, float[1, {tokens}, {d}] k, float[1, {tokens}, {d}] v)"
        f" => (float[1, {tokens}, {d}] y) {{"
        f"  y, a, b = ai.flownpu.FlowQKVAttention <num_heads = 1, kv_num_heads = 1, head_size = {d}, causal = 0>"
        "     (q, k, v)"
        "}"
    )
    (attention,) = explained(path, "--device", "cpu")["attentions"]
    l1 = 62 * 1024
    assert level == (3 if 82 * d + 876 <= l1 else 2 if 8 * 6 * tokens + (8 + 8) * 2 * d < l1 else 1)
    assert (attention["prompt_level"], attention["token_level"]) == (level, None)
    assert ("all of it is folded" if level == 3 else "memory") in attention["prompt_reason"]


# --- Bytes and speed --------------------------------------------------------------------------------------------------


def blocks(rows, columns):
    """32 x 32 weights take 640 bytes."""
    return math.ceil(rows / 32) * math.ceil(columns / 32) * 640


def test_cpu_roof_is_bandwidth_over_bytes(explained, model, checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    hidden, heads, kv, d, feed_forward, layers = (
        config[name]
        for name in (
            "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
            "num_hidden_layers",
        )
    )  # fmt: skip
    weights = layers * (
        blocks((heads + 2 * kv) * d, hidden)
        + blocks(hidden, heads * d)
        + 2 * blocks(feed_forward, hidden)
        + blocks(hidden, feed_forward)
    ) + blocks(config["vocab_size"], hidden)
    norms = 4 * (layers * (4 * hidden + 2 * d) + hidden)  # four of the states and two of heads, in float32
    windows = [config["sliding_window"] if kind == "sliding_attention" else 1024 for kind in config["layer_types"]]
    seen = 2 * kv * d * 2 * sum(min(window, 1024) for window in windows)  # keys and values in bfloat16
    document = explained(model)
    assert document["weight_bytes"]["q4nx"] == weights
    assert document["kv_bytes_per_token"] == layers * 2 * kv * d * 2
    (point,) = document["speed"]["points"]
    assert point["context"] == 1024
    # The graph's other constants (a scale, indices) are a few bytes.
    assert point["cpu_tokens_per_second"] == pytest.approx(10e9 / (weights + norms + seen), rel=1e-4)


def test_bandwidth_is_measured_unless_given(flownpu, model, monkeypatch):
    monkeypatch.setattr("flownpu.explain.speed.read_bandwidth", lambda: 20e9)
    document = json.loads(flownpu("explain", model, "--json").out)
    assert document["speed"]["read_bandwidth"] == 20e9
    given = json.loads(flownpu("explain", model, "--json", "--bandwidth", 10).out)["speed"]["points"][0]
    assert document["speed"]["points"][0]["cpu_tokens_per_second"] == 2 * given["cpu_tokens_per_second"]


def test_npu_estimate_is_below_memory_roof(explained, model):
    speed = explained(model)["speed"]
    assert speed["npu"]["takes"]
    assert "6 layers and the LM head" in speed["npu"]["text"]
    (point,) = speed["points"]
    # No faster than its memory, two channels of DDR5-5600, reads the weights: 2 x 8 bytes x 5.6 GHz.
    assert 0 < point["npu_tokens_per_second"] < 89.6e9 / speed["step_bytes"]
    assert point["npu_ttft_seconds"] > 0


def test_program_listing_equals_build(explained, flownpu, model):
    """The programs for the session's decoder of the graph, counted from the programs themselves."""
    document = explained(model)["speed"]["npu"]["programs"]
    written = programs_of_model(model, "npu2")[0]
    assert [(found["kind"], found["tokens"], found["steps"]) for found in document] == [
        (program.kind, program.tokens, len(program.steps)) for program in written
    ]
    for found, program in zip(document, written, strict=True):
        assert found["dispatches"] == sum(steps[0].call.array != "host" for steps in program.dispatches)
        assert sum(call["steps"] for call in found["calls"]) == found["steps"]
        assert sum(call["steps"] * call["seconds"] for call in found["calls"]) + found["seconds"]["host"] + (
            found["seconds"].get("changes of array", 0.0)
        ) == pytest.approx(sum(found["seconds"].values()))
        assert found["instruction_words"] > 0
        assert found["read_bytes"] > found["written_bytes"]
    # A token reads all weights once, whatever else.
    decoder = read_decoder(model)
    assert document[0]["read_bytes"] > len(decoder.windows) * decoder.shape.weight_bytes() + decoder.head.bytes
    text = flownpu("explain", model, "--bandwidth", 10).out
    assert "The program of a token at position 1023" in text
    assert f"{document[-1]['changes']} changes of array" in text


def test_explanation_says_why_npu_refuses_node(explained, flownpu, graph_file):
    path = graph_file("g (float[4] x) => (float[4] y) { y = Tan(x) }")
    npu = explained(path)["speed"]["npu"]
    assert not npu["takes"]
    assert "the array computes decoders, and there is no attention" in npu["text"]
    text = flownpu("explain", path).out
    assert npu["text"] in text
    assert "No tokens/s: the graph has no KV cache" in text


def test_text_report_has_rows(flownpu, model):
    done = flownpu("explain", model, "--device", "cpu", "--bandwidth", 10)
    assert done.code == 0
    for text in (
        "FlowNPU: 73 of 73 nodes", "because device=cpu", "0-4", "GQA", "KV cache: 2.9 MiB for 1000 tokens",
        "NPU, predicted", "at 10.0 GB/s", "nothing was run",
    ):  # fmt: skip
        assert text in done.out


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent", None, "expected a model folder or an .onnx file"),
        ("absent.onnx", None, "no such file"),
        ("model.onnx", b"not a model", "is not an ONNX model"),
        ("model.gguf", b"GGUF", "model.gguf OUT` makes one of it"),
    ],
)
def test_path_without_model_is_refused(flownpu, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    done = flownpu("explain", tmp_path / name)
    assert (done.code, done.out) == (1, "")
    assert words in done.err


def test_checkpoint_error_names_convert_command(flownpu, checkpoint):
    done = flownpu("explain", checkpoint)
    assert done.code == 1
    assert "flownpu convert" in done.err


def test_unknown_provider_option_is_refused(flownpu, model):
    done = flownpu("explain", model, "--option", "colour=blue")
    assert done.code == 1
    assert "colour" in done.err

# SPDX-License-Identifier: Apache-2.0
"""The decoder in a graph, its constants in the array's order, and the reasons against graphs without a decoder."""

import dataclasses
import json
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from flownpu.aie.designs.bias import with_bias
from flownpu.aie.designs.decode_layer.shape import LayerShape, interleave
from flownpu.ops import q4nx
from flownpu.ops.q4nx import as_read
from flownpu.selftest.reference.layer import padded
from tests.aie.designs.decode_layer.cases import checkpoint_layer, norm_weights
from tests.npu.decoders import (
    GivenNode,
    in_eight_bits,
    in_layout,
    npu,
    partition,
    read_nodes,
    with_position_ids,
)

MODELS = ("trained", "gemma3_text", "llama", "qwen3")
BFLOAT16 = ml_dtypes.bfloat16


def lower(nodes, outputs=("logits",)):
    return npu.lower_layers(partition(nodes), list(outputs))


def decoder_of(lowered):
    assert lowered.on_host == []
    return next(node for node in lowered.nodes if node.op_type == "DecoderLayers")


def by_name(nodes, name):
    return next(node for node in nodes if node.name == name)


# --- What is found ----------------------------------------------------------------------------------------------------


def same(values):
    """An attribute of all layers is one value if they have the same."""
    return values[0] if len(set(values)) == 1 else values


def expected_attributes(name, config):
    gemma = config["model_type"].startswith("gemma3")
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    sliding = [kind == "sliding_attention" for kind in kinds]
    first = sliding[0]  # the first layer's angles are table 0
    return {
        "hidden": config["hidden_size"], "vocabulary": config["vocab_size"], "layers": config["num_hidden_layers"],
        "positions": config["max_position_embeddings"], "epsilon": np.float32(config["rms_norm_eps"]),
        "all_logits": 0, "position_ids": 0, "rotated_size": 0, "given_tables": 0,
        "head_eight_bits": 0, "layer.eight_bits": 0,
        "layer.post_norms": int(gemma), "layer.norms_before": 1, "feed_forward.size": config["intermediate_size"],
        "feed_forward.activation": "geglu" if gemma else "swiglu", "feed_forward.experts": 0,
        "feed_forward.experts_per_token": 0, "feed_forward.normalized_experts": 0, "feed_forward.expert_vectors": 0,
        "feed_forward.swiglu_alpha": 1, "feed_forward.swiglu_beta": 0, "feed_forward.swiglu_limit": 0,
        "attention.heads": config["num_attention_heads"], "attention.head_size": config["head_dim"],
        "attention.kv_heads": config["num_key_value_heads"], "attention.softcap": 0, "attention.qkv_bias": 0,
        "attention.output_bias": 0, "attention.sinks": 0, "attention.output_gate": 0,
        "attention.qk_norm": "each head" if gemma or name == "qwen3" else "none",
        "attention.bidirectional_blocks": 0, "attention.window_sized_cache": 0, "attention.mask": 0,
        "attention.int8_cache": 0,
        "attention.scale": np.float32(config.get("query_pre_attn_scalar", config["head_dim"]) ** -0.5),
        "attention.window": same([config["sliding_window"] if slides else 0 for slides in sliding]),
        "attention.table": same([int(slides != first) for slides in sliding]),
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_decoders_of_all_kinds_match(name, models):
    nodes, outputs = read_nodes(models.converted(name))
    node = decoder_of(lowered := lower(nodes, outputs))
    config = json.loads((models.checkpoint(name).folder / "config.json").read_text())
    assert node.attributes == expected_attributes(name, config)
    assert node.domain == "ai.flownpu.npu"
    layers = range(config["num_hidden_layers"])
    caches = [
        [f"{kind}.{i}.{part}" for i in layers for part in ("key", "value")] for kind in ("past_key_values", "present")
    ]
    hidden, total, lengths, *pasts = node.inputs
    assert [total, lengths] == ["/total_sequence_length/output", "/seqlens_k/output"]
    assert hidden == ("/embeddings/output" if "gemma" in config["model_type"] else "/embed_tokens/rows/output")
    assert pasts == caches[0]
    assert node.outputs == ["logits", *caches[1]]
    # The other nodes run before it. Those of the last token's index are gone, since nothing reads it.
    others = {"ReduceSum", "Sub", "Cast", "Shape", "Gather", "Where", "Q4NXGather", "Mul"}
    assert lowered.nodes[-1].op_type == "DecoderLayers"
    assert {other.op_type for other in lowered.nodes[:-1]} <= others
    assert not any("last_token" in other.name for other in lowered.nodes)


def test_layers_without_rope_have_table_of_no_rotation(models):
    """SmolLM3 has such layers: cosines of 1 and sines of 0 follow the table of the layers that have RoPE."""
    node = decoder_of(lower(*read_nodes(models.converted("smollm3"))))
    assert node.attributes["attention.table"] == [0, 1, 0]
    positions, half = node.attributes["positions"], node.attributes["attention.head_size"] // 2
    tables = np.frombuffer(node.packed("rotary"), BFLOAT16).reshape(2, positions, 2, half).astype(np.float32)
    assert np.all(tables[1, :, 0] == 1)
    assert np.all(tables[1, :, 1] == 0)
    assert np.all(tables[0, 1:, 1, 0] != 0)


@pytest.mark.parametrize("name", ["biases", "bias block"])
def test_biases_are_packed_as_designs_read_them(name, models):
    """Compared with aie/designs/bias.py, starting from the checkpoint; vectors are as long as a row with its bias."""
    nodes, outputs = read_nodes(models.converted(name))
    node = decoder_of(lower(nodes, outputs))
    assert node.attributes["attention.qkv_bias"] == 1
    with safe_open(models.checkpoint(name).folder / "model.safetensors", "np") as file:
        weight, bias = (
            np.concatenate([file.get_tensor(f"model.layers.0.self_attn.{part}_proj.{kind}") for part in "qkv"])
            for kind in ("weight", "bias")
        )
    hidden = weight.shape[1]
    packed = q4nx.pack(*q4nx.quantize(weight.astype(np.float32)))
    blocks = with_bias(packed, bias.astype(np.float32), hidden)
    assert node.packed("weights")[: blocks.nbytes] == blocks.tobytes()
    line = (hidden // 256 + 1) * 256
    layers = node.attributes["layers"]
    assert len(node.packed("vectors")) == (2 * layers + 1) * line * np.dtype(BFLOAT16).itemsize


def test_windowed_caches_are_matched(models):
    nodes, outputs = read_nodes(models.converted("gemma3_text", sliding_window_cache=True))
    assert decoder_of(lower(nodes, outputs)).attributes["attention.window_sized_cache"] == [1, 0, 1]


def test_imported_graph_form_is_matched(models):
    """A Reshape makes the index, and tokens are counted on the hidden states (graph_rewrites/last_token_logits.py)."""
    nodes, outputs = read_nodes(models.converted("llama"))
    shape = next(node for node in nodes if node.op_type == "Shape" and node.attributes.get("start") == 1)
    shape.inputs[0] = by_name(nodes, "/last_token/hidden").inputs[0]
    unsqueeze = by_name(nodes, "/last_token/index")
    unsqueeze.op_type = "Reshape"
    nodes.sort(key=lambda node: "last_token" in node.name or node.name == "/lm_head")
    assert decoder_of(lower(nodes, outputs)).attributes["layers"] == 3


def test_sum_and_norm_apart_are_same_decoder(models):
    """As exporters of PyTorch's graphs write them."""
    nodes, outputs = read_nodes(models.converted("llama"))
    expected, apart = decoder_of(lower(nodes, outputs)), []
    for node in nodes:
        if node.op_type != "SkipSimplifiedLayerNormalization":
            apart.append(node)
            continue
        a, b, weight = node.inputs
        total = [f"{node.name}/total", "float", None, None]
        if len(node.outputs) > 3:
            total = node.outputs[3]
        apart.append(GivenNode(f"{node.name}/add", "Add", "", {}, [a, b], [total]))
        attributes = {"axis": -1, "epsilon": node.attributes["epsilon"]}
        norm = GivenNode(node.name, "SimplifiedLayerNormalization", "", attributes, [total, weight], node.outputs[:1])
        apart.append(norm)
    found = decoder_of(lower(apart, outputs))
    assert found.attributes == expected.attributes
    assert all(found.packed(name) == expected.packed(name) for name in ("weights", "vectors", "rotary"))


def test_sum_in_either_order_matches(models):
    nodes, outputs = read_nodes(models.converted("gemma3_text"))
    for node in nodes:
        if node.op_type == "SkipSimplifiedLayerNormalization":
            node.inputs[0], node.inputs[1] = node.inputs[1], node.inputs[0]
    decoder_of(lower(nodes, outputs))


def test_projection_beside_decoder_stays(models):
    """A projection outside the decoder stays on the host, with the reason, together with its unread output."""
    nodes, outputs = read_nodes(models.converted("llama"))
    embeddings = by_name(nodes, "/embed_tokens/rows")
    weight = by_name(nodes, "/lm_head").inputs[1]
    sizes = {"M": 320, "K": 288}
    beside = GivenNode("beside", "Q4NXMatMul", "ai.flownpu", sizes, [embeddings.outputs[0], weight])
    beside.outputs.append(["beside/output", "float", None, None])
    lowered = lower([*nodes, beside], [*outputs, "beside/output"])
    assert [node.op_type for node in lowered.nodes][-2:] == ["DecoderLayers", "Q4NXMatMul"]
    reason = "it is not one of the decoder's layers, which are what the array computes"
    assert lowered.on_host == [("beside", "Q4NXMatMul", reason)]


# --- Constants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["8/8/8", "8/4/4", "4/8/8"])
def test_weights_of_eight_bits_are_packed_in_planes(weights, models):
    nodes, outputs = read_nodes(models.converted("llama", weights=weights))
    node = decoder_of(lower(nodes, outputs))
    attention, head, feed_forward = (int(bits) // 8 for bits in weights.split("/"))
    assert node.attributes["layer.eight_bits"] == 0b0011 * attention + 0b1100 * feed_forward
    assert node.attributes["head_eight_bits"] == head
    packed = []
    for layer in range(node.attributes["layers"]):
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            blocks = as_read(by_name(nodes, f"/layers.{layer}.{name}").inputs[1][3])
            if name == "mlp.gate_up_proj":  # 608 rows, rounded up to 640
                halves = [np.pad(half, ((0, 1), (0, 0), (0, 0))) for half in np.split(blocks, 2)]
                blocks = interleave(np.concatenate(halves))
            packed.append(blocks.reshape(-1))
    packed.append(as_read(by_name(nodes, "/lm_head").inputs[1][3]).reshape(-1))
    assert node.packed("weights") == np.concatenate(packed).tobytes()


@pytest.mark.parametrize(
    "changed", [in_eight_bits, partial(in_layout, layout=q4nx.TABLE, symmetric=True)], ids=["eight bits", "table"]
)
def test_layers_may_differ_in_bits_of_weights(changed, models):
    """Only one layer's down projection has 8 bits, as in GGUF's Q4_K_M, or a table; all else is packed as before."""
    nodes, outputs = read_nodes(models.converted("llama"))
    before = decoder_of(lower(nodes, outputs))
    place = next(i for i, node in enumerate(nodes) if node.name == "/layers.1.mlp.down_proj")
    (nodes[place],) = changed([nodes[place]])
    after = decoder_of(lower(nodes, outputs))
    assert after.attributes["layer.eight_bits"] == [0, 0b1000, 0]
    assert after.attributes["head_eight_bits"] == 0
    packed, more = as_read(nodes[place].inputs[1][3]), after.packed("weights")
    size = packed.nbytes // 2  # of 4 bits
    head = as_read(by_name(nodes, "/lm_head").inputs[1][3]).nbytes
    end = (len(before.packed("weights")) - head) * 2 // 3  # of the layers 0 and 1
    parts = before.packed("weights")[: end - size], packed.tobytes(), before.packed("weights")[end:]
    assert more == b"".join(parts)


@pytest.mark.parametrize("name", MODELS)
def test_constants_are_packed_as_designs_read_them(name, models):
    """Compared with the layout's definition, aie/designs/decode_layer/shape.py, starting from the checkpoint."""
    nodes, outputs = read_nodes(models.converted(name))
    node = decoder_of(lower(nodes, outputs))
    given = node.attributes
    with safe_open(models.checkpoint(name).folder / "model.safetensors", "np") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    heads, kv_heads, head_size = (given[f"attention.{key}"] for key in ("heads", "kv_heads", "head_size"))
    shape = LayerShape(
        given["hidden"], heads, kv_heads, head_size, given["feed_forward.size"], given["feed_forward.activation"],
        bool(given["layer.post_norms"]), given["attention.qk_norm"] == "each head",
    )  # fmt: skip
    whole = dataclasses.replace(shape, feed_forward=-(-shape.feed_forward // 64) * 64)
    assert whole.feed_forward > shape.feed_forward
    count = given["layers"]
    layers = [checkpoint_layer(shape, tensors, index) for index in range(count)]
    more = (whole.feed_forward - shape.feed_forward) // 32
    for layer in layers:
        halves = [np.pad(half, ((0, more), (0, 0), (0, 0))) for half in np.split(layer.gate_up, 2)]
        layer.gate_up = np.concatenate(halves)
        assert interleave(layer.gate_up).nbytes == whole.projections[2].bytes
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    weights = [layer.blocks() for layer in layers] + [q4nx.pack(*q4nx.quantize(head)).reshape(-1)]
    assert node.packed("weights") == np.concatenate(weights).tobytes()

    last = [f"model.layers.{count - 1}.post_feedforward_layernorm.weight"] if shape.post_norms else []
    norms = norm_weights(shape, np.stack([tensors[key] for key in [*last, "model.norm.weight"]]))
    if shape.post_norms:  # no sum comes before the first layer, so there is nothing to norm
        layers[0].norms[0] = 0
    vectors = [layer.vectors(shape) for layer in layers] + [padded(norm, shape.line) for norm in norms]
    assert node.packed("vectors") == np.concatenate(vectors).tobytes()

    initializers = {value[0]: value[3] for each in nodes for value in each.inputs}
    table = given["attention.table"]
    tables = max([table] if isinstance(table, int) else table) + 1
    angles = [np.concatenate([initializers[f"rotary.{t}.{part}"] for part in ("cos", "sin")], 1) for t in range(tables)]
    assert node.packed("rotary") == np.stack(angles).astype(BFLOAT16).tobytes()


@pytest.mark.parametrize("layout", [q4nx.NARROW, q4nx.SYMMETRIC], ids=["narrow", "symmetric"])
@pytest.mark.parametrize("name", ["uneven", "gemma3_text"])
def test_weights_of_any_layout_become_wide_blocks(name, layout, models):
    """The array's bytes are those of the same weights in wide blocks; "uneven" has padding in all directions."""
    nodes, outputs = read_nodes(models.converted(name))
    found, expected = (
        decoder_of(lower(in_layout(nodes, each, symmetric=not layout.minima), outputs)).packed("weights")
        for each in (layout, q4nx.WIDE)
    )
    assert found == expected


# --- What is in the way -----------------------------------------------------------------------------------------------


def attribute(node, **values):
    def change(nodes):
        by_name(nodes, node).attributes.update(values)

    return change


def input_of(node, place, value):
    def change(nodes):
        inputs = by_name(nodes, node).inputs
        inputs.extend([["", "", None, None] for _ in range(place + 1 - len(inputs))])
        inputs[place] = value

    return change


def without_input(node, *places):
    def change(nodes):
        for place in places:
            by_name(nodes, node).inputs[place] = ["", "", None, None]

    return change


def another_reader(value):
    def change(nodes):
        node = GivenNode("reader", "Abs", "", {}, [[value, "float", None, None]], [["read", "float", None, None]])
        nodes.append(node)

    return change


def rename(node, op_type):
    def change(nodes):
        by_name(nodes, node).op_type = op_type

    return change


def static_batch(nodes):
    for node in nodes:
        for value in node.inputs:
            if value[0].startswith("past_key_values"):
                value[2] = [2, 2, -1, 32]


def other_blocks(nodes):
    by_name(nodes, "/layers.1.mlp.down_proj").inputs[1][2] = [9, 18, 640]


def spoilt_weight(nodes):
    by_name(nodes, "/layers.1.mlp.down_proj").inputs[1][3] = None


def without_rope(nodes):
    for node in nodes:
        if node.op_type == "FlowQKVAttention":
            node.attributes["do_rotary"] = 0


VALUE = ["given", "float", None, None]
ATTENTION = "/layers.1.self_attn/attention"
CASES = {
    "bias": (input_of("/layers.1.mlp.down_proj", 2, VALUE), "down projection has a bias, which the array's"),
    "a bias that is computed": (
        input_of("/layers.1.self_attn.qkv_proj", 2, VALUE), "expected the QKV projection's bias to be an initializer",
    ),
    "residual": (input_of("/layers.0.mlp.down_proj", 3, VALUE), "'/layers.0.mlp.down_proj': expected no residual"),
    "a smaller layer": (
        attribute("/layers.2.mlp.gate_up_proj", M=128),
        "'/layers.2.mlp.gate_up_proj': expected M = 608, K = 288 and gating = geglu as in the layers before, got 128",
    ),
    "another activation": (attribute("/layers.1.mlp.gate_up_proj", gating="swiglu"), "got 608, 288 and swiglu"),
    "no activation": (attribute("/layers.0.mlp.gate_up_proj", gating="none"), "gating = geglu or swiglu, got none"),
    "a weight that is computed": (
        spoilt_weight,
        r"down_proj': expected W to be an initializer, uint8 \[9,3,5120\], \[9,19,640\] or \[9,19,576\]",
    ),
    "a weight of other sizes": (other_blocks, r"down_proj': expected W to be an initializer, uint8 \[9,3,5120\], "),
    "epsilon": (attribute("/norm", epsilon=1e-3), "'/norm': expected the epsilon of all norms to be 1e-06, got 0.001"),
    "QK-norm's epsilon": (attribute(ATTENTION, qk_norm_epsilon=1e-3), "attention': expected the epsilon of all norms"),
    "softcap": (attribute(ATTENTION, softcap=30.0), "expected softcap = 0 as in the layers before, got 30"),
    "causal": (attribute(ATTENTION, causal=0), "expected causal = 1"),
    "no RoPE": (without_rope, "expected RoPE in some layer, whose table tells how many positions there are"),
    "interleaved": (attribute(ATTENTION, rotary_interleaved=1), "expected rotary_interleaved = 0"),
    "scale": (attribute(ATTENTION, scale=0.5), "expected scale = 0.2.* as in the layers before, got 0.5"),
    "positions": (input_of(ATTENTION, 9, VALUE), "expected position_ids of all layers to be the same value, or none"),
    "blocks of one layer": (
        input_of(ATTENTION, 13, VALUE), "expected bidirectional_blocks of all layers to be the same value, or none",
    ),
    "sink": (input_of(ATTENTION, 14, VALUE), "expected sinks = 0 as in the layers before, got 1"),
    "separate keys": (input_of(ATTENTION, 1, VALUE), "expected a packed QKV projection"),
    "another length": (input_of(ATTENTION, 5, VALUE), "total_sequence_length of all layers to be the same values"),
    "no QK-norm": (without_input(ATTENTION, 11, 12), "expected qk_norm = each head as in the layers before, got none"),
    "half a QK-norm": (without_input(ATTENTION, 12), "norms of both queries and keys, or none"),
    "no past": (without_input(ATTENTION, 3), "expected past_key and past_value"),
    "a batch": (static_batch, "expected a batch of one: the array computes one sequence"),
    "a present that is read": (another_reader("present.1.key"), "nothing in the graph reads present_key"),
    "a product that is read": (
        another_reader("/layers.1.mlp.down_proj/output"), "to be read by one node, a norm with the residual, got 2"
    ),
    "the residual stream is read": (
        another_reader("/layers.1.pre_feedforward_layernorm/sum"), "the next norm with the residual, got 2 that read it"
    ),
    "the last sum is read": (another_reader("/norm/sum"), "nothing reads the sum after the last layer"),
    "no post-norm": (
        input_of("/layers.1.pre_feedforward_layernorm", 1, ["/layers.1.self_attn.o_proj/output", "float", None, None]),
        "to be read by one node, a norm with the residual, got 2",
    ),
    "another residual": (
        input_of("/layers.1.pre_feedforward_layernorm", 0, VALUE), "'/layers.1.input_layernorm/sum'",
    ),
    "another index": (attribute("/last_token/new_tokens", start=0), r"last token.*: Shape\(.*\) - 1 is not in it"),
    "an index that is given": (input_of("/last_token/minimum", 0, VALUE), "seqlens_k is not in it"),
    "an index that is no minimum": (rename("/last_token/minimum", "Max"), "its index is no Min of two values"),
    "no batch dimension": (attribute("/last_token/hidden", batch_dims=0), "batch_dims is not 1"),
    "another operator": (rename("/layers.2.mlp.down_proj", "MatMul"), "MatMul '/layers.2.*': expected a Q4NXMatMul"),
    "no first norm": (
        rename("/layers.0.input_layernorm", "LayerNormalization"),
        "'/layers.0.self_attn.qkv_proj': expected a SimplifiedLayerNormalization before the first",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_unfit_decoder_is_left_with_reason(case, models):
    change, message = CASES[case]
    nodes, outputs = read_nodes(models.converted("gemma3_text"))
    change(nodes)
    lowered = lower(nodes, outputs)
    assert [node.op_type for node in lowered.nodes] == [node.op_type for node in nodes]
    for_array = [node for node in nodes if node.op_type in {"Q4NXMatMul", "FlowQKVAttention"}]
    assert [item[:2] for item in lowered.on_host] == [(node.name, node.op_type) for node in for_array]
    (reason,) = {item[2] for item in lowered.on_host}
    with pytest.raises(ValueError, match=message):
        raise ValueError(reason)


def test_logits_of_all_tokens_leave_decoder_on_host(models):
    nodes, outputs = read_nodes(models.converted("llama", logits="all"))
    assert decoder_of(lower(nodes, outputs)).attributes["all_logits"] == 1


def test_position_ids_of_all_layers_are_an_input(models):
    nodes, outputs = read_nodes(models.converted("llama"))
    node = decoder_of(lower(with_position_ids(nodes), outputs))
    assert node.attributes["position_ids"] == 1
    assert node.inputs[-1] == "position_ids"


def test_output_inside_layers_is_refused(models):
    nodes, outputs = read_nodes(models.converted("llama"))
    name = "/layers.1.mlp.down_proj/output"
    (reason,) = {reason for _, _, reason in lower(nodes, [*outputs, name]).on_host}
    assert "and an output of the graph" in reason


def test_vocabulary_is_padded_to_blocks(models):
    """Its last block has rows of zeros."""
    nodes, outputs = read_nodes(models.converted("odd"))
    node = decoder_of(lower(nodes, outputs))
    assert node.attributes["vocabulary"] == 300


def test_head_size_unfit_for_blocks_is_refused(models):
    (reason,) = {reason for _, _, reason in lower(*read_nodes(models.converted("head of 80"))).on_host}
    first = "FlowQKVAttention '/layers.0.self_attn/attention'"
    assert f"{first}: expected a head size in multiples of 32, got 80: the array's designs compute" in reason


def test_blocks_of_all_layers_are_last_input(models):
    """They are the node's last input."""
    nodes, outputs = read_nodes(models.converted("gemma3_text"))
    for node in nodes:
        if node.op_type == "FlowQKVAttention":
            input_of(node.name, 13, ["blocks", "int32", None, None])(nodes)
    node = decoder_of(lower(nodes, outputs))
    assert node.attributes["attention.bidirectional_blocks"] == 1
    assert node.inputs[-1] == "blocks"


def test_graph_without_decoder_is_left_with_reason():
    nodes = [GivenNode("a", "Q4NXMatMul", "ai.flownpu", {}, [VALUE], [["y", "float", None, None]])]
    ((*node, reason),) = lower(nodes, ["y"]).on_host
    assert node == ["a", "Q4NXMatMul"]
    assert reason.startswith("the array computes decoders, and there is no attention (where an exporter")

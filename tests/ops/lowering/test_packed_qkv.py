# SPDX-License-Identifier: Apache-2.0
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import pytest

from flownpu.graph_rewrites import testing
from flownpu.ops import q4nx

Layouts: TypeAlias = tuple[q4nx.Layout, q4nx.Layout, q4nx.Layout]
MODEL = """
attention (float[B, S, 96] x, float[B, S, 96] other, float[B, {groups}, P, {size}] past_key,
           float[B, {groups}, P, {size}] past_value, int32[B] seqlens_k, int32 total)
    => (float output, float present_key, float present_value) {{
    query = ai.flownpu.Q4NXMatMul <M = {rows}, K = 96> (x, q_weight{q_bias})
    key = ai.flownpu.Q4NXMatMul <M = {kv_rows}, K = 96> ({key_input}, k_weight{k_bias})
    value = ai.flownpu.Q4NXMatMul <M = {kv_rows}, K = 96> (x, v_weight{v_bias})
    output, present_key, present_value = ai.flownpu.FlowQKVAttention
        <num_heads = {heads}, kv_num_heads = {groups}, head_size = {size}>
        (query, key, value, past_key, past_value, seqlens_k, total)
}}
"""


LAYOUTS = (q4nx.NARROW, q4nx.NARROW, q4nx.NARROW)


def _weights(heads: int = 4, groups: int = 2, size: int = 16, layouts: Layouts = LAYOUTS) -> dict[str, Any]:
    generator = np.random.default_rng(heads * groups * size)
    weights = {}
    for name, count, layout in zip("qkv", (heads, groups, groups), layouts, strict=True):
        weight = q4nx.quantize(generator.standard_normal((count * size, 96), np.float32))
        if not layout.minima:
            weight = weight._replace(minimum=-8 * weight.scale)
        weights[f"{name}_weight"] = q4nx.pack(*weight, layout)
    return weights


def _model(
    heads: int = 4, groups: int = 2, size: int = 16, key_input: str = "x", layouts: Any = LAYOUTS, **biases: str
) -> ir.Model:
    text = MODEL.format(
        heads=heads,
        groups=groups,
        size=size,
        rows=heads * size,
        kv_rows=groups * size,
        key_input=key_input,
        **{name: biases.get(name, "") for name in ("q_bias", "k_bias", "v_bias")},
    )
    generator = np.random.default_rng(3)
    constants = {
        f"{name}_bias": generator.standard_normal(count * size).astype(np.float32)
        for name, count in (("q", heads), ("k", groups), ("v", groups))
        if f"{name}_bias" in biases
    }
    return testing.parse(text, **_weights(heads, groups, size, layouts), **constants)


def _with_fed_weight() -> ir.Model:
    model = _model()
    weight = model.graph.initializers.pop("q_weight")
    weight.const_value = None
    model.graph.inputs.append(weight)
    return model


def _with_read_key() -> ir.Model:
    model = _model()
    (key,) = (value for node in model.graph for value in node.outputs if value.name == "key")
    key.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.append(key)
    return model


@pytest.mark.parametrize(
    ("layouts", "joined"),
    [
        ((q4nx.WIDE,) * 3, q4nx.WIDE),
        ((q4nx.SYMMETRIC,) * 3, q4nx.SYMMETRIC),
        ((q4nx.SYMMETRIC, q4nx.NARROW, q4nx.SYMMETRIC), q4nx.NARROW),
        ((q4nx.SYMMETRIC, q4nx.NARROW, q4nx.WIDE), q4nx.NARROW),
    ],
    ids=str,
)
def test_weights_of_several_layouts_are_joined(layouts: Layouts, joined: q4nx.Layout) -> None:
    model, misses = testing.rewritten(_model(layouts=layouts), "packed_qkv")
    assert misses == []
    weight = model.graph[0].inputs[1]
    assert weight is not None
    assert weight.const_value is not None
    blocks = weight.const_value.numpy()
    assert weight.shape == blocks.shape == q4nx.blocks_shape(128, 96, joined)
    parts = _weights(layouts=layouts).values()
    expected = [q4nx.dequantize(part, rows, 96) for part, rows in zip(parts, (64, 32, 32), strict=True)]
    np.testing.assert_array_equal(q4nx.dequantize(blocks, 128, 96), np.concatenate(expected))


BIASES = {"q_bias": ", q_bias", "k_bias": ", k_bias", "v_bias": ", v_bias"}


@pytest.mark.parametrize("biases", [{}, BIASES])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 16), (8, 4, 8), (2, 1, 64)])
def test_three_projections_become_packed_one(heads: int, groups: int, size: int, biases: dict[str, str]) -> None:
    original = _model(heads, groups, size, **biases)
    model, misses = testing.rewritten(original, "packed_qkv")

    assert testing.operator_names(model) == ["Q4NXMatMul", "FlowQKVAttention"]
    assert misses == []
    projection, attention = model.graph
    weight = projection.inputs[1]
    assert weight is not None
    assert weight.const_value is not None
    assert isinstance(weight.const_value, ir.LazyTensor)
    assert weight.shape == weight.const_value.numpy().shape
    assert [value and value.name for value in attention.inputs[1:4]] == [None, None, "past_key"]
    # Rows of the stacked weight are the rows of Q, then K, then V, bit for bit.
    rows, parts = (heads + 2 * groups) * size, _weights(heads, groups, size)
    stacked = q4nx.dequantize(weight.const_value.numpy(), rows, 96)
    separate = [
        q4nx.dequantize(parts[f"{name}_weight"], count * size, 96)
        for name, count in (("q", heads), ("k", groups), ("v", groups))
    ]
    np.testing.assert_array_equal(stacked, np.concatenate(separate))

    generator = np.random.default_rng(5)
    feeds = {
        "x": generator.standard_normal((2, 3, 96), np.float32),
        "other": np.zeros((2, 3, 96), np.float32),
        "past_key": np.zeros((2, groups, 0, size), np.float32),
        "past_value": np.zeros((2, groups, 0, size), np.float32),
        "seqlens_k": np.array([2, 2], np.int32),
        "total": np.array(3, np.int32),
    }
    testing.add_functions(original)
    result, expected = testing.run(model, feeds), testing.run(original, feeds)
    # Keys and values are the products themselves, and one more rounding of the sum with a bias of less than 4.
    products = testing.product_bound(feeds["x"], stacked)
    products += 2 * testing.FLOAT32_ROUNDING * (4 + np.abs(feeds["x"] @ stacked.T))
    for ours, theirs in zip(result[1:], expected[1:], strict=True):
        assert np.max(np.abs(ours - theirs)) <= products.max()
    # The products' difference adds to that of two evaluations of attention: in the scores, then in the values.
    bias = np.concatenate(
        [v.const_value.numpy() for n, v in original.graph.initializers.items() if n.endswith("_bias") and v.const_value]
        or [np.zeros(rows, np.float32)]
    )
    largest, scale = testing.largest(feeds["x"] @ stacked.T + bias), size**-0.5
    bound = testing.attention_bound(largest, largest, head_size=size, scale=scale, total=3)
    bound += products.max() + largest * np.expm1(2 * scale * size * 2 * largest * products.max())
    assert np.max(np.abs(result[0] - expected[0])) <= bound
    testing.check(model)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_model(2, 1, 48), "Q and K have 96 and 48 rows, expected multiples of 32"),
        (_model(q_bias=", q_bias"), "query_projection has an epilogue (bias, residual or gating)"),
        (_with_fed_weight(), "the weight of query_projection is not a constant of the model"),
        (_model(key_input="other"), "Q, K and V are products of different values"),
        (_with_read_key(), "something else than the attention, or its norms, reads Q, K or V"),
    ],
)
def test_unmatched_graph_reports_miss(model: ir.Model, reason: str) -> None:
    model.graph[0].name = "query_projection"
    misses: list[Any] = []
    assert testing.apply("packed_qkv", model, misses) == 0
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("packed_qkv", reason)]


def test_projections_behind_norms_become_parts_of_packed_one() -> None:
    """As a converted checkpoint has them: a Split between the product and the norms of all heads."""
    text = MODEL.replace("(query, key, value", "(query_norm, key_norm, value").replace(
        "    output,",
        "    query_norm = SimplifiedLayerNormalization <axis = -1> (query, q_norm)\n"
        "    key_norm = SimplifiedLayerNormalization <axis = -1> (key, k_norm)\n    output,",
    )
    sizes = {"heads": 4, "groups": 2, "size": 16, "rows": 64, "kv_rows": 32, "key_input": "x"}
    norms = {"q_norm": np.ones(64, np.float32), "k_norm": np.ones(32, np.float32)}
    original = testing.parse(text.format(**sizes, q_bias="", k_bias="", v_bias=""), **_weights(), **norms)
    model, misses = testing.rewritten(original, "packed_qkv")
    assert misses == []
    norm = "SimplifiedLayerNormalization"
    assert testing.operator_names(model) == ["Q4NXMatMul", "Split", norm, norm, "FlowQKVAttention"]
    projection, split, of_query, of_key, attention = model.graph
    assert split.inputs[0] is projection.outputs[0]
    assert split.inputs[1] is not None
    assert split.inputs[1].const_value is not None
    assert split.inputs[1].const_value.numpy().tolist() == [64, 32, 32]
    assert [of_query.inputs[0], of_key.inputs[0], attention.inputs[2]] == list(split.outputs)


def test_packed_attention_is_no_miss() -> None:
    model = _model()
    testing.apply("packed_qkv", model, [])
    misses: list[Any] = []
    assert testing.apply("packed_qkv", model, misses) == 0
    assert misses == []


def test_biases_of_other_lengths_are_left() -> None:
    """Memory behind a bias that is too short is not part of it."""
    biases: dict[str, Any] = BIASES
    model = _model(**biases)
    short = model.graph.initializers["k_bias"]
    short.const_value = ir.tensor(np.zeros(1, np.float32), name="k_bias")
    short.shape = ir.Shape([1])
    misses: list[Any] = []
    assert testing.apply("packed_qkv", model, misses) == 0
    assert "has an epilogue" in misses[0].reason

# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from flownpu.graph_rewrites import testing

# H = 4 query heads and G = 2 KV heads of d = 16.
MODEL = """
attention (float[B, S, 128] packed, float[B, 2, P, 16] past_key, float[B, 2, P, 16] past_value,
           int32[B] seqlens_k, int32 total) => (float output, float present_key, float present_value{also}) {{
    sizes = Constant <value_ints = {sizes}> ()
    query, key, value = Split <axis = {axis}> (packed, sizes)
    output, present_key, present_value = ai.flownpu.FlowQKVAttention
        <num_heads = 4, kv_num_heads = 2, head_size = 16, scale = 0.5>
        ({inputs}, past_key, past_value, seqlens_k, total)
}}
"""
DEFAULTS = {"sizes": "[64, 32, 32]", "axis": "-1", "also": "", "inputs": "query, key, value"}


def _model(**changed: str) -> ir.Model:
    return testing.parse(MODEL.format(**(DEFAULTS | changed)))


@pytest.mark.parametrize("axis", ["-1", "2"])
def test_attention_reads_packed_projection(axis: str) -> None:
    original = _model(axis=axis)
    model, misses = testing.rewritten(original, "split_qkv")

    assert testing.operator_names(model) == ["FlowQKVAttention"]
    assert misses == []
    (node,) = model.graph
    assert [value and value.name for value in node.inputs[:4]] == ["packed", None, None, "past_key"]
    assert node.attributes["scale"].as_float() == 0.5

    generator = np.random.default_rng(5)
    feeds = {
        "packed": generator.standard_normal((2, 3, 128), np.float32),
        "past_key": np.zeros((2, 2, 0, 16), np.float32),
        "past_value": np.zeros((2, 2, 0, 16), np.float32),
        "seqlens_k": np.array([2, 2], np.int32),
        "total": np.array(3, np.int32),
    }
    testing.add_functions(original)
    # The same numbers go the same way, so nothing may differ.
    for ours, theirs in zip(testing.run(model, feeds), testing.run(original, feeds), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    testing.check(model)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_model(sizes="[32, 64, 32]"), "Split into [32, 64, 32], expected [64, 32, 32]: Q, K and V"),
        (_model(axis="1"), "Split along axis 1, expected the last one"),
    ],
)
def test_unmatched_graph_reports_miss(model: ir.Model, reason: str) -> None:
    misses: list[Any] = []
    assert testing.apply("split_qkv", model, misses) == 0
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("split_qkv", reason)]


def test_outputs_in_another_order_are_no_match() -> None:
    assert testing.apply("split_qkv", _model(inputs="query, value, key"), []) == 0


def test_part_read_by_others_is_still_made() -> None:
    model, misses = testing.rewritten(_model(also=", float key"), "split_qkv")
    assert testing.operator_names(model) == ["Split", "FlowQKVAttention"]
    assert misses == []
    assert [value and value.name for value in model.graph[-1].inputs[:3]] == ["packed", None, None]

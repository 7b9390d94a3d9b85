# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import pytest

from flownpu.graph_rewrites import packed_qkv_test, qk_norm_test, split_qkv_test, testing
from flownpu.graph_rewrites.node import attribute_float, attribute_int, attribute_text
from flownpu.graph_rewrites.packed_qkv import PackedQKV
from flownpu.graph_rewrites.qk_norm import QKNorm
from flownpu.graph_rewrites.split_qkv import SplitQKV
from flownpu.ops import flow_qkv_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from flownpu.graph_rewrites.rule import Rule


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda node: attribute_int(node, "missing"), "an integer attribute missing, got None"),
        (lambda node: attribute_int(node, "text"), "an integer attribute text, got 'a'"),
        (lambda node: attribute_float(node, "text", 1.0), "a number as attribute text, got 'a'"),
        (lambda node: attribute_text(node, "number", "b"), "a string as attribute number, got 3"),
    ],
)
def test_an_attribute_of_another_type(read: Callable[[ir.Node], Any], reason: str) -> None:
    node = ir.node("Damaged", [], {"text": "a", "number": 3}, name="one")
    with pytest.raises(ValueError, match=f"Damaged 'one': expected {reason}"):
        read(node)


@pytest.mark.parametrize(
    ("rule", "model"),
    [
        (QKNorm, qk_norm_test._model()),
        (SplitQKV, split_qkv_test._model()),
        (PackedQKV, packed_qkv_test._model()),
    ],
)
def test_an_attention_keeps_all_its_inputs(rule: type[Rule], model: ir.Model) -> None:
    """Those that a rule has nothing to do with stay where they are, up to the last."""
    count = len(flow_qkv_attention.INPUTS)
    node = next(node for node in model.graph if node.op_type == "FlowQKVAttention")
    node.resize_inputs(count)
    for position, name in enumerate(flow_qkv_attention.INPUTS):
        if position > 2 and name not in {"q_norm_weight", "k_norm_weight"} and node.inputs[position] is None:
            node.replace_input_with(position, ir.val(name))
    before = list(node.inputs)
    assert testing.apply(rule, model, []) == 1
    (after,) = (node for node in model.graph if node.op_type == "FlowQKVAttention")
    changed = [
        name for name, old, new in zip(flow_qkv_attention.INPUTS, before, after.inputs, strict=True) if new is not old
    ]
    norms = ["q_norm_weight", "k_norm_weight"]
    assert changed == (["query", "key", *norms] if rule is QKNorm else ["query", "key", "value"])

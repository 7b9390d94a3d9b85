# SPDX-License-Identifier: Apache-2.0
"""Operators that rewriting makes of exports of ORT GenAI's builder and leaves in them; test_sources.py runs them."""

import math
from collections import Counter
from pathlib import Path

import onnx_ir as ir
import pytest

from flownpu.convert import convert
from flownpu.graph_rewrites import rewrite
from flownpu.ops import q4nx

LAYERS = {"gemma2": 3, "gemma3": 3, "llama": 3, "qwen3": 3, "topics": 6}


@pytest.mark.parametrize("name", LAYERS)
def test_left_operators_are_counted(name: str, exports: dict[str, Path]) -> None:
    model = ir.load(exports[name] / "model.onnx")
    before = _operators(model)
    report = rewrite(model)
    after = _operators(model)

    layers = LAYERS[name]
    tied = name != "llama"  # its table is in float32, and is read by a plain Gather
    gemma, gemma3 = name.startswith("gemma") or name == "topics", name in {"gemma3", "topics"}
    norms_a_layer = 2 if gemma else 0  # after attention and feed-forward; other norms are fused with a residual
    assert after == {
        ("ai.flownpu", "Q4NXMatMul"): 4 * layers + 1,  # QKV, output, gate and up, down; LM head
        ("ai.flownpu", "FlowQKVAttention"): layers,
        **({("ai.flownpu", "Q4NXGather"): 1} if tied else {}),
        ("com.microsoft", "SkipSimplifiedLayerNormalization"): 2 * layers,
        ("", "SimplifiedLayerNormalization"): norms_a_layer * layers + 1,
        # The mask's lengths (ReduceSum, Sub, Cast; Shape, Gather, Cast), then the row of the last token.
        ("", "ReduceSum"): 1,
        ("", "Sub"): 2,
        ("", "Cast"): 3,
        ("", "Shape"): 2,
        ("", "Gather"): 1 if tied else 2,
        ("", "Reshape"): 1,
        ("", "Min"): 1,
        ("", "GatherND"): 1,
        **({("", "Mul"): 1} if gemma3 else {}),  # the embedding's scale
        **({("", "Mul"): 2, ("", "Div"): 1, ("", "Tanh"): 1} if name == "gemma2" else {}),  # and the cap of the logits
    }
    assert report.before == before
    assert report.after == after
    assert report.misses == []
    assert {rule: count for rule, count in report.applied.items() if count} == {
        "q4nx_matmul": before["com.microsoft", "MatMulNBits"],
        **({"q4nx_gather": 1} if tied else {}),
        "flow_qkv_attention": layers,
        **({"qk_norm": layers} if gemma3 or name == "qwen3" else {}),
        **({"split_qkv": layers} if gemma3 else {}),
        **({"packed_qkv": layers} if name == "qwen3" else {}),
        "gated_projection": layers,
        "kv_dtype": layers,
        "last_token_logits": 1,
    }
    assert all(f"{count} " in str(report) for count in after.values())
    # Outputs without a name stay without: a name would ask the node to compute them.
    norm = next(node for node in model.graph if node.op_type == "SkipSimplifiedLayerNormalization")
    assert [value.name == "" for value in norm.outputs[:4]] == [False, True, True, False]


def test_tied_table_is_stored_once(exports: dict[str, Path], tmp_path: Path) -> None:
    convert(exports["topics"], tmp_path / "model")
    model = ir.load(tmp_path / "model" / "model.onnx")
    gather = next(node for node in model.graph if node.op_type == "Q4NXGather")
    head = next(value.producer() for value in model.graph.outputs if value.name == "logits")
    assert head is not None
    assert gather.inputs[0] is head.inputs[1]
    # Bytes of all weights, from the checkpoint's sizes: the table once, and a layer's four projections.
    shapes = [(512, 256, False), (256, 256, False), (480, 256, True), (256, 480, False)]
    # The builder writes no zero points unless it is asked to, so blocks have no minima.
    weights = math.prod(q4nx.blocks_shape(4096, 256, q4nx.SYMMETRIC)) + 6 * sum(
        math.prod(q4nx.blocks_shape(rows, columns, q4nx.SYMMETRIC, gated=gated)) for rows, columns, gated in shapes
    )
    rotary = 2 * 2 * 2048 * 32 * 4  # cos and sin of both kinds of layer
    size = (tmp_path / "model" / "model.onnx.data").stat().st_size
    assert weights + rotary < size < weights + rotary + 64 * 4096  # fewer than 64 norms, a page each


def test_operators_without_rules_are_reported(exports: dict[str, Path]) -> None:
    model = ir.load(exports["gemma3"] / "model.onnx")
    for node in model.graph:
        if node.name in {"/model/layers.1/mlp/down_proj/MatMul_Q4", "/model/layers.1/mlp/up_proj/MatMul_Q4"}:
            node.attributes["bits"] = ir.AttrInt64("bits", 2)
    report = rewrite(model)
    assert report.after["com.microsoft", "MatMulNBits"] == 2
    assert report.left() == [
        "left by q4nx_matmul: /model/layers.1/mlp/up_proj/MatMul_Q4 and 1 more: bits=2: Q4NX stores codes of 4 "
        "or 8 bits; export this weight with these"
    ]
    assert report.to_json()["operators"]["com.microsoft.MatMulNBits"] == 2
    assert report.to_json()["misses"][0]["node"] == "/model/layers.1/mlp/up_proj/MatMul_Q4"


def test_rewriting_again_changes_nothing(exports: dict[str, Path]) -> None:
    model = ir.load(exports["gemma3"] / "model.onnx")
    first = rewrite(model)
    functions = set(model.functions)
    again = rewrite(model)
    # the report counts types that were set again
    assert again.applied == {**dict.fromkeys(again.applied, 0), "kv_dtype": 3}
    assert again.after == first.after
    assert set(model.functions) == functions


@pytest.mark.parametrize(("argument", "value"), [("logits", "none"), ("kv_dtype", "int7")])
def test_unknown_choices_are_refused(argument: str, value: str, exports: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=f"{value}'.*expected"):
        rewrite(ir.load(exports["llama"] / "model.onnx"), **{argument: value})  # type: ignore[arg-type]


def _operators(model: ir.Model) -> Counter[tuple[str, str]]:
    return Counter((node.domain, node.op_type) for node in model.graph if node.op_type != "Constant")

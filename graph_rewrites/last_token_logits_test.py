# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.last_token_logits import set_logits
from flownpu.ops import q4nx

if TYPE_CHECKING:
    import onnx_ir as ir

# One layer's attention, H = G = 2, d = 16, and an LM head of 40 tokens.
MODEL = """
decoder (float[B, S, 96] packed, float[B, 2, P, 16] past_key, float[B, 2, P, 16] past_value,
         int32{lengths} seqlens_k, int32 total)
    => (float{shape} logits, float present_key, float present_value) {{
    hidden, present_key, present_value = ai.flownpu.FlowQKVAttention <num_heads = 2, kv_num_heads = 2, head_size = 16>
        (packed, , , past_key, past_value, seqlens_k, total)
    {head}
}}
"""
HEAD = "logits = ai.flownpu.Q4NXMatMul <M = 40, K = 32> (hidden, weight)"


def _model(head: str = HEAD, shape: str = "[B, S, 40]", lengths: str = "[B]") -> ir.Model:
    weight = q4nx.pack(*q4nx.quantize(np.random.default_rng(1).standard_normal((40, 32), np.float32)))
    return testing.parse(MODEL.format(head=head, shape=shape, lengths=lengths), weight=weight)


@pytest.mark.parametrize(
    ("new", "capacity", "lengths"),
    [
        (5, 0, [4, 2, 0]),  # a first prompt, padded on the right
        (1, 8, [7, 3, 5]),  # one token more in each row
        (3, 8, [6]),  # a later part of a prompt
    ],
)
@pytest.mark.parametrize("column", [False, True])
def test_row_keeps_logits_of_its_last_valid_token(new: int, capacity: int, lengths: list[int], column: bool) -> None:
    shape = "[B, 1]" if column else "[B]"
    original, model = _model(lengths=shape), _model(lengths=shape)
    assert set_logits(model, "last") == (1, [])
    assert testing.operator_names(model)[-2:] == ["GatherND", "Q4NXMatMul"]
    assert str(model.graph.outputs[0].shape) == "[B,1,40]"
    for m in (original, model):
        testing.add_functions(m)
    testing.check(model)

    batch, generator = len(lengths), np.random.default_rng(5)
    feeds = {
        "packed": generator.standard_normal((batch, new, 96), np.float32),
        "past_key": generator.standard_normal((batch, 2, capacity, 16), np.float32),
        "past_value": generator.standard_normal((batch, 2, capacity, 16), np.float32),
        "seqlens_k": np.array(lengths, np.int32).reshape((-1, 1) if column else -1),
        "total": np.array(max(lengths) + 1, np.int32),
    }
    result, expected = testing.run(model, feeds)[0], testing.run(original, feeds)[0]
    last = [min(length, new - 1) for length in lengths]
    rows = expected[range(batch), last][:, None]
    # Both are the same row of X times the same weight, but ONNX Runtime may sum a single row in another order.
    # |X| <= max |v|.
    weight_node = model.graph[-1].inputs[1]
    assert weight_node is not None
    assert weight_node.const_value is not None
    weight = q4nx.dequantize(weight_node.const_value.numpy(), 40, 32)
    x = np.full((1, 32), testing.largest(feeds["packed"], feeds["past_value"]))
    assert np.all(np.abs(result - rows) <= testing.product_bound(x, weight))


def test_head_of_another_kind_keeps_last_token() -> None:
    model = _model("logits = MatMul (hidden, weight)")
    assert set_logits(model, "last") == (1, [])
    assert testing.operator_names(model)[-2:] == ["GatherND", "MatMul"]


@pytest.mark.parametrize(
    ("model", "which", "reason"),
    [
        (_model(shape="[B, 1, 40]"), "all", "logits has shape [B,1,40]: the export computes the last token's only"),
        (
            _model(HEAD.replace("logits", "raw") + "  logits = Sigmoid (raw)"),
            "last",
            "logits comes from Sigmoid, expected the product with the LM head, and no other use",
        ),
        (
            # `twice` is not a scalar, so the Mul is not part of a soft cap.
            _model(HEAD.replace("logits", "raw") + "  twice = Add (raw, raw)  logits = Mul (raw, twice)"),
            "last",
            "logits comes from Mul, expected the product with the LM head, and no other use",
        ),
        (
            testing.parse(
                "head (float[B, S, 32] x, uint8[2, 1, 5120] w) => (float[B, S, 40] logits) "
                "{ logits = ai.flownpu.Q4NXMatMul <M = 40, K = 32> (x, w) }"
            ),
            "last",
            "no FlowQKVAttention tells where sequences end (seqlens_k)",
        ),
        (
            testing.parse("nothing (float[B, S, 40] logits) => (float[B, S, 40] logits) {}"),
            "last",
            "logits comes from an input, expected the product with the LM head, and no other use",
        ),
        (
            testing.parse("nothing (float[B] x) => (float[B] y) { y = Tanh (x) }"),
            "last",
            "the graph has no such output",
        ),
    ],
)
def test_unmatched_graph_reports_miss(model: ir.Model, which: str, reason: str) -> None:
    before = testing.operator_names(model)
    count, misses = set_logits(model, which)
    assert count == 0
    assert [str(miss) for miss in misses] == [f"last_token_logits: logits: {reason}"]
    assert testing.operator_names(model) == before


@pytest.mark.parametrize(("shape", "which"), [("[B, 1, 40]", "last"), ("[B, S, 40]", "all")])
def test_logits_that_are_already_of_last_token_stay(shape: str, which: str) -> None:
    model = _model(shape=shape)
    before = testing.operator_names(model)
    assert set_logits(model, which) == (0, [])
    assert testing.operator_names(model) == before


def test_unknown_choice_of_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="logits='first': expected 'last' or 'all'"):
        set_logits(_model(), "first")


def test_soft_cap_stays_behind_lm_head() -> None:
    """If this fails, models with a soft cap c tanh(x / c), such as Gemma 2, compute the logits of all tokens."""
    cap = (
        "cap = Constant <value = float {3.0}> ()  small = Div (raw, cap)  bent = Tanh (small)  logits = Mul (bent, cap)"
    )
    model = _model(HEAD.replace("logits", "raw") + cap)
    assert set_logits(model, "last") == (1, [])
    names = testing.operator_names(model)
    assert names[names.index("GatherND") :] == ["GatherND", "Q4NXMatMul", "Div", "Tanh", "Mul"]
    assert {str(node.outputs[0].shape) for node in model.graph if node.op_type == "Mul"} == {"[B,1,40]"}

# SPDX-License-Identifier: Apache-2.0
"""GroupQueryAttention's nodes lowered, or left with the reason; test_group_query_attention.py compares the numbers."""

from typing import Any

import numpy as np
import pytest

from flownpu.graph_rewrites import testing

# H = 4 query heads and G = 2 KV heads of d = 16.
MODEL = """
attention (float[B, S, {width}] query, {more}{ids}float[B, 2, P, 16] past_key, float[B, 2, P, 16] past_value,
           int32[B] seqlens_k, int32 total) => (float[B, S, 64] output, float present_key, float present_value) {{
    output, present_key, present_value{fourth} = com.microsoft.GroupQueryAttention
        <num_heads = 4, kv_num_heads = 2, {attributes}>
        (query, {key}, {value}, past_key, past_value, seqlens_k, total, cos, sin, {positions}, , {inputs})
}}
"""
ATTRIBUTES = {"do_rotary": "1", "local_window_size": "-1"}


def _model(
    *,
    packed: bool = False,
    width: int | None = None,
    inputs: str = "",
    fourth: str = "",
    positions: str = "",
    constants: dict[str, testing.Array] | None = None,
    **attributes: str,
) -> Any:
    angles = np.arange(64)[:, None] * 10000.0 ** (-np.arange(8) / 8)
    return testing.parse(
        MODEL.format(
            width=width or (128 if packed else 64),
            more="" if packed else "float[B, S, 32] key, float[B, S, 32] value, ",
            key="" if packed else "key",
            value="" if packed else "value",
            inputs=inputs,
            positions=positions,
            ids=f"int64[B, S] {positions}, " if positions else "",
            fourth=fourth,
            attributes=", ".join(f"{name} = {value}" for name, value in (ATTRIBUTES | attributes).items()),
        ),
        cos=np.cos(angles).astype(np.float32),
        sin=np.sin(angles).astype(np.float32),
        **(constants or {}),
    )


@pytest.mark.parametrize("rotary", ["0", "1"])
def test_positions_without_rotation_are_dropped(rotary: str) -> None:
    model, misses = testing.rewritten(_model(positions="ids", do_rotary=rotary), "flow_qkv_attention")
    assert misses == []
    (node,) = model.graph
    has_positions = len(node.inputs) > 9 and node.inputs[9] is not None
    assert (has_positions, "counted_prompt" in node.attributes) == (rotary == "1", rotary == "1")
    testing.check(model)


def test_norm_weights_of_attention_are_kept() -> None:
    ones = np.ones(16, np.float32)
    original = _model(
        inputs=", , , q_weight, k_weight", qk_norm_epsilon="0.25", constants={"q_weight": ones, "k_weight": 2 * ones}
    )
    model, misses = testing.rewritten(original, "flow_qkv_attention")
    assert misses == []
    (node,) = model.graph
    assert [value and value.name for value in node.inputs[9:]] == [None, None, "q_weight", "k_weight"]
    assert node.attributes["qk_norm_epsilon"].as_float() == 0.25
    testing.check(model)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_model(inputs=", k_scale", constants={"k_scale": np.ones(1, np.float32)}), "input 12 (k_scale): expected"),
        (_model(k_quant_type='"PER_TENSOR"'), "k_quant_type=PER_TENSOR: FlowQKVAttention's KV cache is"),
        (_model(kv_cache_bit_width="8"), "kv_cache_bit_width=8: FlowQKVAttention's KV cache is"),
        (_model(qk_output="2"), "attribute 'qk_output': expected 0, got 2"),
        # Attributes and inputs of later releases of ONNX Runtime.
        (_model(q_norm_epsilon="0.1"), "attribute q_norm_epsilon is not known"),
        (_model(inputs=", , , , , new", constants={"new": np.ones(1, np.int32)}), "input new is not known"),
        (_model(inputs=", , , , , , new", constants={"new": np.ones(1, np.int32)}), "input new is not known"),
        (_model(width=66), "the head size is not known from the query's last axis"),
    ],
)
def test_unmatched_graph_reports_miss(model: Any, reason: str) -> None:
    model, misses = testing.rewritten(model, "flow_qkv_attention")
    assert testing.operator_names(model) == ["GroupQueryAttention"]
    rule = "signature" if "is not known:" in misses[0].reason else "flow_qkv_attention"
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [(rule, reason)]


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ("output", "output 1 (present_key): expected float or float16 or bfloat16, got none; FlowQKVAttention appends"),
        # The scores, which FlowQKVAttention never holds.
        ("output, k, v, scores", "output 3 (output_qk): expected none"),
    ],
)
def test_other_outputs_report_miss(outputs: str, reason: str) -> None:
    results = outputs.split(", ")[::3]
    model = testing.parse(
        f"""
        attention (float[B, S, 128] query, int32[B] lengths, int32 total) => (float {", float ".join(results)}) {{
            {outputs} = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2, qk_output = 1>
                (query, , , , , lengths, total)
        }}
        """
    )
    _, misses = testing.rewritten(model, "flow_qkv_attention")
    assert [miss.reason[: len(reason)] for miss in misses] == [reason]


def test_float16_activations_report_miss() -> None:
    model = testing.parse(
        """
        attention (float16[B, S, 128] query, int32[B] lengths, int32 total)
            => (float16 output, float16 present_key, float16 present_value) {
            output, present_key, present_value = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 2>
                (query, , , , , lengths, total)
        }
        """
    )
    _, misses = testing.rewritten(model, "flow_qkv_attention")
    assert [miss.reason for miss in misses] == [
        "input 0 (query): expected float, got float16; export with float32 activations"
    ]

# SPDX-License-Identifier: Apache-2.0
"""Rows of an int8 KV cache: their bounds, and the definition in stock ONNX Runtime, which must have the same bits."""

from typing import Any

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest

from flownpu.ops.contracts import input_names
from flownpu.ops.definitions import flow_kv_attention, flow_qkv_attention
from flownpu.ops.definitions.int8_cache import dequantise_rows, dequantised, quantise_rows, quantised
from tests.ops.stock_onnxruntime import model_of, node, run, value, with_functions

H, G, D = 4, 2, 16
HEADS = {"num_heads": H, "kv_num_heads": G, "head_size": D}


def hard_rows() -> np.ndarray:
    """Rows [n, D] of all sizes, with zeros, ties, a single large element, and the ends of float32's range."""
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((400, D)) * 2.0 ** rng.uniform(-60, 60, (400, 1))
    rows[0] = 0
    rows[1] = np.arange(D) - 8.5
    rows[2], rows[2, 3] = 1e-3, -1e3
    rows[3] = np.linspace(-1, 1, D) * 2.0**-122  # scales below the normal numbers
    rows[4] = np.linspace(-1, 1, D) * 2.0**-119
    rows[5] = np.linspace(-1, 1, D) * 3.4e38
    # The scale's own rounding goes up, and down, by nearly half of a step.
    rows[6], rows[7] = 127 * (1 + 2.0**-8 * 1.02), 127 * (1 + 2.0**-8 * 0.98)
    return rows.astype(np.float32)


def test_elements_are_off_by_half_scale() -> None:
    x = hard_rows()
    rows = quantise_rows(x)
    scale = rows[:, -4:].copy().view(np.float32)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    # Numbers too small for a scale become 0. float32 rounds max/127 and x/scale, 2^-24 of a code of 127 each.
    bound = np.maximum(scale.astype(np.float64) * (0.5 + 127 * 2.0**-23), (scale == 0) * 127 * 2.0**-126)
    assert (np.abs(dequantise_rows(rows).astype(np.float64) - x) <= bound).all()
    assert (scale * 126.5 <= largest).all()
    assert (scale[largest > 127 * 2.0**-125] > 0).all()
    assert (np.abs(rows[:, :-4].astype(int)).max(axis=-1) == np.where(scale[:, 0] > 0, 127, 0)).all()
    assert np.array_equal(quantise_rows(dequantise_rows(rows)), rows)


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_row_that_is_not_finite_becomes_nan(what: float) -> None:
    x = hard_rows()[:9]
    x[7, 5] = what
    assert np.isnan(dequantise_rows(quantise_rows(x))).all(axis=-1).tolist() == [False] * 7 + [True, False]


def test_definition_has_same_bits() -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    rows (float[N, {D}] x) => (int8[N, K] rows, float[N, L] y) {{
        minus_one = Constant <value_ints = [-1]> ()
        zero = Constant <value_ints = [0]> ()
        channels = Constant <value_ints = [{D}]> ()
        {quantised("x", "rows")}
        {dequantised("rows", "y")}
    }}"""
    x = hard_rows()
    x[8, 1], x[9, 2] = np.nan, -np.inf
    proto = onnx.parser.parse_model(text)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    rows, y = session.run(None, {"x": x})
    assert np.array_equal(rows, quantise_rows(x))
    assert np.array_equal(y, dequantise_rows(rows), equal_nan=True)


TURNS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    # Tokens before, new tokens, capacity, attributes.
    "first prompt": (0, 7, 12, {"do_rotary": 1}),
    "first prompt, no past": (0, 7, 0, {}),
    "one token": (10, 1, 16, {"do_rotary": 1}),
    "one token, growing": (10, 1, 10, {}),
    "second turn": (6, 5, 16, {"do_rotary": 1, "local_window_size": 4}),
    "window-sized cache": (11, 1, 8, {"do_rotary": 1, "local_window_size": 4, "sliding_window_cache": 1}),
    "blocks": (3, 5, 16, {"do_rotary": 1}),
}


@pytest.mark.parametrize("name", TURNS)
def test_stock_onnxruntime_attention_equals_cpu(name: str) -> None:
    past, new, capacity, attributes = TURNS[name]
    rng = np.random.default_rng(5)
    angles = np.arange(32)[:, None] * 10000.0 ** (-np.arange(D // 2) / (D // 2))
    feeds = {
        "query": rng.standard_normal((1, new, (H + 2 * G) * D)).astype(np.float32),
        "past_key": quantise_rows(rng.standard_normal((1, G, capacity, D))),
        "past_value": quantise_rows(rng.standard_normal((1, G, capacity, D))),
        "seqlens_k": np.array([past + new - 1], np.int32),
        "total_sequence_length": np.array([past + new], np.int32),
    }
    if attributes.get("do_rotary"):
        feeds |= {"cos_cache": np.cos(angles).astype(np.float32), "sin_cache": np.sin(angles).astype(np.float32)}
    if name == "blocks":
        feeds["bidirectional_blocks"] = np.array([[0, 1, 1, 1, 0]], np.int32)
    definition = flow_kv_attention if new == 1 else flow_qkv_attention
    values = {n: value(n, array) for n, array in feeds.items()}
    attention = node(definition.NAME, [values.get(n) for n in input_names(definition.NAME)], 3, **HEADS, **attributes)
    while attention.inputs[-1] is None:
        attention.resize_inputs(len(attention.inputs) - 1)
    assert "int8" in definition.features(attention)
    model = with_functions(model_of([attention], list(values.values())))
    output, *present = run(model, feeds)
    expected, *caches = definition.reference(**feeds, **HEADS, **attributes)
    # Scores of D products and softmax of at most 12 keys in float32, as attention_turns.py has it, with
    # |q| |k| / sqrt(d) below 16 and |v| below 4. (No key of this seed falls to the other side of a tie.)
    bound = (2 * (2 * D + 32) * 2.0**-24 * 16 + 64 * 2.0**-24) * 4
    assert np.abs(output - expected).max() <= bound
    kept = min(past + new, caches[0].shape[2])
    if attributes.get("sliding_window_cache"):
        kept = flow_qkv_attention.resident_tokens(past + new, capacity, 4)
    for cache, wanted in zip(present, caches, strict=True):
        assert cache.shape == wanted.shape
        assert cache.dtype == np.int8
        difference = np.abs(dequantise_rows(cache) - dequantise_rows(wanted))[:, :, :kept]
        # At most a tie that was rounded the other way.
        assert difference.max() <= np.abs(dequantise_rows(wanted)).max() / 126
        assert (difference > 0).mean() < 0.01

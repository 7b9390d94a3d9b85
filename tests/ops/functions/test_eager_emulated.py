# SPDX-License-Identifier: Apache-2.0
"""Operators as functions on the emulated array."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flownpu import ops
from flownpu.ops import q4nx
from flownpu.ops.definitions import flow_kv_attention, flow_qkv_attention, fused_dqp
from flownpu.selftest.reference.attention import ALL, attention_expectation
from flownpu.selftest.reference.projections import projection_tolerance

# Half the distance of two numbers of bf16, relative to the larger.
BF16_ROUNDING = 2.0**-8


def _weights(rows: int, columns: int, count: int) -> list[q4nx.Quantized]:
    rng = np.random.default_rng(rows + columns)
    return [q4nx.quantize(rng.standard_normal((rows, columns), np.float32) / 8) for _ in range(count)]


def _row(columns: int) -> Any:
    """Numbers that bf16 has."""
    x = np.random.default_rng(columns).standard_normal((1, columns), np.float32)
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("layout", [q4nx.WIDE, q4nx.NARROW])
@pytest.mark.parametrize(("rows", "columns"), [(640, 512), (256, 320), (40, 96)])
def test_product_equals_equation(rows: int, columns: int, layout: q4nx.Layout) -> None:
    """Also with fewer rows than a column of tiles has, and with a last block that is not full."""
    (weight,), x = _weights(rows, columns, 1), _row(columns)
    found = ops.fused_dqp(x, q4nx.pack(*weight, layout), rows=rows, device="emulate")
    expected = fused_dqp.reference(x[0], q4nx.pack(*weight), rows=rows, columns=columns)
    assert found.shape == (1, rows)
    assert found.dtype == np.float32
    tolerance = projection_tolerance(weight, x[0].astype(ml_dtypes.bfloat16))
    assert np.all(np.abs(found[0] - expected) <= tolerance + BF16_ROUNDING * (np.abs(expected) + tolerance))


def test_rows_computed_one_by_one_equal_equation() -> None:
    (weight,), x = _weights(128, 256, 1), np.concatenate([_row(256), -2 * _row(256)])[None]
    blocks = q4nx.pack(*weight)
    found = ops.q4nx_matmul(x, blocks, device="emulate")
    assert found.shape == (1, 2, 128)
    for row, product in zip(x[0], found[0], strict=True):
        np.testing.assert_array_equal(ops.fused_dqp(row, blocks, device="emulate"), product)


HEADS = {"num_heads": 4, "kv_num_heads": 2, "head_size": 64}


@pytest.mark.parametrize("attributes", [{}, {"local_window_size": 7}, {"causal": 0}])
@pytest.mark.parametrize(("past", "tokens"), [(0, 20), (13, 5), (40, 1), (0, 1)])
def test_attention_equals_equation(past: int, tokens: int, attributes: dict[str, int]) -> None:
    """By one design for a token, by another for several; after a past in bf16, and without."""
    if tokens == 1 and "causal" in attributes:
        return  # a single token sees all keys in any case
    total, rng = past + tokens, np.random.default_rng(past + tokens)
    query = rng.standard_normal((tokens, 4, 64)).astype(ml_dtypes.bfloat16)
    kv = rng.standard_normal((total, 2, 2, 64)).astype(ml_dtypes.bfloat16)
    packed = np.concatenate([query, kv[past:, :, 0], kv[past:, :, 1]], axis=1).reshape(1, tokens, -1)
    keywords: dict[str, Any] = dict(HEADS)
    if past:
        cache = kv[:past].transpose(2, 1, 0, 3)[:, None]
        keywords |= {"past_key": cache[0], "past_value": cache[1], "total_sequence_length": total}
        keywords["seqlens_k"] = np.array([total - 1], np.int32)
    function = ops.flow_kv_attention if tokens == 1 else ops.flow_qkv_attention
    output, key, value = function(packed.astype(np.float32), **keywords, **attributes, device="emulate")
    sweep = {
        "key_end": total,
        "first_query": past,
        "window": attributes.get("local_window_size", ALL),
        "causal": attributes.get("causal", 1),
        "chunk": 64 if tokens == 1 else 32,
    }
    module = flow_kv_attention if tokens == 1 else flow_qkv_attention
    held = np.zeros((-(-total // 64) * 64, 2, 2, 64), ml_dtypes.bfloat16)  # whole chunks
    held[:total] = kv
    expected, tolerance = attention_expectation(query, held, module, in_blocks=tokens > 1, **sweep)
    assert np.all(np.abs(output.reshape(tokens, 4, 64) - expected) <= tolerance)
    for found, given in zip((key, value), kv.transpose(2, 1, 0, 3), strict=True):
        np.testing.assert_array_equal(found[0].astype(np.float32), given.astype(np.float32))


def test_gather_runs_on_host() -> None:
    blocks = q4nx.pack(*_weights(40, 96, 1)[0])
    given = {"rows": 40, "columns": 96}
    found = ops.q4nx_gather(blocks, np.array([39, 0]), **given, device="emulate")
    np.testing.assert_array_equal(found, ops.q4nx_gather(blocks, np.array([39, 0]), **given))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"softcap": 2.0}, "expected no softcap with device"),
        ({"head_sink": np.zeros(4, np.float32)}, "expected no head_sink with device"),
        ({"options": {"threads": 1}}, "expected no options with device"),
        ({"query": np.zeros((2, 3, 512), np.float32)}, "expected one sequence .*, got 2 of 3"),
        ({"query": np.zeros((1, 3, 500), np.float32)}, "expected a query of shape"),
    ],
)
def test_unfit_attention_is_refused(changed: dict[str, Any], reason: str) -> None:
    arguments = {"query": np.zeros((1, 3, 512), np.float32), **HEADS, "device": "emulate"}
    with pytest.raises(ValueError, match=rf"flow_qkv_attention.* {reason}"):
        ops.flow_qkv_attention(**(arguments | changed))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"bias": np.zeros(40, np.float32)}, "expected no bias with device"),
        ({"residual": np.zeros((1, 40), np.float32)}, "expected no residual with device"),
        ({"options": {"threads": 1}}, "expected no options with device"),
        ({"x": np.zeros((2, 96), np.float32)}, r"expected x of one row, got \[2, 96\]"),
        ({"gating": "tanh"}, "expected gating = none, geglu or swiglu, got 'tanh'"),
        ({"x": np.zeros((1, 1 << 20), np.float32)}, "weight"),
    ],
)
def test_unfit_calls_are_refused(changed: dict[str, Any], reason: str) -> None:
    arguments = {"x": _row(96), "weight": q4nx.pack(*_weights(40, 96, 1)[0]), "rows": 40, "device": "emulate"}
    with pytest.raises(ValueError, match=rf"\[fused_dqp\] .*{reason}"):
        ops.fused_dqp(**(arguments | changed))


def test_weight_beyond_tile_memory_is_refused() -> None:
    columns = 1 << 17
    blocks = np.zeros(q4nx.blocks_shape(128, columns, q4nx.WIDE), np.uint8)
    with pytest.raises(ValueError, match="tile"):
        ops.fused_dqp(np.zeros((1, columns), np.float32), blocks, device="emulate")

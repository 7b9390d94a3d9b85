# SPDX-License-Identifier: Apache-2.0
"""Operators as functions on the emulated array."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flownpu import ops
from flownpu.ops import q4nx
from flownpu.ops.definitions import fused_dqp
from tests.aie.cases import STEEPEST, activation_tolerance, projection_tolerance

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
def test_a_product_is_the_equation(rows: int, columns: int, layout: q4nx.Layout) -> None:
    """Of fewer rows than a column of tiles has, and of a last block that is not full, too."""
    (weight,), x = _weights(rows, columns, 1), _row(columns)
    found = ops.fused_dqp(x, q4nx.pack(*weight, layout), rows=rows, device="emulate")
    expected = fused_dqp.reference(x[0], q4nx.pack(*weight), rows=rows, columns=columns)
    assert found.shape == (1, rows)
    assert found.dtype == np.float32
    tolerance = projection_tolerance(weight, x[0].astype(ml_dtypes.bfloat16))
    assert np.all(np.abs(found[0] - expected) <= tolerance + BF16_ROUNDING * (np.abs(expected) + tolerance))


@pytest.mark.parametrize("gating", ["geglu", "swiglu"])
def test_a_gated_product(gating: str) -> None:
    rows, columns = 40, 320
    weights, x = _weights(rows, columns, 2), _row(columns)
    blocks = q4nx.pack_gated(*weights, q4nx.NARROW)
    found = ops.fused_dqp(x, blocks, rows=rows, gating=gating, device="emulate")
    wide = q4nx.pack_gated(*weights)
    expected = fused_dqp.reference(x[0], wide, rows=rows, columns=columns, gating=gating)
    sums = [projection_tolerance(weight, x[0].astype(ml_dtypes.bfloat16)) for weight in weights]
    gate, up = (q4nx.dequantize_codes(weight).astype(np.float64) @ x[0] for weight in weights)
    # |act(g)| <= |g|; a product of two that are each off, and one rounding of it.
    act = STEEPEST * sums[0] + activation_tolerance(gate, np.abs(gate))
    tolerance = act * (np.abs(up) + sums[1]) + np.abs(gate) * sums[1] + 2.0**-16 * np.abs(expected)
    assert np.all(np.abs(found[0] - expected) <= tolerance + BF16_ROUNDING * (np.abs(expected) + tolerance))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"bias": np.zeros(40, np.float32)}, "expected no bias with device = 'emulate'"),
        ({"residual": np.zeros((1, 40), np.float32)}, "expected no residual with device"),
        ({"options": {"threads": 1}}, "expected no options with device"),
        ({"x": np.zeros((2, 96), np.float32)}, r"expected x of one row, got \[2, 96\]"),
        ({"gating": "tanh"}, "expected gating = none, geglu or swiglu, got 'tanh'"),
        ({"x": np.zeros((1, 1 << 20), np.float32)}, "weight"),
    ],
)
def test_refusals(changed: dict[str, Any], reason: str) -> None:
    arguments = {"x": _row(96), "weight": q4nx.pack(*_weights(40, 96, 1)[0]), "rows": 40, "device": "emulate"}
    with pytest.raises(ValueError, match=rf"\[fused_dqp\] .*{reason}"):
        ops.fused_dqp(**(arguments | changed))


def test_what_the_array_s_memory_does_not_hold_is_refused() -> None:
    columns = 1 << 17
    blocks = np.zeros(q4nx.blocks_shape(128, columns, q4nx.WIDE), np.uint8)
    with pytest.raises(ValueError, match="tile"):
        ops.fused_dqp(np.zeros((1, columns), np.float32), blocks, device="emulate")

# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts alone on the emulated array: each expert's products have the rows that chose it."""

from typing import Any

import numpy as np
import pytest

from flownpu.ops import q4nx
from flownpu.ops.definitions import q4nx_matmul, q4nx_moe
from flownpu.selftest.reference.projections import STEEPEST, activation_tolerance
from tests.aie.designs.cases import product_error
from tests.aie.host_kernels import F32_ROUNDING, PRODUCT
from tests.end_to_end.emulated_operators import ENGINE_AND_GEMM, Alone, numbers, rounded, stems, weights

EXPERTS, CHOSEN = 4, 2


def mixture(hidden: int, inner: int, gating: str) -> tuple[dict[str, np.ndarray], list[list[q4nx.Quantized]], Any]:
    """Constants of a Q4NXMoE; gate, up and down of each expert; attributes."""
    parts = [
        [weights(10 * e + i, *sizes) for i, sizes in enumerate(((inner, hidden), (inner, hidden), (hidden, inner)))]
        for e in range(EXPERTS)
    ]
    blocks = {
        "router": numbers(1, EXPERTS, hidden) / 8,
        "gate_up": np.concatenate([q4nx.pack_gated(gate, up, q4nx.NARROW) for gate, up, _ in parts]),
        "down": np.concatenate([q4nx.pack(*down, q4nx.NARROW) for *_, down in parts]),
    }
    sizes = {"num_experts": EXPERTS, "experts_per_token": CHOSEN, "hidden_size": hidden, "expert_size": inner}
    return blocks, parts, {**sizes, "gating": gating}


@pytest.mark.parametrize("gating", ["geglu", "swiglu"])
def test_prompt_experts_equal_reference(gating: str, alone: Alone) -> None:
    """Each expert gets the rows that chose it; the expert with the lowest logits gets none, and no dispatch."""
    hidden, inner, rows = 72, 70, 9
    blocks, parts, attributes = mixture(hidden, inner, gating)
    x = numbers(3, rows, hidden)
    liked = blocks["router"][:3].sum(0)
    x *= np.sign(x @ liked)[:, None]
    blocks["router"][3] = -8 * liked
    wide_x = x.astype(np.float64)
    experts, routing = q4nx_moe.route(wide_x @ blocks["router"].astype(np.float64).T, CHOSEN)
    (found,), dispatches = alone("Q4NXMoE", {"X": x}, blocks, **attributes)
    counts = np.bincount(experts.reshape(-1), minlength=EXPERTS)
    assert counts[3] == 0 < counts[:3].min() < counts.max() < rows
    assert stems(dispatches) == 3 * 2 * ENGINE_AND_GEMM
    expected, tolerance = np.zeros_like(wide_x), np.zeros_like(wide_x)
    for e, (gate, up, down) in enumerate(parts[:3]):
        row, rank = np.nonzero(experts == e)
        act, act_error, other, other_error = gate_error(wide_x[row], gate, up, gating)
        product = act * other
        error = act_error * (np.abs(other) + other_error) + np.abs(act) * other_error + PRODUCT * np.abs(product)
        matrix = q4nx.dequantize_codes(down).astype(np.float64)
        made = product @ matrix.T
        error = rounded(made, product_error(product, matrix, 256, in_blocks=True) + error @ np.abs(matrix).T)
        weight = routing[row, rank][:, None]
        expected[row] += weight * made
        # The router's logits are off by some roundings of float32, its weights by the same share of themselves, and
        # sums by one rounding more.
        tolerance[row] += weight * error + (hidden + 8) * F32_ROUNDING * weight * np.abs(made)
    assert np.all(np.abs(found - expected) <= tolerance)
    assert not np.array_equal(found, expected.astype(np.float32))


def gate_error(x: np.ndarray, gate: q4nx.Quantized, up: q4nx.Quantized, gating: str) -> tuple[np.ndarray, ...]:
    """act(gate), its error, the up projection and its error, as GEMM makes them of rows."""
    sums, errors = [], []
    for part in (gate, up):
        matrix = q4nx.dequantize_codes(part).astype(np.float64)
        sums.append(x @ matrix.T)
        errors.append(rounded(sums[-1], product_error(x, matrix, 256, in_blocks=True)))
    act = {"geglu": q4nx_matmul.gelu, "swiglu": q4nx_matmul.silu}[gating](sums[0])
    return act, STEEPEST * errors[0] + activation_tolerance(sums[0], act), sums[1], errors[1]


def test_few_rows_of_expert_run_on_host(alone: Alone) -> None:
    blocks, _, attributes = mixture(72, 70, "swiglu")
    _, dispatches = alone(
        "Q4NXMoE", {"X": numbers(3, 9, 72)}, blocks, options={"npu_threshold": "100000"}, **attributes
    )
    assert dispatches == []

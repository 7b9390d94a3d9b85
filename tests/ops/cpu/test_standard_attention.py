# SPDX-License-Identifier: Apache-2.0
"""ONNX's Attention on the CPU, against onnx's reference implementation in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.one_node import by_reference
from tests.ops.device import run

B, S, H, G, D, P = 2, 5, 4, 2, 8, 3
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


BY_HEAD = [normal(B, H, S, D), normal(B, G, S, D), normal(B, G, S, D)]
BY_TOKEN = [normal(B, S, H * D), normal(B, S, G * D), normal(B, S, G * D)]
HEADS = {"q_num_heads": H, "kv_num_heads": G}
PAST = [normal(B, G, P, D), normal(B, G, P, D)]
TRUTHS = RNG.random((S, S)) < 0.5
NOTHING = np.zeros((1, 1, S, S), bool)

CASES: dict[str, tuple[list[Any], dict[str, Any], int]] = {
    "by head": (BY_HEAD, {}, 1),
    "by token": (BY_TOKEN, HEADS, 1),
    "causal, scaled and capped": (BY_HEAD, {"is_causal": 1, "scale": 0.3, "softcap": 2.0}, 1),
    "mask of truths": ([*BY_HEAD, TRUTHS], {}, 1),
    "mask that sees nothing": ([*BY_HEAD, NOTHING], {}, 1),
    "mask of a head": ([*BY_HEAD, normal(H, S, S)], {}, 1),
    "mask of a row, for all queries": ([*BY_TOKEN, normal(B, 1, 1, S)], HEADS, 1),
    "other keys": ([normal(B, H, 70, D), normal(B, G, 9, D), normal(B, G, 9, D)], {}, 1),
    "other keys by token, masked": (
        [normal(B, S, H * D), normal(B, 9, G * D), normal(B, 9, G * D), normal(B, 1, S, 9)],
        HEADS,
        1,
    ),
    "past": ([*BY_HEAD, None, *PAST], {"is_causal": 1}, 3),
    "past and mask": ([*BY_TOKEN, normal(B, H, S, P + S), *PAST], HEADS, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_attention_equals_reference(case: str) -> None:
    inputs, attributes, outputs = CASES[case]
    wide = [x.astype(np.float64) if x is not None and x.dtype == np.float32 else x for x in inputs]
    expected = by_reference("Attention", wide, outputs, opset=23, **attributes)
    found = run("Attention", inputs, outputs=("float",) * outputs, domain="", **attributes)
    # Scores up to 30 are sums of D products, each rounded D + 4 times; an error of a score is one of the weights.
    tolerance = 2 * 30 * (D + 4) * 2.0**-24 * float(np.abs(inputs[2]).max())
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("head_size", [40, 64, 160, 512])
@pytest.mark.parametrize("keys", [77, 300])
def test_attention_of_bfloat16_precision_rounds_its_operands_only(head_size: int, keys: int) -> None:
    inputs = [normal(1, 2, 150, head_size), normal(1, 2, keys, head_size), normal(1, 2, keys, head_size)]
    wide = [x.astype(np.float64) for x in inputs]
    (expected,) = by_reference("Attention", wide, 1, opset=23)
    (found,) = run("Attention", inputs, domain="", softmax_precision=16)
    # bf16 is off by up to 2^-8, by less than 2^-9 in the root mean square. Scores are sums of d products of two such
    # numbers, over sqrt(d): off by 2^-9 sqrt(2), 6 times which are 0.017. Weights are off by as much, and weights and
    # values by their own roundings, which many keys average.
    tolerance = (0.017 + 2 * 2.0**-9) * float(np.abs(inputs[2]).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("inputs", "attributes", "message"),
    [
        (BY_TOKEN, {}, "expected the attribute 'q_num_heads'|q_num_heads"),
        ([*BY_HEAD[:2], normal(B, G, S, 2 * D)], {}, "expected heads of 8 elements in Q, K and V"),
        ([*BY_HEAD[:2], BY_HEAD[2][:, :, :3].copy()], {}, "expected as many tokens in V as in K"),
        (
            [BY_HEAD[0], *(x[:, :, :3].copy() for x in BY_HEAD[1:]), None, *PAST],
            {},
            "expected as many tokens in K and V as in Q",
        ),
        ([*BY_HEAD, normal(S, S - 1)], {}, r"expected a mask that broadcasts to \[2,4,5,5\], got \[5,4\]"),
    ],
)
def test_unfit_attention_is_refused(inputs: list[Any], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("Attention", inputs, domain="", **attributes)

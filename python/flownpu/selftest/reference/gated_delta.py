# SPDX-License-Identifier: Apache-2.0
"""Cases of the gated delta rule: random tokens, and the rule in float64."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flownpu.selftest.reference.case import Case
from flownpu.selftest.reference.numbers import BF16_ROUNDING, BFLOAT16, PRODUCT, bf16, wide

if TYPE_CHECKING:
    from flownpu.aie.designs.gated_delta import GatedDelta

    Rng = np.random.Generator

PRODUCTS = 4 * PRODUCT  # four products in a row


class Tokens:
    """Random tokens of some heads: queries and keys of length one, as a model's are; decays from 0.37 to 1."""

    def __init__(self, rng: Rng, tokens: int, heads: int, dk: int, dv: int) -> None:
        def unit(scale: float) -> np.ndarray:
            drawn = rng.standard_normal((tokens, heads, dk))
            return bf16(scale * drawn / np.linalg.norm(drawn, axis=-1, keepdims=True))

        self.q, self.k, self.v = unit(dk**-0.5), unit(1.0), bf16(rng.standard_normal((tokens, heads, dv)))
        self.rates = np.stack([np.exp(-rng.random((tokens, heads))), rng.random((tokens, heads))], -1).astype("f4")
        self.state = bf16(rng.standard_normal((heads, dk, dv)))

    def lines(self, line: int) -> np.ndarray:
        """The design's x [tokens, heads, line]; NaN where nobody reads."""
        parts = [self.q, self.k, self.v, self.rates.view(BFLOAT16)]
        x = np.concatenate(parts, -1)
        return np.pad(x, ((0, 0), (0, 0), (0, line - x.shape[-1])), constant_values=np.nan)

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Outputs [tokens, heads, dv] and last states [heads, dk, dv] in float64, and bounds of both errors.

        A token rounds its state to bf16, which errs by half a place. Later tokens make errors no larger, because decay
        is at most 1, and I - beta k k^T has no singular value above 1 for |k| <= 1 (bf16's k is within 2^-9 of that).
        So the error of a column is at most the sum of what each token's rounding adds, and that of an output the same
        times |q|.
        """
        state, found, bounds = wide(self.state), [], []
        column = np.zeros((len(state), state.shape[-1]))  # bound of the error of each column's length
        for q, k, v, rates in zip(wide(self.q), wide(self.k), wide(self.v), self.rates.astype("f8"), strict=True):
            decay, beta = rates[:, 0, None], rates[:, 1, None]
            known = decay * np.einsum("hkv,hk->hv", state, k)
            delta = beta * (v - known)
            state = decay[..., None] * state + k[..., None] * delta[:, None]
            found.append(np.einsum("hkv,hk->hv", state, q))
            size, length = np.linalg.norm(state, axis=1), np.linalg.norm(q, axis=-1)[:, None]
            arithmetic = PRODUCTS * (np.abs(v) + size)
            bounds.append(length * (column + arithmetic) + BF16_ROUNDING * np.abs(found[-1]) + PRODUCTS * length * size)
            column = column + (BF16_ROUNDING + PRODUCTS) * size + arithmetic
        return np.array(found), state, np.array(bounds), np.broadcast_to(column[:, None], state.shape)


def gated_delta_cases(design: GatedDelta, tokens: int, rng: Rng) -> list[Case]:
    """Some tokens of all heads: a case for the outputs, and one for the states behind them."""
    given = Tokens(rng, tokens, design.heads, design.dk, design.dv)
    expected, last, of_outputs, of_state = given.expected()
    inputs = {"x": given.lines(design.line), "states": given.state}
    make = partial(design.program, tokens)
    return [Case(make, inputs, "y", expected, of_outputs), Case(make, inputs, "made", last, of_state)]

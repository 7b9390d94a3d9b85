# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule with states in the array's tiles: the kernel and the design, against the rule in float64."""

import numpy as np
import pytest

from flownpu.aie.designs.gated_delta import GatedDelta
from tests.aie.emulation import emulate, plan_of
from tests.aie.host_kernels import BF16_ROUNDING, BFLOAT16, bf16, wide

# The error of a product of two f32 that are split in two bf16 parts (kernels/common/float_math.h), four in a row.
PRODUCTS = 4 * 3 * 2.0**-16


class Tokens:
    """Random tokens of some heads: queries and keys of length one, as a model's are; decays from 0.37 to 1."""

    def __init__(self, rng: np.random.Generator, tokens: int, heads: int, dk: int, dv: int) -> None:
        def unit(scale: float) -> np.ndarray:
            drawn = rng.standard_normal((tokens, heads, dk))
            return bf16(scale * drawn / np.linalg.norm(drawn, axis=-1, keepdims=True))

        self.q, self.k, self.v = unit(dk**-0.5), unit(1.0), bf16(rng.standard_normal((tokens, heads, dv)))
        self.rates = np.stack([np.exp(-rng.random((tokens, heads))), rng.random((tokens, heads))], -1).astype("f4")
        self.state = bf16(rng.standard_normal((heads, dk, dv)))

    def lines(self, line: int) -> np.ndarray:
        """x of the design [tokens, heads, line]; NaN where nobody reads."""
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


@pytest.mark.parametrize(("dk", "dv"), [(128, 128), (32, 64), (16, 32)])
def test_tokens_of_a_head_equal_float64(kernels, rng, dk, dv):
    """The kernel alone, token after token."""
    tokens = Tokens(rng, 6, 1, dk, dv)
    expected, last, of_outputs, of_state = tokens.expected()
    state, x = tokens.state.reshape(-1).copy(), tokens.lines(2 * dk + dv + 16)
    for token in range(6):
        y = np.zeros(dv, BFLOAT16)
        kernels.call("gated_delta", np.ascontiguousarray(x[token, 0]), state, y, dk, dv)
        assert np.all(np.abs(wide(y) - expected[token, 0]) <= of_outputs[token, 0])
    assert np.all(np.abs(wide(state).reshape(dk, dv) - last[0]) <= of_state[0])


@pytest.mark.parametrize(
    ("target", "heads", "size", "tokens"),
    [
        ("npu2", 32, 32, 5),  # a head for each tile
        ("npu2", 8, 32, 1),
        ("npu1", 48, 32, 3),  # three rounds
        pytest.param("npu2", 32, 128, 2, marks=pytest.mark.slow),  # Qwen3.5-4B's and 9B's
    ],
)
def test_design_equals_float64(rng, target, heads, size, tokens):
    """All heads' outputs and states, which the plan's checker has accepted, in any schedule."""
    design, given = GatedDelta(target, heads, size, size), Tokens(rng, tokens, heads, size, size)
    expected, last, of_outputs, of_state = given.expected()
    plan = plan_of(design.program(tokens))
    for seed in (0, 3):
        found = emulate(plan, x=given.lines(design.line), states=given.state, seed=seed)
        y, made = (wide(found[name]).reshape(shape.shape) for name, shape in (("y", expected), ("made", last)))
        assert np.all(np.abs(y - expected) <= of_outputs)
        assert np.all(np.abs(made - last) <= of_state)


def test_states_of_qwen_3_5_fit_the_tiles():
    """0.8B and 2B have 16 heads, 4B and 9B 32, the 27B 48: a state of 32 KiB, x and outputs in 64 KiB."""
    for heads in (16, 32, 48):
        plan = plan_of(GatedDelta("npu2", heads, 128, 128).program(1024))
        assert len(plan.array.cores) == 4 * {16: 4, 32: 8, 48: 6}[heads]


def test_heads_that_the_tiles_cannot_share_are_refused():
    with pytest.raises(ValueError, match="expected heads in multiples of 4"):
        GatedDelta("npu2", 6, 128, 128)

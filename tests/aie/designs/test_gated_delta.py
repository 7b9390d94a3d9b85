# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule with states in the array's tiles: the kernel and the design, against the rule in float64."""

import numpy as np
import pytest

from flownpu.aie.designs.gated_delta import GatedDelta
from flownpu.selftest.reference.gated_delta import Tokens
from tests.aie.emulation import emulate, plan_of
from tests.aie.host_kernels import BFLOAT16, wide


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

# SPDX-License-Identifier: Apache-2.0
"""A layer with experts on the emulator: attention in one call, the chosen experts in the next, over one array."""

import dataclasses

import numpy as np
import pytest

from flownpu.aie.designs.decode_layer.design import WAYS, CalledLayer, DecodeLayer
from flownpu.aie.designs.decode_layer.shape import interleave
from flownpu.selftest.reference.layer import (
    DEVIATIONS,
    SAMPLES,
    Rounding,
    enter,
    expectation,
    padded,
    product,
    random_layer,
)
from tests.aie.designs.decode_layer.cases import run
from tests.aie.designs.decode_layer.shapes import SMALL, WINDOW, random_call
from tests.aie.emulation import call as run_plan
from tests.aie.emulation import emulator, plan_of
from tests.aie.host_kernels import assert_within, wide

EXPERTS = 5
# The rows of blocks of "llama, shared rows" leave some that all tiles share, in gate and up projections, too.
NAMES = ["qwen3, eight KV heads", "llama, three KV heads", "llama, shared rows"]


def blocks_of(experts):
    """Each expert's blocks, in the order in which the array reads them."""
    return np.concatenate([part.reshape(-1) for e in experts for part in (interleave(e.gate_up), e.down)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_layer_with_experts_equals_reference(rng, name, way):
    """Each answer is that of a dense layer with the expert's weights; an expert may come twice."""
    dense = SMALL[name]
    shape = dataclasses.replace(dense, experts=3)
    experts = [random_layer(dense, rng) for _ in range(EXPERTS)]
    call = random_call(dense, rng, 200, [CalledLayer(WINDOW)], way=way)
    call = dataclasses.replace(call, update=np.zeros_like(call.update))  # the host added it
    expected, tolerance = expectation(call, rng)["attended"]
    design = DecodeLayer(shape, way)
    buffers = dataclasses.replace(call, design=design).buffers()
    buffers["weights"] = buffers["weights"][: shape.weight_bytes()]
    plan = plan_of(dataclasses.replace(call, design=design).program())
    array = emulator(plan.array)
    found = run(array, plan, **buffers)
    place = design.regions["attended"].offset
    attended = found["state"][place:][: shape.hidden]
    assert_within(attended, expected, tolerance)

    chosen = [4, 0, 4]
    plan = plan_of(design.of_experts(chosen, EXPERTS))
    given = {"experts": blocks_of(experts), "vectors": padded(call.weights[0].norms[1], shape.line)}
    made = run_plan(array, plan, state=found["state"], **given)["state"]
    assert array.leftovers() == []
    rounded, rows = Rounding(rng), SAMPLES + 1
    before, update = (np.repeat(wide(values)[None], rows, 0) for values in (call.hidden, attended))
    _, x = enter(dense, call.weights[0].norms[1:], before, update, rounded)
    first = design.regions["answers"].offset
    for number, place in zip(chosen, range(first, first + 3 * shape.line, shape.line), strict=True):
        weights = experts[number]
        inner = rounded(product(x, weights.gate_up, dense.projections[2], dense.activation))
        answers = rounded(product(inner, weights.down, dense.projections[3]))
        assert_within(made[place:][: shape.hidden], answers[0], DEVIATIONS * answers[1:].std(0))

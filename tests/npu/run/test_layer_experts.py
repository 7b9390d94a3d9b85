# SPDX-License-Identifier: Apache-2.0
"""Routers and experts of a decoder's layers on the host, by themselves: against float64, and Q4NXMoE of the graph."""

from dataclasses import replace

import numpy as np
import pytest

from flownpu.aie.designs.decode_layer.shape import interleave
from flownpu.ops import q4nx
from tests.npu.arrays import npu
from tests.ops.cpu.test_q4nx_moe import SCALES, Mixture, decided_rows, mixture, routed, run
from tests.ops.device import ISAS, _argument

SIZES = 256, 64  # the gates' rows fill the 64 columns to which the array pads them
ROWS = 5


def mixtures(**attributes: float) -> list[Mixture]:
    """Those of two layers, of six and of seven experts' seeds."""
    layers = [mixture(SIZES, layout=q4nx.WIDE, **attributes) for _ in range(2)]
    rng = np.random.default_rng(1)
    layers[1].router[:] = rng.standard_normal(layers[1].router.shape)
    return layers


def experts_of(layers, packed=None, isa="auto"):
    of = layers[0].attributes
    return npu.LayerExperts(
        [[*map(_argument, layer.inputs), *[None] * 9][:9] for layer in layers], of["hidden_size"], of["expert_size"],
        of["num_experts"], of["experts_per_token"], bool(of.get("normalize_routing_weights", 1)),
        [of.get(f"swiglu_{name}", usual) for name, usual in (("alpha", 1), ("beta", 0), ("limit", 0))], packed, isa,
    )  # fmt: skip


def packed_experts(layers):
    """The experts as the array reads them: [layer][expert][gate and up in turns | down]."""
    parts = []
    for layer in layers:
        for index in range(layer.attributes["num_experts"]):
            gate_up, down = layer.expert(index)
            parts += [interleave(gate_up).reshape(-1), down.reshape(-1)]
    return np.concatenate(parts)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("normalize", [0, 1])
def test_route_equals_float64(isa: str, normalize: int) -> None:
    """In the order of the experts' numbers; the second layer's router is another."""
    layers = mixtures(normalize_routing_weights=normalize)
    experts = experts_of(layers, isa=isa)
    for number, layer in enumerate(layers):
        rows = decided_rows(ROWS, layer)
        chosen, shares, error = routed(rows, layer)
        order = np.argsort(chosen, axis=-1)
        for row, places, x in zip(range(ROWS), order, rows, strict=True):
            found, found_shares = experts.route(number, x, chosen.shape[1])
            assert found == chosen[row, places].tolist()
            expected = shares[row, places]
            assert np.all(np.abs(found_shares - expected) <= error[row] * expected)


@pytest.mark.parametrize("isa", ISAS)
def test_answers_from_packed_memory_equal_operator(isa: str) -> None:
    """The same bits as Q4NXMoE's, whose float64 test is tests/ops/cpu/test_q4nx_moe.py, from the graph's constants and
    from the array's."""
    layers = mixtures()
    for packed in (None, packed_experts(layers)):
        experts = experts_of(layers, packed, isa)
        for number, layer in enumerate(layers):
            x = decided_rows(ROWS, layer)
            found = np.zeros_like(x)
            experts.answer(number, x, found)
            np.testing.assert_array_equal(found, run(x, layer, cpu_isa=isa, activations="bf16"))


def test_answers_with_vectors_and_limits_equal_operator() -> None:
    """Every vector that a Q4NXMoE may have but a bias of its choice, and the SwiGLU of gpt-oss."""
    rng = np.random.default_rng(2)
    sizes = (6, 2 * SIZES[1]), (6, SIZES[0]), 6, 6
    layers = [
        replace(layer, biases=tuple(rng.standard_normal(size, dtype=np.float32) for size in sizes))
        for layer in mixtures(**SCALES)
    ]
    experts = experts_of(layers)
    for number, layer in enumerate(layers):
        x = decided_rows(ROWS, layer)
        found = np.zeros_like(x)
        experts.answer(number, x, found)
        np.testing.assert_array_equal(found, run(x, layer, activations="bf16"))


def test_answers_are_shares_of_chosen_experts() -> None:
    """The answers of the experts that `route` names are added up, and no others: those may hold anything."""
    layers = mixtures()
    x = decided_rows(1, layers[0])
    chosen, _ = experts_of(layers).route(0, x[0], 2)
    before, after = np.zeros_like(x), np.zeros_like(x)
    experts_of(layers).answer(0, x, before)
    unchosen = next(number for number in range(6) if number not in chosen)
    for number, same in ((unchosen, True), (chosen[0], False)):
        changed = mixtures()
        np.split(changed[0].down, 6)[number][:] ^= 1
        experts_of(changed).answer(0, x, after)
        assert np.array_equal(before, after) == same


@pytest.mark.parametrize(
    ("layer", "elements", "count", "message"),
    [
        (2, 256, 2, "expected rows of 256 elements for one of 2 layers with experts, got 256 for layer 2"),
        (0, 255, 2, "got 255 for layer 0"),
        (0, 256, 3, "expected 2 experts of a token, got 3"),
    ],
)
def test_unfit_rows_are_refused(layer: int, elements: int, count: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        experts_of(mixtures()).route(layer, np.zeros(elements, np.float32), count)

# SPDX-License-Identifier: Apache-2.0
"""The decode layer's numbers on the emulator against the operators' references, and its bytes under many schedules."""

import dataclasses

import pytest

from flownpu.aie.designs.decode_layer.design import WAYS, CalledLayer, LayerShape
from flownpu.selftest.reference.layer import random_projection
from tests.aie.designs.decode_layer.cases import case_of, run
from tests.aie.designs.decode_layer.shapes import SHAPES, SMALL, WINDOW, random_call
from tests.aie.emulation import emulator, plan_of
from tests.aie.host_kernels import bf16

# The first token, one that sees all tokens before it, one beyond the window, and the cache's last one.
PLACES = [(0, WINDOW), (40, WINDOW), (200, WINDOW), (255, None)]


@pytest.mark.parametrize(
    ("name", "position", "window", "way"),
    [
        (name, *PLACES[(number + turn) % 4], way)
        for number, name in enumerate(SMALL)
        for turn, way in zip((0, 2), WAYS, strict=True)
    ],
)
def test_decode_layer_equals_reference(rng, name, position, window, way):
    """Two of the places for each shape, in turn, each in one of the ways; in all, every place in both."""
    call = random_call(SMALL[name], rng, position, [CalledLayer(window)], way=way)
    case_of(call, rng).check()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", ["gemma3, one KV head", "llama, eight KV heads", "olmo2, four KV heads", "gpt-oss, eight KV heads"]
)
def test_layers_and_head_in_one_call_equal_reference(rng, name, way):
    """Layers that differ in window and table; the second adds the first's update, the head adds the last's."""
    shape = SMALL[name]
    call = random_call(shape, rng, 130, [CalledLayer(WINDOW), CalledLayer(None, 1), CalledLayer(32)], tables=2, way=way)
    norms = bf16(rng.uniform(0.5, 1.5, (shape.entry_norms, shape.hidden)))
    head = random_projection(rng, 1056, shape.hidden)
    call = dataclasses.replace(call, final_norms=norms, head=head, vocabulary=1056, scale=0.2)
    case_of(call, rng).check()


@pytest.mark.parametrize(
    "name", ["gemma3, one KV head", "llama, eight KV heads", "llama, three KV heads", "gpt-oss, eight KV heads"]
)
@pytest.mark.parametrize("position", [0, 200])
def test_int8_cache_equals_attention_of_dequantised_keys(rng, name, position):
    shape = dataclasses.replace(SMALL[name], int8_cache=True)
    case_of(random_call(shape, rng, position, [CalledLayer(WINDOW), CalledLayer()], way="split"), rng).check()


# Which weights have 8 bits: 8/4/4, all, gate and up with down, and QKV with down (as GGUF's Q4_K_M in some layers).
MIXED = [0b0011, 0b1111, 0b1100, 0b1001]


@pytest.mark.parametrize(
    ("name", "way", "of_head"),
    [
        (name, way, (number + turn) % 2 == 1)
        for number, name in enumerate(["gemma3, one KV head", "llama, three KV heads", "olmo2, four KV heads"])
        for turn, way in enumerate(WAYS)
    ],
)
def test_layers_of_eight_bits_and_four_equal_reference(rng, name, way, of_head):
    """A call has layers of both kinds, two equal ones among them."""
    shape = SMALL[name]
    which = [*MIXED[of_head:], 0, 0b0011, 0b0011] if of_head else MIXED[:2]
    call = random_call(shape, rng, 130, [CalledLayer(WINDOW, eight_bits=bits) for bits in which], way=way)
    norms = bf16(rng.uniform(0.5, 1.5, (shape.entry_norms, shape.hidden)))
    head = random_projection(rng, 1056, shape.hidden, eight_bits=of_head)
    case_of(dataclasses.replace(call, final_norms=norms, head=head, vocabulary=1056), rng).check()


@pytest.mark.parametrize("way", WAYS)
def test_consecutive_calls_equal_reference(rng, way):
    """One array without reset; a call may begin while cores are still at the end of the one before."""
    shape = SMALL["llama, three KV heads"]
    cases = [
        case_of(random_call(shape, rng, position, [CalledLayer(WINDOW)], way=way), rng) for position in (3, 255, 0)
    ]
    array = emulator(cases[0].plan.array)
    for case in (*cases, *cases):
        case.check(array)
        case.check(array, settle=False)
    cases[0].check(array)
    assert array.leftovers() == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gemma3, four KV heads", "llama, three KV heads"])
def test_schedules_give_same_bytes(rng, name, way):
    call = random_call(
        SMALL[name], rng, 130, [CalledLayer(WINDOW), CalledLayer(eight_bits=0b0011), CalledLayer()], way=way
    )
    plan, buffers = plan_of(call.program()), call.buffers()
    array = emulator(plan.array)
    first = run(array, plan, **buffers)
    for seed in range(1, 21):  # as many found each missing wait that was planted
        found = run(array, plan, seed=seed, **buffers)
        assert all(found[key].tobytes() == first[key].tobytes() for key in ("state", "cache")), f"schedule {seed}"
    assert array.leftovers() == []


@pytest.mark.parametrize(("name", "way"), [("gemma3-1b", "pairs"), ("llama3.2-1b", "pairs"), ("qwen3-0.6b", "split")])
def test_layers_of_model_shapes_equal_reference(rng, name, way):
    """One layer at the model's size, beyond a window. The other models' layers pass, too, but take longer."""
    case_of(random_call(SHAPES[name], rng, 600, [CalledLayer(512)], capacity=640, way=way), rng).check()


@pytest.mark.parametrize(("way", "feed_forward", "blocks"), [("pairs", 18944, 3), ("split", 20480, 2)])
def test_long_x_with_fewer_blocks_equals_reference(rng, way, feed_forward, blocks):
    """With x of 40 KB or more a tile has room for three or two blocks ahead, not four; the numbers stay right."""
    case = case_of(
        random_call(LayerShape(288, 4, 2, 64, feed_forward, "swiglu"), rng, 3, [CalledLayer()], way=way), rng
    )
    assert {end.depth for fifo in case.plan.array.fifos if "w_0_0_" in fifo.name for end in fifo.consumers} == {blocks}
    case.check()

# SPDX-License-Identifier: Apache-2.0
"""The cost model of a plan: its parts against published numbers and sums by hand, counting against following events."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flownpu.aie.cost.decode import attention_seconds, design_of, head_cost, layer_cost
from flownpu.aie.cost.device import DEVICES
from flownpu.aie.cost.gemm_parameters import gemm_parameters
from flownpu.aie.cost.kernels import published_cycles
from flownpu.aie.cost.memory import burst_efficiency, contiguous_bytes, read_rate
from flownpu.aie.cost.parameters import TABLE, VALUES
from flownpu.aie.cost.simulation import simulate
from flownpu.aie.cost.totals import count
from flownpu.aie.designs.decode_layer import DecodeLayer, Layer, LayerShape
from flownpu.aie.designs.decode_layer_shape import Projection
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.plan import Dimension, Tap, Tile
from tests.aie.programs import chain
from tests.aie.test_designs import ALL, plan_of

DEVICE = DEVICES["kraken-350"]
# As fast as memory and streams may be: what is left is the array's.
FREE = {**VALUES, "memory_read": 1e15, "channel_read": 1e15, "wait": 0.0}


# --- Parameters and main memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_a_parameter_says_where_it_is_from(name):
    parameter = TABLE[name]
    assert parameter.value > 0
    assert parameter.unit
    assert parameter.date
    assert parameter.source


def test_short_runs_are_as_slow_as_published():
    """B in runs of 16 bytes was read at 10 GB/s, in long ones at 47 (amd/IRON)."""
    # Both are whole GB/s: 10 is known to 5 %.
    assert burst_efficiency(16, VALUES) / burst_efficiency(1 << 20, VALUES) == pytest.approx(10 / 47, rel=0.05)


def test_memory_is_the_tuners():
    assert VALUES["memory_read"] == pytest.approx(gemm_parameters("npu2").read.value, rel=0.02)
    assert 8 * VALUES["channel_read"] < VALUES["memory_read"] < VALUES["memory_peak"]


def test_streams_add_up_to_what_memory_gives():
    rates = [read_rate(streams, 5120, VALUES) for streams in (1, 8, 12, 13, 16)]
    assert rates[1] == pytest.approx(8 * rates[0])
    assert rates[3] == rates[4] == VALUES["memory_read"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=4), st.sampled_from([1, 2]))
def test_contiguous_bytes(walk, item):
    """No run of an address list, taken as the DMA takes it, is shorter than what the walk's sizes say."""
    tap = Tap(0, tuple(Dimension(size, stride) for size, stride in walk))
    indices = itertools.product(*(range(size) for size, _ in walk))
    addresses = np.array([sum(i * stride for i, (_, stride) in zip(at, walk, strict=True)) for at in indices])
    breaks = np.flatnonzero(np.diff(addresses) != 1)
    runs = np.diff(np.concatenate([[-1], breaks, [len(addresses) - 1]]))
    found = contiguous_bytes(tap, item) // item
    assert found <= runs.min()
    # And it is the longest such that divides all of them, unless neighbours meet by chance.
    assert found == runs.min() or len(set(runs)) > 1 or runs.min() % found == 0


# --- Kernels ----------------------------------------------------------------------------------------------------------


def test_kernels_take_what_was_published():
    def cycles(kernel, *integers):
        return published_cycles(DEVICE, VALUES, kernel, list(integers), 0)

    assert cycles("q4nx_dequant_bf16") == 2115
    # softmax of 64 x 64 scores: 1696; the products are 64 a cycle.
    assert cycles("flow_kv_scores", 64, 64, 128) - cycles("flow_kv_values", 64, 64, 128) == pytest.approx(
        1696, rel=0.01
    )


# --- Counting and following -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("design", sorted(ALL))
def test_counting_finds_what_following_finds(design):
    plan = plan_of(ALL[design]())
    if plan.array.target != DEVICE.limits.name:
        pytest.skip("another generation than the device's")
    counted, followed = count(plan, DEVICE), simulate(plan, DEVICE)
    assert (counted.read_bytes, counted.written_bytes) == (followed.read_bytes, followed.written_bytes)
    cores = {tile: seconds for (tile, lane), seconds in followed.busy.items() if lane == "core"}
    for tile, seconds in cores.items():
        assert counted.core_seconds[tile] == pytest.approx(seconds), tile
    # A bound: nothing is faster than its busiest part. Memory serves what was asked for in a queue, so at its very end
    # a stream may be a rounding ahead.
    assert counted.bound <= followed.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(lambda: FusedDQP("npu2", 2560).program(10240, 2560), id="fused_dqp"),
        pytest.param(lambda: FusedDQP("npu2", 2560, 16, "geglu").program(2560, 2560), id="fused_dqp geglu"),
        pytest.param(lambda: FlowKV("npu2", 8, 4, 256).program(4096, 4096), id="flow_kv"),
        pytest.param(lambda: FlowKV("npu2", 32, 8, 64).program(4096, 4096), id="flow_kv of 8 heads"),
        pytest.param(ALL["patch_pooling"], id="patch_pooling"),
        pytest.param(ALL["dequant_engine gated"], id="dequant_engine"),
    ],
)
def test_where_one_part_is_busy_both_agree(plan):
    """What is left are the pipeline's ends: a few objects' ways in and out, and the sequence's wait."""
    plan = plan_of(plan())
    counted, followed = count(plan, DEVICE), simulate(plan, DEVICE)
    assert counted.bound == pytest.approx(followed.seconds, rel=0.05, abs=2 * VALUES["wait"])


def test_counting_takes_no_longer_for_long_sequences():
    """128 times the keys are 128 times the work, in a plan whose loops are as many statements."""
    short, long = (count(plan_of(FlowKV("npu2", 8, 4, 256).program(n, n)), DEVICE) for n in (1024, 131072))
    assert long.read_bytes == pytest.approx(128 * short.read_bytes, rel=1e-3)
    assert long.bound == pytest.approx(128 * short.bound, rel=1e-3)


def test_a_chain_by_hand():
    """Four objects of 256 bytes: in at 64 cycles each, 8 in the core, out at 64; memory takes them as fast."""
    plan = chain()
    followed = simulate(plan, DEVICE, FREE)
    assert followed.seconds == pytest.approx(392 / DEVICE.clock, rel=0.2)
    # Through the memory tile once in and once out; the results leave the core for the shim.
    assert count(plan, DEVICE).l2_bytes == {Tile(0, 1): 2 * 4 * 256}
    slow = simulate(plan, DEVICE, {**FREE, "channel_read": 256 / (640 / DEVICE.clock)})
    # 640 cycles an object, and the last one's way: two streams more and the kernel.
    efficiency = burst_efficiency(1024, VALUES) / burst_efficiency(5120, VALUES)
    assert slow.seconds == pytest.approx((4 * 640 / efficiency + 64 + 8 + 64) / DEVICE.clock, rel=0.01)


def test_the_sequence_waits_once_for_what_it_awaits_together():
    plan = plan_of(FusedDQP("npu2", 1280).program(1024, 1152))
    without, with_waits = (simulate(plan, DEVICE, {**VALUES, "wait": wait}).seconds for wait in (0.0, 1e-3))
    # x is awaited, then the outputs; weights' windows are awaited besides.
    assert 1e-3 < with_waits - without < 4e-3


def test_memory_is_shared():
    """Eight streams, each faster than an eighth of memory: memory's rate is what they have together."""
    plan = plan_of(FusedDQP("npu2", 2560).program(10240, 2560))
    followed = simulate(plan, DEVICE, {**VALUES, "memory_read": 20e9})
    assert followed.read_bytes / followed.seconds == pytest.approx(20e9, rel=0.03)


# --- Decode layers ----------------------------------------------------------------------------------------------------

SHAPES = {
    "one KV head": LayerShape(512, 4, 1, 256, 2048, "geglu", post_norms=True, qk_norm=True),
    "four KV heads": LayerShape(1280, 8, 4, 256, 2560, "geglu", post_norms=True, qk_norm=True),
    "eight KV heads": LayerShape(1024, 16, 8, 64, 3072, "swiglu"),
}


def layered(shape):
    """With pairs of tiles."""
    return design_of(DecodeLayer(shape))


@pytest.mark.parametrize("position", [255, 2047])
@pytest.mark.parametrize("name", SHAPES)
def test_a_decode_layers_time_is_what_events_make_of_its_plan(name, position):
    """One layer more in a call: phases follow one another, weights stream across them.

    The rest is what a phase's first objects and its few KB through main memory take: 30 us a layer at most, for each of
    six waits a DMA's and a vector kernel's time.
    """
    shape = SHAPES[name]
    plans = [plan_of(DecodeLayer(shape).program(position, 2560, layers=(Layer(),) * layers)) for layers in (1, 2)]
    one, two = (simulate(plan, DEVICE) for plan in plans)
    predicted = layer_cost(shape, position + 1, layered(shape), DEVICE, VALUES)
    assert predicted.total == pytest.approx(two.seconds - one.seconds, rel=0.05, abs=30e-6)
    # Chunks are whole, and x and norms come besides.
    assert predicted.read_bytes == pytest.approx(two.read_bytes - one.read_bytes, rel=0.03)


@pytest.mark.parametrize(("name", "position"), [("one KV head", 2039), ("eight KV heads", 255)])
def test_a_split_layers_time_is_what_events_make_of_its_plan(name, position):
    """As above, with one wait more."""
    shape, layer = SHAPES[name], DecodeLayer(SHAPES[name], "split")
    plans = [plan_of(layer.program(position, 2560, layers=(Layer(),) * count)) for count in (1, 2)]
    one, two = (simulate(plan, DEVICE) for plan in plans)
    predicted = layer_cost(shape, position + 1, design_of(layer), DEVICE, VALUES)
    assert predicted.total == pytest.approx(two.seconds - one.seconds, rel=0.05, abs=35e-6)


def test_split_keys_share_a_single_head():
    shape, values = SHAPES["one KV head"], VALUES
    alone = layered(shape)
    shared = dataclasses.replace(alone, pairs=8, pair_streams=1, split_keys=True)
    ratio = attention_seconds(shape, 4096, alone, values) / attention_seconds(shape, 4096, shared, values)
    assert ratio == pytest.approx(8 / (alone.pairs * alone.pair_streams))


def test_more_tiles_than_streams_feed_do_not_help():
    design = layered(SHAPES["four KV heads"])
    projection = Projection(32 * 128, 2560)
    seconds = {tiles: design.with_streams(8, tiles).weight_seconds(projection, DEVICE, VALUES) for tiles in (4, 16, 32)}
    assert seconds[32] == pytest.approx(seconds[16]) == pytest.approx(projection.bytes / 8 / VALUES["channel_read"])
    assert seconds[4] == pytest.approx(32 * 10 * VALUES["dqp_block"] / DEVICE.clock)


def test_some_streams_have_more_rows():
    """80 rows of blocks: five groups each for four columns; for six, four of them have one more than three."""
    design, projection = layered(SHAPES["four KV heads"]), Projection(32 * 80, 2560)
    four, six = (design.with_streams(2 * columns, 4 * columns) for columns in (4, 6))
    ratio = six.weight_seconds(projection, DEVICE, VALUES) / four.weight_seconds(projection, DEVICE, VALUES)
    assert ratio == pytest.approx(4 / 5)


def test_the_head_has_the_hosts_time():
    design = layered(SHAPES["four KV heads"])
    cost = head_cost(1280, 32000, design, DEVICE, VALUES)
    assert cost.seconds["host"] == pytest.approx(32000 * VALUES["own_host_per_logit"])
    assert cost.read_bytes == 1000 * 5 * 5120

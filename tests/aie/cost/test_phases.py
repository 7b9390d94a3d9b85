# SPDX-License-Identifier: Apache-2.0
"""The cost model of a plan: its parts and whole calls against published numbers and hand-computed sums."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flownpu.aie.cost.chips import CHIPS
from flownpu.aie.cost.gemm_model import predict_design
from flownpu.aie.cost.gemm_parameters import gemm_parameters
from flownpu.aie.cost.kernels import published_cycles
from flownpu.aie.cost.memory import burst_efficiency, contiguous_bytes, read_rate, shared_seconds
from flownpu.aie.cost.parameters import TABLE, VALUES
from flownpu.aie.cost.phases import CONTROLLER, WAITS, call_cost
from flownpu.aie.cost.totals import array_flow, core_cycles, from_shim, stream_seconds
from flownpu.aie.designs.common import bits
from flownpu.aie.designs.decode_layer.design import WAYS, CalledLayer, DecodeLayer, LayerShape
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.vector_operators import RMSNorm
from flownpu.aie.plan.data import Dimension, HostBuffer, Tap, Transfer
from flownpu.aie.plan.instructions import HEADER_WORDS, words_of_steps
from flownpu.aie.programs.call import HOST, ArtifactCall, fixed_call
from flownpu.aie.programs.cost import CHANGES, DISPATCHES, Prices, prompt_runs
from flownpu.aie.programs.program import Buffer, CacheLayout, Program, ProgramWriter, Role, Step
from tests.aie.designs.test_plans import ALL, plan_of
from tests.aie.small_programs import chain

DEVICE = CHIPS["kraken-350"]
# Memory, waits and instructions take no time, so only the array's time is left.
FREE = {**VALUES, "memory_read": 1e15, "channel_read": 1e15, "wait": 0.0, "instruction_word": 0.0}


def moved(plan):
    """Bytes from or to main memory by fifo, from the taps' sizes."""
    items = {fifo.name: fifo.type.item_bytes for fifo in plan.array.fifos}
    total = Counter()
    for step in plan.sequence.steps:
        if isinstance(step, Transfer):
            total[step.fifo] += math.prod(dimension.size for dimension in step.tap.walk) * items[step.fifo]
    return total


# --- Parameters and main memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_parameter_has_unit_date_and_source(name):
    parameter = TABLE[name]
    assert parameter.value > 0
    assert parameter.unit
    assert parameter.date
    assert parameter.source


def test_short_run_rate_equals_published_one():
    """B in runs of 16 bytes was read at 10 GB/s, in long ones at 47 (amd/IRON)."""
    # Both are whole GB/s: 10 is known to 5 %.
    assert burst_efficiency(16, VALUES) / burst_efficiency(1 << 20, VALUES) == pytest.approx(10 / 47, rel=0.05)


def test_memory_rate_equals_rate_of_gemm_model():
    assert VALUES["memory_read"] == pytest.approx(gemm_parameters("npu2")["read"], rel=0.02)
    assert 8 * VALUES["channel_read"] < VALUES["memory_read"] < VALUES["memory_peak"]


def test_streams_share_memory_bandwidth():
    """By hand: fifteen streams have a megabyte and one has two. While all work, none reaches its channel's rate."""
    channel, memory = VALUES["channel_read"], VALUES["memory_read"]
    assert shared_seconds([1e6] * 15 + [2e6], VALUES) == pytest.approx(16e6 / memory + 1e6 / channel)
    assert shared_seconds([1e6, 3e6], VALUES) == pytest.approx(3e6 / channel)
    assert shared_seconds([], VALUES) == 0.0


def test_streams_add_up_to_memory_bandwidth():
    rates = [read_rate(streams, 5120, VALUES) for streams in (1, 8, 12, 13, 16)]
    assert rates[1] == pytest.approx(8 * rates[0])
    assert rates[3] == rates[4] == VALUES["memory_read"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=4), st.sampled_from([1, 2]))
def test_contiguous_bytes_equal_shortest_run(walk, item):
    """No run in the list of addresses, in the DMA's order, is shorter than the walk's sizes say."""
    tap = Tap(0, tuple(Dimension(size, stride) for size, stride in walk))
    indices = itertools.product(*(range(size) for size, _ in walk))
    addresses = np.array([sum(i * stride for i, (_, stride) in zip(at, walk, strict=True)) for at in indices])
    breaks = np.flatnonzero(np.diff(addresses) != 1)
    runs = np.diff(np.concatenate([[-1], breaks, [len(addresses) - 1]]))
    found = contiguous_bytes(tap, item) // item
    assert found <= runs.min()
    # The run is also the longest that divides all runs, unless some runs are neighbours by chance.
    assert found == runs.min() or len(set(runs)) > 1 or runs.min() % found == 0


# --- Kernels ----------------------------------------------------------------------------------------------------------


def test_kernel_cycles_equal_published_ones():
    def cycles(kernel, *integers):
        return published_cycles(DEVICE, VALUES, kernel, list(integers), 0)

    assert cycles("q4nx_dequant_bf16") == 2115
    assert cycles("q4nx_dequant_planes_bf16") == 2 * 2115
    # softmax of 64 x 64 scores: 1696; the products are 64 a cycle.
    assert cycles("flow_kv_scores", 64, 64, 128, 0) - cycles("flow_kv_values", 64, 64, 128) == pytest.approx(
        1696, rel=0.01
    )


def _flow_qkv_cycles(*sizes):
    return [published_cycles(DEVICE, VALUES, f"flow_qkv_{kind}", list(sizes), 0) for kind in ("scores", "values")]


def test_attention_kernel_time_follows_from_instructions():
    """16 rows, 32 keys, d = 128: 2 x 4 sub-tiles of scores, each of 16 products; then 2 x 16 sums of 4 products."""
    call = gemm_parameters(DEVICE.limits.name)["call"]
    scores, values = _flow_qkv_cycles(16, 32, 128)
    # 8 sub-tiles in blocks of four: as many conversions as products; two rows of them share the softmax.
    assert scores == pytest.approx(call + 2 * (30 + 16 * 4 * 2.84 + 4 * 4) + 4 * 106 + 160)
    assert values == pytest.approx(call + 2 * (30 + 4 * 2.84 + 16 * 4 * 2.84))
    # A soft cap takes a tanh of each score.
    capped = published_cycles(DEVICE, VALUES, "flow_qkv_scores", [16, 32, 128, bits(50.0)], 0)
    assert capped - scores == pytest.approx(8 * 100)
    # A sub-tile of rows and of keys without a neighbour: products wait for their accumulator, sums for their stores.
    alone = _flow_qkv_cycles(8, 8, 64)
    assert alone == pytest.approx([call + 30 + 8 * 6 + 4 + 106 + 160, call + 30 + 2.84 + 8 * 4])
    assert sum(_flow_qkv_cycles(24, 8, 64)) == pytest.approx(sum(_flow_qkv_cycles(16, 8, 64)) + sum(alone) - 2 * call)


@pytest.mark.parametrize("sizes", [(64, 32, 64), (64, 16, 128), (32, 8, 256)])
def test_attention_cycles_are_between_published_ones(sizes):
    """Faster than a published kernel with an exact softmax (26 multiply-adds a cycle), slower than GEMM (180)."""
    assert 26 < 2 * math.prod(sizes) / sum(_flow_qkv_cycles(*sizes)) < 180


# --- Calls ------------------------------------------------------------------------------------------------------------


def test_long_sequence_cost_grows_with_its_keys():
    """128 times the keys are 128 times the work, in a plan whose loops are as many statements."""
    values = {**VALUES, "instruction_word": 0.0}  # their number depends on how many tasks there are
    short, long = (call_cost(plan_of(FlowKV("npu2", 8, 4, 256).program(n, n)), DEVICE, values) for n in (1024, 131072))
    assert long.read_bytes == pytest.approx(128 * short.read_bytes, rel=1e-3)
    waits = [cost.seconds[WAITS] for cost in (short, long)]
    assert waits[0] == waits[1]
    assert long.total - waits[1] == pytest.approx(128 * (short.total - waits[0]), rel=1e-3)


def test_chain_costs_seconds_counted_by_hand():
    """Four objects of 256 bytes: in at 64 cycles each, 8 in the core, out at 64; from a slow channel at 640 each."""
    plan = chain()
    assert call_cost(plan, DEVICE, FREE).total == pytest.approx(4 * 64 / DEVICE.clock)
    slow = call_cost(plan, DEVICE, {**FREE, "channel_read": 256 / (640 / DEVICE.clock)})
    efficiency = burst_efficiency(1024, VALUES) / burst_efficiency(5120, VALUES)
    assert slow.total == pytest.approx(4 * 640 / efficiency / DEVICE.clock)


def test_transfers_awaited_together_cost_one_wait():
    """4096 rows of 8 blocks: through eight streams of 4 bytes a cycle, or at the rate of a slower memory."""
    plan = plan_of(FusedDQP("npu2", 2048).program(4096, 2048))
    weights = 4096 // 32 * 8 * 5120
    free = call_cost(plan, DEVICE, FREE)
    assert free.total == pytest.approx(weights / 8 / 4 / DEVICE.clock)
    assert free.read_bytes == weights + 2048 * 2
    assert free.written_bytes == 4096 * 2
    slow = call_cost(plan, DEVICE, {**FREE, "memory_read": 20e9})
    assert slow.total == pytest.approx(weights / 20e9, rel=0.01)
    cores = call_cost(plan, DEVICE, {**FREE, "dqp_block": 1e5})
    assert cores.total == pytest.approx(4096 // 32 * 8 / 32 * 1e5 / DEVICE.clock, rel=1e-3)


def test_instructions_bound_time_where_they_take_longest():
    """Instructions bound a chain (a parameter, a barrier, two transfers, an await), and count little beside weights."""
    plan = chain()
    words = words_of_steps(plan.sequence.steps) - HEADER_WORDS
    values = {**FREE, "instruction_word": 1e-6}
    assert call_cost(plan, DEVICE, values).seconds[CONTROLLER] == pytest.approx(words * 1e-6, rel=0.1)
    long = plan_of(FusedDQP("npu2", 2560).program(10240, 2560))
    without, counted = (call_cost(long, DEVICE, {**VALUES, "instruction_word": each}).total for each in (0.0, 15e-9))
    assert without < counted < 1.1 * without


# --- Phases -----------------------------------------------------------------------------------------------------------

SHAPES = {
    "one KV head": LayerShape(512, 4, 1, 256, 2048, "geglu", post_norms=True, qk_norm=True),
    "four KV heads": LayerShape(1280, 8, 4, 256, 2560, "geglu", post_norms=True, qk_norm=True),
    "eight KV heads": LayerShape(1024, 16, 8, 64, 3072, "swiglu"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_decode_layers_wait_once_a_phase(name, way):
    """The waits of both layers, and one for the residual stream."""
    design = DecodeLayer(SHAPES[name], way)
    cost = call_cost(plan_of(design.program(255, 2560, layers=(CalledLayer(),) * 2)), DEVICE)
    assert cost.seconds[WAITS] / VALUES["wait"] == pytest.approx(2 * design.attention.waits, abs=1)


@pytest.mark.parametrize("design", sorted(ALL))
def test_call_takes_at_least_time_of_busiest_part(design):
    plan = plan_of(ALL[design]())
    if plan.array.target != DEVICE.limits.name:
        pytest.skip("another generation than the device's")
    cost, size = call_cost(plan, DEVICE), moved(plan)
    assert cost.read_bytes + cost.written_bytes == sum(size.values())
    flow = array_flow(plan.array, size)
    cores = core_cycles(plan, flow, DEVICE, VALUES)
    assert cost.total >= max(cores.values()) / DEVICE.clock * (1 - 1e-9)
    assert cost.total >= max(stream_seconds(plan.array, flow, DEVICE).values()) * (1 - 1e-9)
    assert cost.total >= sum(size.values()) / VALUES["memory_read"] * (1 - 1e-9)
    assert (
        cost.total
        >= max(size[fifo.name] for fifo in plan.array.fifos if from_shim(fifo, DEVICE)) / VALUES["channel_read"]
    )


@pytest.mark.parametrize(("m", "k", "n"), [(1024, 2560, 10240), (4096, 2560, 4096), (4096, 1152, 1536)])
@pytest.mark.parametrize("epilogue", ["none", "geglu"])
def test_gemm_plan_costs_what_equations_predict(m, k, n, epilogue):
    """The cost counted from the plan's streams, memory and kernels agrees to 12 % with the fitted equations.

    The count has streams as slow as in decoding and ignores main memory's pages; the equations do neither.
    """
    design = Gemm("npu2", "bfp16", epilogue)
    plan = plan_of(design.program(m, k, n, line=k))
    assert call_cost(plan, DEVICE).total == pytest.approx(predict_design(design, m, k, n).seconds, rel=0.12)


# --- Programs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfTheHost:
    """A call that the host computes, with the bytes that it reads and writes, and products with constants: none."""

    operator: str
    reads: int
    writes: int
    constants: int = 0
    multiply_adds: int = 0
    array: str = HOST
    name: str = "rows"
    buffers: tuple[HostBuffer, ...] = ()


def norm(array, rows=64):
    return fixed_call("rms_norm", array, f"rows{rows}", partial(RMSNorm("npu2", 1024, 4).program, rows, 1e-6))


def program_of(*calls, kind="prefill", tokens=64, fewest=8, context=4096):
    """A program that consists of these calls."""
    writer = ProgramWriter([Buffer("weight", Role.CONSTANT, 2048)])
    given = writer.rows("x", 64, 1024)
    steps = []
    for call in calls:
        if isinstance(call, ArtifactCall):
            writer.step(call, "a layer", "x", "weight", "y")
            steps.append(writer.steps[-1])
        else:
            steps.append(Step(call, "of the host", ()))
    return Program(kind, {}, tokens, fewest, context, CacheLayout(), writer.buffers, given, None, tuple(steps))


def test_program_costs_changes_and_dispatches_counted_by_hand():
    """Arrays A A B host B A: two changes behind the first array, four dispatches of five calls, steps of the host.

    The two operators of the host have the same parameters.
    """
    host = OfTheHost("add", 3_000_000, 1_000_000), OfTheHost("norm", 2_000_000, 500_000)
    program = program_of(norm("A"), norm("A"), norm("B"), *host, norm("B"), norm("A"))
    prices = Prices(DEVICE)
    cost, one = prices.of(program, 0), call_cost(plan_of(norm("A").program(0)), DEVICE)
    assert (cost.changes, cost.dispatches) == (2, 4)
    assert cost.seconds[CHANGES] == pytest.approx(2 * VALUES["array_change"])
    assert cost.seconds[DISPATCHES] == pytest.approx(5 * VALUES["dispatch"])
    assert cost.seconds["host: add"] == pytest.approx(4e6 / VALUES["host_memory"] + 4e6 / VALUES["host_flush"])
    assert cost.seconds["host: norm"] == pytest.approx(cost.seconds["host: add"] * 2.5 / 4)
    assert cost.host_bytes == 6_500_000
    assert cost.seconds["host"] == pytest.approx(64 * 1024 * 2 / VALUES["host_memory"])
    of_calls = sum(value for name, value in cost.seconds.items() if name.startswith("rms_norm: "))
    assert of_calls == pytest.approx(5 * one.total)
    assert cost.read_bytes == 5 * (64 * 1024 + 1024) * 2
    assert cost.total == pytest.approx(sum(cost.seconds.values()))
    # The next run begins with the array that the last ended with: no change between them.
    assert prices.of_runs([(program, 0), (program, 0)], before=program).changes == 4
    assert prices.of_runs([(program, 0)]).changes == 3


def test_rows_for_lm_head_cost_host_products():
    """The host multiplies the rows of a chunk that it reads, 64 of 1024 elements; a token's logits are ready."""
    chunk = program_of(norm("A"))
    rows = replace(chunk, made=chunk.given, attributes={"vocabulary": (5000,)})
    token = replace(rows, kind="decode")
    ends, of_chunk, of_token = (Prices(DEVICE).of(program, 0).seconds["host"] for program in (chunk, rows, token))
    assert of_token - ends == pytest.approx(64 * 1024 * VALUES["own_host_per_logit"])
    assert of_chunk - of_token == pytest.approx(64 * 1024 * 5000 / VALUES["host_products"])


def test_prompt_chunks_equal_those_of_host():
    """The chunks of `part_at` in ops/npu/run/decoder_layers.cc, worked out by hand: the last token is alone."""
    token = program_of(norm("T"), kind="decode", tokens=1)
    short, long = (program_of(norm("P"), tokens=tokens, fewest=fewest) for tokens, fewest in ((64, 8), (256, 150)))

    def runs(tokens, past=0):
        return [(program.tokens, position) for program, position in prompt_runs([long, token, short], tokens, past)]

    assert runs(1) == [(1, 0)]
    assert runs(9) == [(64, 0), (1, 8)]  # eight tokens are worth a chunk
    assert runs(8) == [(1, position) for position in range(8)]
    assert runs(301) == [(256, 0), (64, 256), (1, 300)]
    assert runs(1 + 2 * 256 + 65) == [(256, 0), (256, 256), (64, 512), (1, 576), (1, 577)]  # 65: no long chunk
    assert runs(65, past=4096 - 64) == [(64, 4032), (1, 4096)]
    assert Counter(tokens for tokens, _ in runs(33, past=4070)) == {1: 33}  # a chunk would go beyond the cache


@pytest.mark.parametrize("window", [0, 512])
def test_prices_between_knots_equal_prices_of_plans(window):
    """To 6 %, for a token's call and a chunk's at positions that were not counted.

    The difference is a chunk of keys in which a window begins: one of about 72 that a block of 64 queries sees.
    """
    from flownpu.aie.designs.flow_qkv import FlowQKV
    from flownpu.aie.programs.call import moving_call
    from flownpu.aie.programs.call_family import CallSweep

    shape, context = SHAPES["four KV heads"], 16384
    layer = moving_call(
        "decode_layer", "layer", "one",
        lambda position: DecodeLayer(shape).program(position, context, layers=(CalledLayer(window or None),)),
        "npu2", context, DecodeLayer(shape).attention.keys, [CallSweep(0, 1, 1, window)],
    )  # fmt: skip
    flow = FlowQKV("npu2", 8, 4, 256)
    block = 4 * flow.queries
    chunk = moving_call(
        "flow_qkv", "flow", "chunk", lambda position: flow.program(256, position, context, window=window or None),
        "npu2", context - 255, flow.keys, [CallSweep(top, block, 256, window) for top in range(0, 256, block)],
    )  # fmt: skip
    # Instructions grow in steps, with each further task; only the rest is linear between knots.
    values = {**VALUES, "instruction_word": 0.0}
    prices = Prices(DEVICE, values)
    for call in (layer, chunk):
        for position in (0, 300, 511, 700, 3000, 9001, 16000):
            counted = call_cost(plan_of(call.program(position)), DEVICE, values)
            assert prices.of_call(call, position).total == pytest.approx(counted.total, rel=0.06)
            assert prices.of_call(call, position).read_bytes == pytest.approx(counted.read_bytes, rel=0.06)

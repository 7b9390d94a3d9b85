# SPDX-License-Identifier: Apache-2.0
"""A plan followed in time: against times worked out by hand, and that every byte of a call is moved; and its trace."""

import json
from collections import Counter

import pytest

from flownpu.aie.cost.device import Device
from flownpu.aie.cost.simulation import simulate
from flownpu.aie.cost.timed_dataflow import TimedDataflow
from flownpu.aie.cost.timeline import trace
from flownpu.aie.plan.data import Tile, Transfer
from flownpu.aie.plan.limits import LIMITS, NPU2, with_limits
from tests.aie.designs.test_plans import ALL, plan_of
from tests.aie.small_programs import chain, with_end

CORE, MEMORY, SHIM = Tile(0, 2), Tile(0, 1), Tile(0, 0)


def estimate(plan, limits):
    """All spans, if a kernel takes a cycle for each 64 bytes of its buffers."""
    return TimedDataflow(plan, limits, lambda _kernel, _integers, size: size / 64).run()


def starts(spans, tile, lane):
    return [(span.start, span.start + span.cycles) for span in spans if (span.tile, span.lane) == (tile, lane)]


def test_chain_has_spans_counted_by_hand():
    """Objects of 64 words take a stream 64 cycles, and the kernel, with two of them, 2 x 256 / 64 = 8."""
    spans = estimate(chain(), NPU2)
    # Two objects fit the memory tile, so its input and its output go on together, one object apart.
    arrive = [(0, 64), (64, 128), (128, 192), (192, 256)]
    leave = [(64, 128), (128, 192), (192, 256), (256, 320)]
    assert starts(spans, SHIM, "DMA MM2S 0") == starts(spans, MEMORY, "DMA S2MM 0") == arrive
    assert starts(spans, MEMORY, "DMA MM2S 0") == starts(spans, CORE, "DMA S2MM 0") == leave
    assert starts(spans, CORE, "core") == [(end, end + 8) for _, end in leave]
    assert starts(spans, SHIM, "DMA S2MM 0") == [(end + 8, end + 72) for _, end in leave]
    (wait,) = [span for span in spans if span.tile is None]
    assert (wait.start, wait.cycles) == (0, 320 + 72)


def test_fifo_of_depth_one_takes_turns():
    spans = estimate(with_end(chain(), "a", "consume", depth=1), NPU2)
    assert starts(spans, MEMORY, "DMA S2MM 0") == [(0, 64), (128, 192), (256, 320), (384, 448)]
    assert starts(spans, MEMORY, "DMA MM2S 0") == [(64, 128), (192, 256), (320, 384), (448, 512)]


def test_streams_are_as_wide_as_limits_say():
    narrow = estimate(chain(), with_limits(NPU2, stream_bits=16))
    assert starts(narrow, SHIM, "DMA MM2S 0")[0] == (0, 128)


@pytest.mark.parametrize("design", ALL)
def test_call_moves_all_bytes_of_transfers(design):
    plan = plan_of(ALL[design]())
    sizes = {fifo.name: fifo.type.item_bytes for fifo in plan.array.fifos}
    expected = Counter()
    for step in plan.sequence.steps:
        if isinstance(step, Transfer):
            expected[step.fifo] += step.tap.elements * sizes[step.fifo]
    moved = Counter()
    for span in estimate(plan, LIMITS[plan.array.target]):
        if span.tile is not None and span.tile.row == 0:
            moved[span.name] += span.cycles * 4
    assert moved == expected


def test_trace_says_that_times_are_estimates():
    document = json.loads(json.dumps(trace(chain(), NPU2)))
    names = [event for event in document["traceEvents"] if event["ph"] == "M"]
    assert all("(estimate)" in event["args"]["name"] for event in names)
    assert "not measured" in document["otherData"]["estimate"]
    simulated = simulate(chain(), Device("npu2", NPU2, ""))
    assert document["otherData"]["cycles"] == round(simulated.seconds * NPU2.clock_megahertz * 1e6)


def test_trace_has_process_per_tile_and_thread_per_lane():
    events = trace(chain(), NPU2)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    kernel = next(e for e in events if e["name"] == "scale")
    assert processes[kernel["pid"]] == "compute tile (0, 2) (estimate)"
    assert threads[kernel["pid"], kernel["tid"]] == "core (estimate)"
    # 8 cycles after the first two objects' 128, at 1800 MHz, in microseconds; main memory and the controller add some.
    assert kernel["ts"] > 128 / 1800
    assert kernel["dur"] == pytest.approx(8 / 1800)
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == threads.keys()

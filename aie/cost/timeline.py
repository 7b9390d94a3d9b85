# SPDX-License-Identifier: Apache-2.0
"""Estimates when what happens in a plan, as a trace for Perfetto or chrome://tracing.

**An estimate, and most likely an optimistic one**; nothing of it was measured. What it has:

- a stream moves its port's width a cycle (`plan.limits`), an object at a time; the DMA channels at its ends are busy;
- a kernel of matrix products takes its multiply-adds at the unit's highest rate, any other one pass over its buffers at
  64 bytes a cycle, though it may need only a part of one;
- cores, channels and the sequence wait for one another as their fifos' depths make them.

What it leaves out: main memory's bandwidth and latency, routing, bank conflicts, the pipelines' fill, loop and call
overhead, and the time in which the host starts tasks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from flownpu.aie.cost.timed_dataflow import Span, TimedDataflow

if TYPE_CHECKING:
    from collections.abc import Callable

    from flownpu.aie.plan.data import Plan, Tile
    from flownpu.aie.plan.limits import Limits

__all__ = ["Span", "estimate", "kernel_cycles", "trace"]

_VECTOR_BYTES = 64  # a 512-bit register: what a core loads or stores in a cycle (AMD AM020)
_BLOCK = 32 * 256  # multiply-adds of a Q4NX block with a vector

# Multiply-adds of a kernel by its integer arguments, and whether XDNA2 makes them in block floating point
# (kernels/README.md, "Arithmetic"); of all others the buffers decide.
_MACS: dict[str, tuple[Callable[..., int], bool]] = {
    "gemm_bf16": (lambda m, k, n: m * k * n, True),
    "gemm_bfp16": (lambda m, k, n: m * k * n, True),
    "fused_dqp": (lambda *_: _BLOCK, False),
    "flow_qkv_scores": (lambda rows, keys, d: rows * keys * d, True),
    "flow_qkv_values": (lambda rows, keys, d: rows * keys * d, True),
    "flow_kv_scores": (lambda rows, keys, d: rows * keys * d, False),
    "flow_kv_values": (lambda rows, keys, d: rows * keys * d, False),
}


def kernel_cycles(limits: Limits, kernel: str, integers: list[int], buffer_bytes: int) -> float:
    """The cycles of a call with these integers, over buffers of so many bytes together."""
    if kernel not in _MACS:
        return buffer_bytes / _VECTOR_BYTES
    count, in_blocks = _MACS[kernel]
    kind = "bfp16ebs8" if in_blocks and "bfp16ebs8" in limits.macs_per_cycle else "bf16"
    return count(*integers) / limits.macs_per_cycle[kind]


def estimate(plan: Plan, limits: Limits) -> list[Span]:
    """Everything that happens in a call, by start; the plan must be valid (`checker.require_valid`)."""
    return TimedDataflow(plan, limits, partial(kernel_cycles, limits)).run()


def trace(plan: Plan, limits: Limits) -> dict[str, Any]:
    """The estimate as a document in Chrome's trace format: a process a tile, a thread a lane, times in microseconds."""
    spans = estimate(plan, limits)
    tiles = sorted({span.tile for span in spans if span.tile is not None})
    processes: dict[Tile | None, int] = {None: 0} | {tile: number + 1 for number, tile in enumerate(tiles)}
    lanes = {lane: number for number, lane in enumerate(sorted({(span.tile is not None, span.lane) for span in spans}))}
    events: list[dict[str, Any]] = []
    for tile, process in processes.items():
        name = f"{limits.kind(tile.column, tile.row)} tile {tile}" if tile else "host"
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"{name} (estimate)"}})
    for tile, lane in dict.fromkeys((span.tile, span.lane) for span in spans):
        thread = {"pid": processes[tile], "tid": lanes[tile is not None, lane]}
        events.append({"ph": "M", **thread, "name": "thread_name", "args": {"name": f"{lane} (estimate)"}})
    events += [
        {
            "ph": "X",
            "pid": processes[span.tile],
            "tid": lanes[span.tile is not None, span.lane],
            "name": span.name,
            "cat": "estimate",
            "ts": span.start / limits.clock_megahertz,
            "dur": span.cycles / limits.clock_megahertz,
            "args": {"cycles": round(span.cycles, 1)},
        }
        for span in spans
    ]
    about = {
        "plan": plan.name,
        "target": limits.name,
        "estimate": "estimated from rates, not measured (flownpu.aie.cost.timeline says how)",
        "clock_megahertz": limits.clock_megahertz,
        "cycles": round(max((span.start + span.cycles for span in spans), default=0.0)),
    }
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}

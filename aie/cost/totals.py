# SPDX-License-Identifier: Apache-2.0
"""What a plan asks of cores and streams, counted without following it: no loop is run more than once.

Long sequences take no longer to count than short ones. What waits for what is for phases.py to say.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from flownpu.aie.cost.kernels import published_cycles
from flownpu.aie.plan.data import (
    Acquire,
    BarrierWait,
    Call,
    Load,
    Loop,
    Release,
    SetBarrier,
    Store,
    Tile,
    WriteParameter,
)
from flownpu.aie.plan.expressions import call_arguments, depends_on_index, evaluate
from flownpu.aie.plan.resources import link_ranges, shared_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.aie.cost.device import Device
    from flownpu.aie.cost.parameters import Values
    from flownpu.aie.plan.data import Array, Core, Fifo, Plan, Statement

__all__ = ["array_flow", "core_cycles", "from_shim", "stream_seconds"]


def stream_seconds(
    array: Array, through: Mapping[str, float], cost: Mapping[str, float], device: Device, values: Values
) -> dict[str, float]:
    """Each stream's time, by fifo: its bytes at 32 bits a cycle; from main memory, those that runs cost at its rate."""
    seconds = {}
    linked = {name for link in array.links for name in (*link.inputs, *link.outputs)}
    for fifo in array.fifos:
        if shared_memory(fifo, fifo.name in linked, device.limits) is not None:
            continue  # no stream, but memory that two cores share
        seconds[fifo.name] = through[fifo.name] * 8 / device.limits.stream_bits / device.clock
        if from_shim(fifo, device):
            seconds[fifo.name] = max(seconds[fifo.name], cost[fifo.name] / values["channel_read"])
    return seconds


def from_shim(fifo: Fifo, device: Device) -> bool:
    """Whether it comes from main memory."""
    return device.limits.kind(fifo.producer.tile.column, fifo.producer.tile.row) == "shim"


def array_flow(array: Array, moved: Mapping[str, int]) -> dict[str, float]:
    """Bytes that pass each fifo; of those between cores, which no transfer tells, none."""
    through = defaultdict[str, float](float, moved)
    fifos = {fifo.name: fifo for fifo in array.fifos}
    # Towards the cores, link by link; then from main memory back to them.
    for _ in array.links:
        for link in array.links:
            source, target = fifos[link.inputs[0]], fifos[link.outputs[0]]
            if link.kind == "split":
                _, ranges = link_ranges(link, fifos)
                for name, (start, end) in zip(link.outputs, ranges, strict=True):
                    share = (end - start) / source.type.elements
                    through[name] = share * through[source.name] * fifos[name].repeat_count
            elif link.kind == "join":
                _, ranges = link_ranges(link, fifos)
                for name, (start, end) in zip(link.inputs, ranges, strict=True):
                    through[name] = (end - start) / target.type.elements * through[target.name]
            elif source.name in moved:
                padded = target.type.bytes / source.type.bytes if target.padding else 1.0
                through[target.name] = through[source.name] * padded * target.repeat_count
            else:
                through[source.name] = through[target.name]
    return through


# --- Cores ------------------------------------------------------------------------------------------------------------


def core_cycles(plan: Plan, through: Mapping[str, float], device: Device, values: Values) -> dict[Tile, float]:
    """Each core's kernels, over all passes of a call."""
    interpreters = [_Interpreter(plan, core, device, values) for core in plan.array.cores]
    initial = {(b.name, i): int(v) for b in plan.array.buffers for i, v in enumerate(b.initial_value)}
    words, cycles = dict(initial), defaultdict[Tile, float](float)
    started = set[Tile]()
    for step in plan.sequence.steps:
        if isinstance(step, WriteParameter):
            words[step.buffer, step.index] = step.value
        elif isinstance(step, SetBarrier):
            for interpreter in interpreters:
                if step.barrier in interpreter.barriers:
                    cycles[interpreter.core.tile] += interpreter.run(words)[0]
                    started.add(interpreter.core.tile)
    for interpreter in interpreters:
        if interpreter.core.tile not in started:  # it runs as long as objects come
            of_pass, released = interpreter.run(words)
            passes = max((through[name] / size for name, size in released.items() if through[name]), default=1.0)
            cycles[interpreter.core.tile] = of_pass * passes
    return {interpreter.core.tile: cycles[interpreter.core.tile] for interpreter in interpreters}


class _Interpreter:
    """Runs a core's program once, a loop's body once for all its turns: a kernel takes as long in every turn."""

    def __init__(self, plan: Plan, core: Core, device: Device, values: Values) -> None:
        self.core, self._device, self._values = core, device, values
        self._fifos = {fifo.name: fifo for fifo in plan.array.fifos}
        self._bytes = {buffer.name: buffer.type.bytes for buffer in plan.array.buffers}
        self.barriers = {s.barrier for s in core.body if isinstance(s, BarrierWait)}

    def run(self, words: dict[tuple[str, int], int]) -> tuple[float, dict[str, float]]:
        """One pass with these run-time parameters: its cycles, and bytes that were given on or back by fifo."""
        self._cycles, self._released, self._words = 0.0, defaultdict[str, float](float), words
        self._body(self.core.body, {}, {}, 1.0)
        return self._cycles, self._released

    def _body(
        self, body: tuple[Statement, ...], variables: dict[str, int], views: dict[str, Fifo], turns: float
    ) -> None:
        words = self._words
        for statement in body:
            match statement:
                case Loop():
                    bounds = (evaluate(bound, variables) for bound in (statement.start, statement.stop, statement.step))
                    indices = range(*bounds)
                    each = indices if depends_on_index(statement) else indices[:1]
                    for index in each:
                        variables[statement.variable] = index
                        self._body(statement.body, variables, views, turns * (len(indices) / len(each)))
                case Acquire():
                    views[statement.name] = self._fifos[statement.fifo]
                case Release():
                    self._released[statement.fifo] += turns * (statement.count * self._fifos[statement.fifo].type.bytes)
                case Call():
                    integers, size = call_arguments(statement, variables, views, self._bytes)
                    cycles = published_cycles(self._device, self._values, statement.kernel, integers, size)
                    self._cycles += turns * cycles
                case Load():
                    key = statement.buffer, evaluate(statement.index, variables)
                    variables[statement.variable] = words.get(key, 0)
                case Store():
                    words[statement.buffer, evaluate(statement.index, variables)] = evaluate(statement.value, variables)
                case _:
                    pass

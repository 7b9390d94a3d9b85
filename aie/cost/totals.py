# SPDX-License-Identifier: Apache-2.0
"""The load of a plan's cores and streams, counted without following it: no loop is run more than once.

So long sequences take no longer to count than short ones. phases.py has the order of waits.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from flownpu.aie.cost.kernels import priced_by_integers, published_cycles
from flownpu.aie.plan.data import (
    Acquire,
    BarrierWait,
    BufferArgument,
    Call,
    Core,
    Load,
    Loop,
    Release,
    SetBarrier,
    Store,
    Tile,
    WriteParameter,
)
from flownpu.aie.plan.expressions import call_bytes, call_integers, depends_on_index, evaluate, passes_of
from flownpu.aie.plan.resources import link_ranges, shared_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.aie.cost.chips import Chip
    from flownpu.aie.cost.parameters import Values
    from flownpu.aie.plan.data import Array, Fifo, Plan, Statement


def stream_seconds(array: Array, through: Mapping[str, float], chip: Chip) -> dict[str, float]:
    """Seconds of each fifo's stream on the array: `through`, its bytes, at 32 bits a cycle."""
    linked = {name for link in array.links for name in (*link.inputs, *link.outputs)}
    return {
        fifo.name: through[fifo.name] * 8 / chip.limits.stream_bits / chip.clock
        for fifo in array.fifos
        if shared_memory(fifo, fifo.name in linked, chip.limits) is None  # else memory that two cores share
    }


def from_shim(fifo: Fifo, chip: Chip) -> bool:
    """Whether a fifo comes from main memory."""
    return chip.limits.kind(fifo.producer.tile.column, fifo.producer.tile.row) == "shim"


def array_flow(array: Array, moved: Mapping[str, int]) -> dict[str, float]:
    """Bytes that pass each fifo, from the bytes of transfers; 0 for fifos without transfers."""
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
                    through[name] = share * through[source.name]
            elif link.kind == "join":
                _, ranges = link_ranges(link, fifos)
                for name, (start, end) in zip(link.inputs, ranges, strict=True):
                    through[name] = (end - start) / target.type.elements * through[target.name]
            elif source.name in moved:
                through[target.name] = through[source.name]
            else:
                through[source.name] = through[target.name]
    return through


# --- Cores ------------------------------------------------------------------------------------------------------------


def core_cycles(plan: Plan, through: Mapping[str, float], chip: Chip, values: Values) -> dict[Tile, float]:
    """Cycles of each core's kernels, over all passes of a call."""
    passes = [_Passes(plan, core, chip, values) for core in plan.array.cores]
    initial = {(b.name, i): int(v) for b in plan.array.buffers for i, v in enumerate(b.initial_value)}
    words, cycles = dict(initial), defaultdict[Tile, float](float)
    started = set[Tile]()
    for step in plan.sequence.steps:
        if isinstance(step, WriteParameter):
            words[step.buffer, step.index] = step.value
        elif isinstance(step, SetBarrier):
            for each in passes:
                if step.barrier in each.barriers:
                    cycles[each.core.tile] += each.run(words)[0]
                    started.add(each.core.tile)
    for each in passes:
        if each.core.tile not in started:  # it runs as long as objects come
            of_pass, released = each.run(words)
            count = max((through[name] / size for name, size in released.items() if through[name]), default=1.0)
            cycles[each.core.tile] = of_pass * count
    return {each.core.tile: cycles[each.core.tile] for each in passes}


class _Passes:
    """Prices a core's passes: in a loop, a kernel takes the same time in every turn."""

    def __init__(self, plan: Plan, core: Core, chip: Chip, values: Values) -> None:
        self.core, self._chip, self._values = core, chip, values
        self.barriers = {s.barrier for s in core.statements if isinstance(s, BarrierWait)}
        self._loaded = {s.buffer for s in core.statements if isinstance(s, (Load, Store))}
        fifos = {s.fifo for s in core.statements if isinstance(s, Acquire)}
        buffers = {a.buffer for s in core.statements if isinstance(s, Call) for a in s.arguments
                   if isinstance(a, BufferArgument)}  # fmt: skip
        self._fifos = tuple((fifo.name, fifo.type.bytes) for fifo in plan.array.fifos if fifo.name in fifos)
        self._buffers = tuple((b.name, b.type.bytes) for b in plan.array.buffers if b.name in buffers)

    def run(self, words: dict[tuple[str, int], int]) -> tuple[float, Mapping[str, float]]:
        """One pass with these run-time parameters: its cycles, and by fifo the bytes of released objects."""
        own = tuple((key, value) for key, value in words.items() if key[0] in self._loaded)
        of_pass = _pass(self.core, own, self._fifos, self._buffers)
        words.update(of_pass.stored)
        cycles = 0.0
        for (kernel, integers, size), turns in of_pass.calls.items():
            cycles += turns * published_cycles(self._chip, self._values, kernel, list(integers), size)
        return cycles, of_pass.released


class _Pass(NamedTuple):
    """The work of a core in a pass.

    Attributes:
        calls: how often each (kernel, integers if its price depends on them, buffers' bytes) is called.
        released: bytes of the objects that it releases, by fifo.
        stored: words that it writes to buffers.
    """

    calls: defaultdict[tuple[str, tuple[int, ...], int], float]
    released: defaultdict[str, float]
    stored: dict[tuple[str, int], int]


@lru_cache(maxsize=4096)  # calls of a model's programs have few arrays, and differ in few parameters
def _pass(
    core: Core,
    words: tuple[tuple[tuple[str, int], int], ...],
    fifos: tuple[tuple[str, int], ...],
    buffers: tuple[tuple[str, int], ...],
) -> _Pass:
    """A pass with these run-time parameters and (name, bytes) of fifos' objects and of buffers; not to be changed."""
    follower = _Follower(dict(words), dict(fifos), dict(buffers))
    follower.body(core.body, {}, {}, 1.0)
    return follower.of_pass


class _Follower:
    """Follows a pass; a loop's body once for all its turns, unless they depend on the loop's index."""

    def __init__(
        self, words: dict[tuple[str, int], int], object_bytes: dict[str, int], buffer_bytes: dict[str, int]
    ) -> None:
        self._words, self._object_bytes, self._buffer_bytes = words, object_bytes, buffer_bytes
        self.of_pass = _Pass(defaultdict(float), defaultdict(float), {})

    def body(
        self, body: tuple[Statement, ...], variables: dict[str, int], view_bytes: dict[str, int], turns: float
    ) -> None:
        """Count these statements `turns` times."""
        for statement in body:
            match statement:
                case Loop():
                    indices = passes_of(statement, variables)
                    each = indices if depends_on_index(statement) else indices[:1]
                    for index in each:
                        variables[statement.variable] = index
                        self.body(statement.body, variables, view_bytes, turns * (len(indices) / len(each)))
                case Acquire():
                    view_bytes[statement.name] = self._object_bytes[statement.fifo]
                case Release():
                    size = statement.count * self._object_bytes[statement.fifo]
                    self.of_pass.released[statement.fifo] += turns * size
                case Call():
                    size = call_bytes(statement, view_bytes, self._buffer_bytes)
                    priced = priced_by_integers(statement.kernel)
                    integers = call_integers(statement, variables) if priced else ()
                    self.of_pass.calls[statement.kernel, integers, size] += turns
                case Load():
                    key = statement.buffer, evaluate(statement.index, variables)
                    variables[statement.variable] = self._words.get(key, 0)
                case Store():
                    key = statement.buffer, evaluate(statement.index, variables)
                    self._words[key] = self.of_pass.stored[key] = evaluate(statement.value, variables)
                case _:
                    pass

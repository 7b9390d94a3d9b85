# SPDX-License-Identifier: Apache-2.0
"""The cost of a call of an array, from its plan: no loop is run more than once, and no event is followed.

A *phase* of a sequence ends when the sequence waits for the last of a fifo's results, or sends from a buffer with an
awaited result: later steps need earlier results. Within a phase everything goes on at the same time, so

    call  = sum over its phases of (the busiest of cores, streams, main memory and the controller + a wait)

The controller works on a phase's instructions while the phase's first transfer already runs. So only the instructions
up to that transfer, parameters and barriers, are added.

Cores that call the same kernels on what they consume are one *kind*, and so are the streams into such cores; streams
out of cores are of one kind if the same kernels produce them. A kind is as busy as its busiest member over the whole
call, divided among the phases in proportion to the bytes of the whole kind: so data that one member gets before its
phase does not make it look busier than the others. Streams of a kind share main memory evenly (`shared_seconds` of
memory.py): those that have more bytes than the others end alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

from flownpu.aie.cost.memory import contiguous_bytes, relative_efficiency, shared_seconds
from flownpu.aie.cost.parameters import VALUES
from flownpu.aie.cost.totals import array_flow, core_cycles, from_shim, stream_seconds
from flownpu.aie.plan.data import Acquire, Await, Call, Element, Transfer, statements
from flownpu.aie.plan.instructions import words_of_step, words_of_steps

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping

    from flownpu.aie.cost.chips import Chip
    from flownpu.aie.cost.parameters import Values
    from flownpu.aie.plan.data import Array, Plan, Statement, Tile

KERNELS, WAITS, ARRAY, CONTROLLER = "kernels", "waits", "streams of the array", "controller"


@dataclass(frozen=True)
class Cost:
    """The cost of a call, of a program or of several.

    Attributes:
        seconds: by what takes them: for a call "kernels", "waits", "streams of the array", "controller", or the host
            buffer that is moved; for a program see programs/cost.py.
        read_bytes: bytes of main memory that the array reads.
        written_bytes: bytes of main memory that the array writes.
        words: 32-bit words of instructions, as mlir-aie writes them.
        changes: changes of array.
        dispatches: dispatches to the chip.
        host_bytes: bytes that steps of the host read and write.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    words: float = 0.0
    changes: float = 0.0
    dispatches: float = 0.0
    host_bytes: float = 0.0

    @cached_property
    def total(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())

    def __add__(self, other: Cost) -> Cost:
        names = dict.fromkeys([*self.seconds, *other.seconds])
        seconds = {name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in names}
        return Cost(seconds, *(getattr(self, name) + getattr(other, name) for name in _SUMS))

    def __mul__(self, times: float) -> Cost:
        seconds = {name: times * value for name, value in self.seconds.items()}
        return Cost(seconds, *(times * getattr(self, name) for name in _SUMS))


_SUMS = [each.name for each in fields(Cost)][1:]


@dataclass
class _Phase:
    """The bytes that a phase moves from and to main memory, and its instructions.

    Attributes:
        moved: bytes, by fifo.
        cost: the same with what short runs cost more, by fifo.
        buffers: the same as `cost`, by host buffer.
        waits: whether the sequence waits at its end.
        ahead: words of the instructions up to the first transfer.
        words: words of the instructions after it.
    """

    moved: Counter[str] = field(default_factory=Counter)
    cost: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    buffers: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: bool = False
    ahead: int = 0
    words: int = 0


class _Kinds:
    """Cores or streams by kind: each kind's busiest member, and the bytes of the whole kind."""

    def __init__(self, kinds: Mapping[str, Hashable], seconds: Mapping[str, float], size: Mapping[str, float]) -> None:
        self._kinds = kinds
        self._bytes = self._by_kind(size)
        self._busiest = defaultdict[object, float](float)
        for name, kind in kinds.items():
            self._busiest[kind] = max(self._busiest[kind], seconds[name])

    def seconds(self, size: Mapping[str, float]) -> float:
        """Seconds of the busiest kind in a phase in which each part moves `size` bytes."""
        here = self._by_kind(size)
        return max((self._busiest[kind] * of / self._bytes[kind] for kind, of in here.items() if of), default=0.0)

    def share_memory(self, size: Mapping[str, float], read: Collection[str], values: Values) -> None:
        """Bound the streams in `read`, which read main memory, by their shares of its rate."""
        of_kinds = defaultdict[object, list[float]](list)
        for name in read:
            of_kinds[self._kinds[name]].append(size[name])
        for kind, sizes in of_kinds.items():
            self._busiest[kind] = max(self._busiest[kind], shared_seconds(sizes, values))

    def _by_kind(self, size: Mapping[str, float]) -> dict[Hashable, float]:
        total = defaultdict[object, float](float)
        for name, kind in self._kinds.items():
            total[kind] += size[name]
        return total


def call_cost(plan: Plan, chip: Chip, values: Values = VALUES) -> Cost:
    """The cost of a valid plan (`check.require_valid`)."""
    phases = list(_phases(plan, chip, values))
    moved = sum((phase.moved for phase in phases), Counter[str]())
    cost = defaultdict[str, float](float)
    for phase in phases:
        for name, size in phase.cost.items():
            cost[name] += size
    flow = array_flow(plan.array, moved)
    of_streams = stream_seconds(plan.array, flow, chip)
    of_cores = {_name(tile): cycles / chip.clock for tile, cycles in core_cycles(plan, flow, chip, values).items()}
    ends = _stream_kinds(plan.array, chip)
    streams = _Kinds({name: ends[name] for name in moved}, of_streams, cost)
    streams.share_memory(cost, {name for name in moved if ends[name][0]}, values)
    cores = _Kinds(
        {_name(core.tile): _kernels(core.body) for core in plan.array.cores}, of_cores, _core_bytes(plan.array, flow)
    )

    seconds = defaultdict[str, float](float)
    of_phases: dict[tuple[object, ...], Mapping[str, float]] = {}
    for phase in phases:
        key = tuple(sorted(phase.moved.items()))
        if key not in of_phases:
            of_phases[key] = _core_bytes(plan.array, array_flow(plan.array, phase.moved))
        busy = cores.seconds(of_phases[key])
        moving = max(streams.seconds(phase.cost), sum(phase.cost.values()) / values["memory_read"])
        ahead, control = (words * values["instruction_word"] for words in (phase.ahead, phase.words))
        name = KERNELS if busy > moving else max(phase.buffers, key=phase.buffers.__getitem__, default=KERNELS)
        seconds[CONTROLLER if control > max(busy, moving) else name] += max(busy, moving, control)
        seconds[CONTROLLER] += ahead
        seconds[WAITS] += phase.waits * values["wait"]
    inside = max(of_streams.values(), default=0.0) - sum(seconds.values())
    if inside > 0:
        seconds[ARRAY] = inside
    read = sum(moved[fifo.name] for fifo in plan.array.fifos if from_shim(fifo, chip))
    return Cost(dict(seconds), read, sum(moved.values()) - read, words_of_steps(plan.sequence.steps))


def _phases(plan: Plan, chip: Chip, values: Values) -> Iterator[_Phase]:
    fifos = {fifo.name: fifo for fifo in plan.array.fifos}
    efficiency: dict[tuple[object, ...], float] = {}  # apart from their offsets, a call has few different taps
    started: dict[str, Transfer] = {}
    pending, written = Counter[str](), set[str]()
    phase = _Phase()
    for step in plan.sequence.steps:
        if isinstance(step, Transfer) and from_shim(fifos[step.fifo], chip) and step.buffer in written:
            if phase.moved:
                yield replace(phase, waits=True)
                phase = _Phase()
            written = set()
        if phase.moved:
            phase.words += words_of_step(step)
        else:
            phase.ahead += words_of_step(step)
        if isinstance(step, Transfer):
            item = fifos[step.fifo].type.item_bytes
            walk = (step.tap.walk, item)
            if walk not in efficiency:
                efficiency[walk] = relative_efficiency(contiguous_bytes(step.tap, item), values)
            size = step.tap.elements * item
            phase.moved[step.fifo] += size
            phase.cost[step.fifo] += size / efficiency[walk]
            phase.buffers[step.buffer] += size / efficiency[walk]
            started[step.name] = step
            pending[step.fifo] += 1
        elif isinstance(step, Await):
            fifo = fifos[started[step.transfer].fifo]
            pending[fifo.name] -= 1
            if from_shim(fifo, chip):
                continue
            written.add(started[step.transfer].buffer)
            if not pending[fifo.name] and phase.moved:
                yield replace(phase, waits=True)
                phase, written = _Phase(), set()
    if phase.moved:
        yield phase


def _name(tile: Tile) -> str:
    """A tile's name."""
    return f"({tile.column}, {tile.row})"


def _kernels(body: tuple[Statement, ...], port: str = "consume") -> frozenset[str]:
    """The kernels that a core calls on objects that it consumes, or (`port` "produce") that it produces."""
    every = list(statements(body))
    views = {statement.name for statement in every if isinstance(statement, Acquire) and statement.port == port}
    return frozenset(
        statement.kernel
        for statement in every
        if isinstance(statement, Call) and any(isinstance(a, Element) and a.view in views for a in statement.arguments)
    )


def _stream_kinds(array: Array, chip: Chip) -> dict[str, tuple[bool, frozenset[str]]]:
    """The kind of each fifo from or to main memory: its direction, and the kernels at its other end."""
    taking, giving = ({c.tile: _kernels(c.body, port) for c in array.cores} for port in ("consume", "produce"))
    further: dict[str, tuple[str, ...]] = {}
    before: dict[str, tuple[str, ...]] = {}
    for link in array.links:
        further |= dict.fromkeys(link.inputs, link.outputs)
        before |= dict.fromkeys(link.outputs, link.inputs)
    fifos = {fifo.name: fifo for fifo in array.fifos}

    def into(name: str) -> frozenset[str]:
        here = (taking.get(end.tile, frozenset()) for end in fifos[name].consumers)
        return frozenset().union(*here, *(into(other) for other in further.get(name, ())))

    def out_of(name: str) -> frozenset[str]:
        here = giving.get(fifos[name].producer.tile, frozenset())
        return here.union(*(out_of(other) for other in before.get(name, ())))

    shim = {name: from_shim(fifo, chip) for name, fifo in fifos.items()}
    return {name: (reads, into(name) if reads else out_of(name)) for name, reads in shim.items()}


def _core_bytes(array: Array, through: Mapping[str, float]) -> dict[str, float]:
    """Bytes that each core consumes of main memory's; for a core that only other cores feed, those that it produces."""
    consumed, produced = defaultdict[object, float](float), defaultdict[object, float](float)
    for fifo in array.fifos:
        for end in fifo.consumers:
            consumed[end.tile] += through[fifo.name]
        produced[fifo.producer.tile] += through[fifo.name]
    return {_name(core.tile): consumed[core.tile] or produced[core.tile] for core in array.cores}

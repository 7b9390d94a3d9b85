# SPDX-License-Identifier: Apache-2.0
"""Follows a plan in time: one process for each core, each fifo's stream and the sequence, which wait for one another.

This file has the order of events; `flownpu.aie.cost.simulation` says how long each takes. Objects are counted in bytes,
no data is moved.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from flownpu.aie.plan.data import (
    Acquire,
    Await,
    BarrierRelease,
    BarrierWait,
    Call,
    Load,
    Loop,
    Release,
    SetBarrier,
    Store,
    Tile,
    Transfer,
    WriteParameter,
)
from flownpu.aie.plan.expressions import call_bytes, call_integers, evaluate
from flownpu.aie.plan.resources import consumer_at, link_ranges, resources_of, shared_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from flownpu.aie.plan.data import Array, Core, Fifo, Link, Plan, Statement, Step
    from flownpu.aie.plan.limits import Limits

__all__ = ["Span", "TimedDataflow"]


@dataclass(frozen=True)
class Span:
    """What a lane of a tile does from cycle `start` on, for `cycles` cycles; the host's lanes have no tile."""

    tile: Tile | None
    lane: str
    name: str
    start: float
    cycles: float


@dataclass
class _Waitable:
    """Something that processes wait for to change."""

    waiting: list[_Process] = field(default_factory=list)


# A process yields the cycles it takes, or what it waits for.
_Process: TypeAlias = "Generator[float | _Waitable, None, None]"


@dataclass
class _Host(_Waitable):
    """The host's end of a fifo: bytes of the transfers that were started, and those that were moved."""

    started: int = 0
    moved: int = 0
    share: int = 0  # the host has no objects

    @property
    def waitable(self) -> _Waitable:
        """What changes when more can be moved."""
        return self

    def left(self) -> int:
        """Bytes that can be moved now."""
        return self.started - self.moved

    def move(self, size: int) -> None:
        """Bytes were moved."""
        self.moved += size


@dataclass
class _Objects(_Waitable):
    """Objects in the memory of a tile, counted in bytes, with `writers` and `readers`.

    An object is whole when every writer has written its share of it, and free again when every reader has read its.
    """

    depth: int = 0
    writers: list[_Port] = field(default_factory=list)
    readers: list[_Port] = field(default_factory=list)


@dataclass
class _Port:
    """A writer or a reader of objects: its share of each object in bytes, and the bytes that it has moved."""

    waitable: _Objects
    reading: bool
    share: int
    done: int = 0

    def __post_init__(self) -> None:
        (self.waitable.readers if self.reading else self.waitable.writers).append(self)

    def left(self) -> int:
        """Bytes that can be moved now."""
        others = self.waitable.writers if self.reading else self.waitable.readers
        ready = min(other.done // other.share for other in others) + (0 if self.reading else self.waitable.depth)
        return ready * self.share - self.done

    def move(self, size: int) -> None:
        """Bytes were moved."""
        self.done += size


@dataclass
class _Barrier(_Waitable):
    value: int = 0


class TimedDataflow:
    """Processes for cores, streams and the sequence, run in the order of their times."""

    def __init__(self, plan: Plan, limits: Limits, call_cycles: Callable[[str, list[int], int], float]) -> None:
        """Set up a valid plan.

        Args:
            plan: the plan to follow.
            limits: the limits of its target.
            call_cycles: the cycles of a kernel's call, by its name, its integer arguments and its buffers' bytes.
        """
        self.plan, self.limits, self.call_cycles = plan, limits, call_cycles
        self.now = 0.0
        self.spans: list[Span] = []
        self.ready: list[tuple[float, int, _Process]] = []
        self.numbers = itertools.count()
        self.words: dict[tuple[str, int], int] = {}
        for buffer in plan.array.buffers:
            self.words.update({(buffer.name, i): int(v) for i, v in enumerate(buffer.initial_value)})
        self.barriers = {barrier.name: _Barrier(value=barrier.initial_value) for barrier in plan.array.barriers}
        self.fifos = {fifo.name: fifo for fifo in plan.array.fifos}
        self.bytes_of = {buffer.name: buffer.type.bytes for buffer in plan.array.buffers}
        self.lanes = {
            (channel.fifo, channel.tile): f"DMA {'S2MM' if channel.direction == 'in' else 'MM2S'} {channel.number}"
            for channel in resources_of(plan.array, limits).channels
        }
        # By (fifo, tile, whether it is the producer's end): the port of the fifo's stream, and that of the tile's core.
        self.streams: dict[tuple[str, Tile, bool], _Port | _Host] = {}
        self.cores: dict[tuple[str, Tile, bool], _Port] = {}
        self.hosts: dict[str, _Host] = {}

    def run(self) -> list[Span]:
        """All spans, by start."""
        self._place_objects(self.plan.array)
        for core in self.plan.array.cores:
            self._start(self._core(core))
        self._start(self._sequence())
        while self.ready:
            self.now, _, process = heapq.heappop(self.ready)
            self._resume(process)
        return sorted(self.spans, key=lambda span: span.start)

    def _start(self, process: _Process, delay: float = 0.0) -> None:
        heapq.heappush(self.ready, (self.now + delay, next(self.numbers), process))

    def _resume(self, process: _Process) -> None:
        step = next(process, None)
        if isinstance(step, _Waitable):
            step.waiting.append(process)
        elif step is not None:
            self._start(process, step)

    def _changed(self, *things: _Waitable) -> None:
        for thing in things:
            waiting, thing.waiting = thing.waiting, []
            for process in waiting:
                self._start(process)

    # --- Fifos --------------------------------------------------------------------------------------------------------

    def _place_objects(self, array: Array) -> None:
        """Give every end of every fifo its objects, and every fifo that needs one a stream."""
        linked = {name for link in array.links for name in (*link.inputs, *link.outputs)}
        for link in array.links:
            self._place_link(link)
        for fifo in array.fifos:
            if shared_memory(fifo, fifo.name in linked, self.limits) is not None:
                objects = _Objects(depth=fifo.producer.depth)
                self.cores[fifo.name, fifo.producer.tile, True] = _Port(objects, False, fifo.type.bytes)
                self.cores[fifo.name, fifo.consumers[0].tile, False] = _Port(objects, True, fifo.type.bytes)
                continue
            for end, producing in [(fifo.producer, True), *((end, False) for end in fifo.consumers)]:
                key = fifo.name, end.tile, producing
                if self.limits.kind(end.tile.column, end.tile.row) == "shim":
                    self.streams[key] = self.hosts[fifo.name] = _Host()
                elif key not in self.streams:
                    objects, repeats = _Objects(depth=end.depth), fifo.repeat_count if producing else 1
                    self.cores[key] = _Port(objects, not producing, fifo.type.bytes)
                    self.streams[key] = _Port(objects, producing, fifo.type.bytes * repeats)
            self._start(self._stream(fifo))

    def _place_link(self, link: Link) -> None:
        """The objects that the ends of a link share: every input writes a share of each, every output reads one."""
        inputs, outputs = ([self.fifos[name] for name in names] for names in (link.inputs, link.outputs))
        first, last = inputs[0], outputs[0]
        entering = consumer_at(first, last.producer.tile)
        if link.kind == "forward":
            whole = max(first.type.bytes, last.type.bytes)
            # Padding makes what is sent longer than what came; else a larger object is cut, or put together.
            written, read = ([first.type.bytes], [last.type.bytes]) if last.padding else ([whole], [whole])
            depth = entering.depth if first.type.bytes >= last.type.bytes else last.producer.depth
        else:
            parent, ranges = link_ranges(link, self.fifos)
            parts = [(end - start) * parent.type.item_bytes for start, end in ranges]
            written, read = ([parent.type.bytes], parts) if link.kind == "split" else (parts, [parent.type.bytes])
            depth = entering.depth if link.kind == "split" else last.producer.depth
        objects, tile = _Objects(depth=depth), last.producer.tile
        for fifo, share in zip(inputs, written, strict=True):
            self.streams[fifo.name, tile, False] = _Port(objects, False, share)
        for fifo, share in zip(outputs, read, strict=True):
            self.streams[fifo.name, tile, True] = _Port(objects, True, share * fifo.repeat_count)

    def _stream(self, fifo: Fifo) -> _Process:
        """A fifo's stream: moves data when all sinks have room."""
        tiles = [fifo.producer.tile, *(end.tile for end in fifo.consumers)]
        ends = [self.streams[fifo.name, tile, number == 0] for number, tile in enumerate(tiles)]
        chunk = math.gcd(fifo.type.bytes, *(end.share for end in ends))
        while True:
            for end in ends:
                while end.left() < chunk:
                    yield end.waitable
            start, cycles = self.now, self._stream_cycles(fifo, chunk)
            yield cycles
            for tile in tiles:
                self.spans.append(Span(tile, self.lanes[fifo.name, tile], fifo.name, start, cycles))
            for end in ends:
                end.move(chunk)
            self._changed(*(end.waitable for end in ends))

    def _stream_cycles(self, fifo: Fifo, size: int) -> float:  # noqa: ARG002 a subclass has other streams
        """Cycles, from now on, in which a fifo's stream moves `size` bytes."""
        return size * 8 / self.limits.stream_bits

    # --- The sequence -------------------------------------------------------------------------------------------------

    def _transfer_started(self, transfer: Transfer, size: int) -> None:
        """The sequence starts a transfer of `size` bytes."""

    def _awaited(self) -> float:
        """Cycles until the sequence learns that a transfer for which it had to wait is over."""
        return 0.0

    def _read(self, _step: Step) -> float:
        """Cycles that the controller takes for a step's instructions."""
        return 0.0

    def _sequence(self) -> _Process:
        complete_at: dict[str, tuple[_Host, int]] = {}
        for step in self.plan.sequence.steps:
            if (cycles := self._read(step)) > 0:
                yield cycles
            if isinstance(step, Transfer):
                host, size = self.hosts[step.fifo], step.tap.elements * self.fifos[step.fifo].type.item_bytes
                self._transfer_started(step, size)
                host.started += size
                complete_at[step.name] = host, host.started
                self._changed(host)
            elif isinstance(step, Await):
                host, moved = complete_at[step.transfer]
                start = self.now
                while host.moved < moved:
                    yield host
                if self.now > start:
                    if (later := self._awaited()) > 0:
                        yield later
                    self.spans.append(Span(None, "sequence", f"await {step.transfer}", start, self.now - start))
            elif isinstance(step, WriteParameter):
                self.words[step.buffer, step.index] = step.value
            elif isinstance(step, SetBarrier):
                self.barriers[step.barrier].value = step.value
                self._changed(self.barriers[step.barrier])

    # --- Cores --------------------------------------------------------------------------------------------------------

    def _core(self, core: Core) -> _Process:
        variables: dict[str, int] = {}
        view_bytes: dict[str, int] = {}
        while True:
            waited = False
            for step in self._body(core, core.body, variables, view_bytes):
                waited = True
                yield step
            # A pass that waits for nothing and takes no time would go on for ever.
            if not (core.forever and waited):
                return

    def _body(
        self, core: Core, body: tuple[Statement, ...], variables: dict[str, int], view_bytes: dict[str, int]
    ) -> Iterator[float | _Waitable]:
        for statement in body:
            match statement:
                case Loop():
                    bounds = (evaluate(bound, variables) for bound in (statement.start, statement.stop, statement.step))
                    for index in range(*bounds):
                        variables[statement.variable] = index
                        yield from self._body(core, statement.body, variables, view_bytes)
                case Acquire():
                    view_bytes[statement.name] = self.fifos[statement.fifo].type.bytes
                    end = self.cores[statement.fifo, core.tile, statement.port == "produce"]
                    while end.left() < statement.count * self.fifos[statement.fifo].type.bytes:
                        yield end.waitable
                case Release():
                    end = self.cores[statement.fifo, core.tile, statement.port == "produce"]
                    end.move(statement.count * self.fifos[statement.fifo].type.bytes)
                    self._changed(end.waitable)
                case Call():
                    integers = list(call_integers(statement, variables))
                    size = call_bytes(statement, view_bytes, self.bytes_of)
                    cycles = self.call_cycles(statement.kernel, integers, size)
                    self.spans.append(Span(core.tile, "core", statement.kernel, self.now, cycles))
                    yield cycles
                case Load():
                    key = statement.buffer, evaluate(statement.index, variables)
                    variables[statement.variable] = self.words.get(key, 0)
                case Store():
                    key = statement.buffer, evaluate(statement.index, variables)
                    self.words[key] = evaluate(statement.value, variables)
                case BarrierWait():
                    barrier = self.barriers[statement.barrier]
                    while barrier.value != statement.value:
                        yield barrier
                case BarrierRelease():
                    self.barriers[statement.barrier].value += statement.value
                    self._changed(self.barriers[statement.barrier])

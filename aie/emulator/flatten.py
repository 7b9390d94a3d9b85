# SPDX-License-Identifier: Apache-2.0
"""Turns a plan into the flat form that the emulator's C++ runs: buffers, locks, DMA channels with their descriptors.

The rules are those of `flownpu.aie.plan.resources`, with the depths as the plan has them (MLIR printed from a plan
gives the depth of every end, and the compiler takes it):

- A pool's objects are buffers, with two locks, *free* and *full*; one pair for each part where a link splits or joins.
  Who fills an object takes from *free* and adds to *full*; who empties it does the reverse.
- A DMA channel goes through its descriptors in a circle. Shim channels have none: the sequence queues tasks on them.
- At a link, objects are those of the larger fifo if it forwards, and whole ones if it splits or joins; each part's walk
  is over that part.

Offsets and strides are in bytes here, and every name is one that a message may print.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from flownpu.aie.emulator.flatten_core import CoreCode
from flownpu.aie.plan.data import DTYPES, Await, Dimension, Free, SetBarrier, Transfer, WriteParameter
from flownpu.aie.plan.limits import LIMITS
from flownpu.aie.plan.resources import consumer_at, link_ranges, shared_memory
from flownpu.aie.words.writer import ARRAY, SEQUENCE, WordWriter

if TYPE_CHECKING:
    from flownpu.aie.plan.data import Array, Core, End, Fifo, Link, Sequence, Tile, TileBuffer
    from flownpu.aie.plan.limits import Limits

_TRANSFER, _AWAIT, _FREE, _WRITE, _SET = range(5)  # kinds of steps (program.h, `HostAction`)


@dataclass(frozen=True)
class _Part:
    """A range of every object of a pool, and its locks."""

    start: int
    bytes: int
    free: int
    full: int


@dataclass(frozen=True)
class _Pool:
    """Objects in a tile's memory."""

    memories: list[int]
    parts: list[_Part]


@dataclass
class FlatArray:
    """An array in flat form, and the numbers that its sequences refer to.

    Attributes:
        words: the array as 64-bit words, as C++ reads it.
        identity: tells arrays apart; a sequence carries that of its array.
        channels: the number of each fifo's channel at a shim tile, by fifo.
        memories: the numbers of buffers.
        locks: the numbers of barriers.
        item_bytes: bytes of an element of each fifo.
    """

    words: np.ndarray
    identity: int
    channels: dict[str, int]
    memories: dict[str, int]
    locks: dict[str, int]
    item_bytes: dict[str, int]

    def flatten(self, sequence: Sequence) -> np.ndarray:
        """A sequence over this array, in flat form."""
        words = WordWriter()
        words.text(sequence.name)
        words.add(len(sequence.buffers))
        for buffer in sequence.buffers:
            words.text(buffer.name)
            words.add(buffer.type.bytes)
        places = {buffer.name: number for number, buffer in enumerate(sequence.buffers)}
        item_bytes = {buffer.name: buffer.type.item_bytes for buffer in sequence.buffers}
        transfers: dict[str, int] = {}
        words.add(len(sequence.steps))
        for step in sequence.steps:
            match step:
                case Transfer():
                    transfers[step.name] = len(transfers)
                    item = item_bytes[step.buffer]
                    words.add(_TRANSFER)
                    words.text(step.name)
                    words.add(self.channels[step.fifo], places[step.buffer], step.tap.offset * item, int(step.token))
                    _walk(words, step.tap.walk, item)
                case Await():
                    words.add(_AWAIT, transfers[step.transfer])
                case Free():
                    words.add(_FREE, transfers[step.transfer])
                case WriteParameter():
                    words.add(_WRITE, self.memories[step.buffer], step.index, step.value)
                case SetBarrier():
                    words.add(_SET, self.locks[step.barrier], step.value)
        return words.finish(SEQUENCE, self.identity)


@lru_cache(maxsize=32)  # the results for the last arrays are kept
def flatten_array(array: Array) -> FlatArray:
    """Flatten a valid array (`check.check`); equal arrays share the result, which must not be changed."""
    return _Flattening(array, LIMITS[array.target]).run()


def _walk(words: WordWriter, walk: tuple[Dimension, ...], item_bytes: int) -> None:
    words.add(item_bytes, len(walk))
    for dimension in walk:
        words.add(dimension.size, dimension.stride * item_bytes)


@dataclass
class _Flattening:
    """An array while it is flattened."""

    array: Array
    limits: Limits
    memories: list[tuple[str, int, bool, bytes]] = field(default_factory=list)  # name, bytes, parameters, initial value
    locks: list[tuple[str, int]] = field(default_factory=list)
    streams: int = 0
    channels: list[WordWriter] = field(default_factory=list)
    ends: list[WordWriter] = field(default_factory=list)

    def run(self) -> FlatArray:
        array = self.array
        self.fifos = {fifo.name: fifo for fifo in array.fifos}
        self.end_of: dict[tuple[Tile, str, str], int] = {}
        self.shim_channels: dict[str, int] = {}
        self.used: defaultdict[tuple[Tile, str], int] = defaultdict(int)
        self.link_of = {name: link for link in array.links for name in (*link.inputs, *link.outputs)}
        self.pool_of = {id(link): self._link_pool(link) for link in array.links}
        buffers = {buffer.name: self._buffer(buffer) for buffer in array.buffers}
        barriers = {barrier.name: self._lock(barrier.name, 0) for barrier in array.barriers}
        for fifo in array.fifos:
            self._fifo(fifo)
        words = self._words(self._cores(buffers, barriers))
        identity = words.identity
        items = {fifo.name: fifo.type.item_bytes for fifo in array.fifos}
        return FlatArray(words.finish(ARRAY, identity), identity, self.shim_channels, buffers, barriers, items)

    def _words(self, cores: list[WordWriter]) -> WordWriter:
        words = WordWriter()
        words.text(self.array.target)
        words.add(self.limits.task_queue)
        words.add(len(self.memories))
        for name, size, parameters, initial in self.memories:
            words.text(name)
            words.add(size, int(parameters))
            words.bytes(initial)
        words.add(len(self.locks))
        for name, value in self.locks:
            words.text(name)
            words.add(value)
        words.add(self.streams)
        words.add(len(self.array.kernels))
        for kernel in self.array.kernels:
            words.text(kernel.entry)
            words.list(kind.bytes if kind.shape else 0 for kind in kernel.arguments)
        for items in (self.channels, self.ends, cores):
            words.add(len(items))
            for item in items:
                words.append(item)
        return words

    # --- Memory and locks ---------------------------------------------------------------------------------------------

    def _place(self, tile: Tile) -> str:
        return f"{self.limits.kind(tile.column, tile.row)} tile {tile}"

    def _memory(self, name: str, size: int, *, parameters: bool = False, initial: bytes = b"") -> int:
        self.memories.append((name, size, parameters, initial))
        return len(self.memories) - 1

    def _lock(self, name: str, value: int) -> int:
        self.locks.append((name, value))
        return len(self.locks) - 1

    def _buffer(self, buffer: TileBuffer) -> int:
        values, dtype = buffer.initial_value, DTYPES[buffer.type.dtype]
        initial = np.array(values, dtype).tobytes() if values else b""
        return self._memory(buffer.name, buffer.type.bytes, parameters=buffer.run_time_parameter, initial=initial)

    def _pool(self, fifo: Fifo, tile: Tile, depth: int, ranges: list[tuple[int, int]]) -> _Pool:
        """Make a pool; `ranges`: (start, end) of an object's parts, in elements."""
        name, item = f"{fifo.name} at {tile}", fifo.type.item_bytes
        memories = [self._memory(f"object {place} of {name}", fifo.type.bytes) for place in range(depth)]
        parts = []
        for place, (start, end) in enumerate(ranges):
            label = f"{name}, part {place}" if len(ranges) > 1 else name
            free, full = self._lock(f"free objects of {label}", depth), self._lock(f"full ones of {label}", 0)
            parts.append(_Part(start * item, (end - start) * item, free, full))
        return _Pool(memories, parts)

    def _link_pool(self, link: Link) -> _Pool:
        first, last = self.fifos[link.inputs[0]], self.fifos[link.outputs[0]]
        larger = first if first.type.bytes >= last.type.bytes else last
        fifo, ranges = (larger, []) if link.kind == "forward" else link_ranges(link, self.fifos)
        depth = consumer_at(first, last.producer.tile).depth if fifo is first else fifo.producer.depth
        ranges = ranges or [(0, fifo.type.elements)]
        return self._pool(fifo, last.producer.tile, depth, ranges)

    # --- Fifos --------------------------------------------------------------------------------------------------------

    def _fifo(self, fifo: Fifo) -> None:
        """Make a fifo's pools, its channels, and the ends that cores have."""
        memory = shared_memory(fifo, fifo.name in self.link_of, self.limits)
        if memory is not None:
            pool = self._pool(fifo, memory, fifo.producer.depth, [(0, fifo.type.elements)])
            self._core_end(fifo, fifo.producer, "produce", pool)
            self._core_end(fifo, fifo.consumers[0], "consume", pool)
            return
        stream = self.streams
        self.streams += 1
        for end, port in [(fifo.producer, "produce"), *((end, "consume") for end in fifo.consumers)]:
            if self.limits.kind(end.tile.column, end.tile.row) == "shim":
                self.shim_channels[fifo.name] = len(self.channels)
                self._channel(fifo, end, port, stream, None, [])
                continue
            link = self.link_of.get(fifo.name)
            if link is not None and end.tile == self.fifos[link.outputs[0]].producer.tile:
                pool = self.pool_of[id(link)]
                parts = self._parts(fifo, link, pool)
            else:
                pool = self._pool(fifo, end.tile, end.depth, [(0, fifo.type.elements)])
                parts = pool.parts
                self._core_end(fifo, end, port, pool)
            self._channel(fifo, end, port, stream, pool, parts)

    def _parts(self, fifo: Fifo, link: Link, pool: _Pool) -> list[_Part]:
        """The parts of a link's pool that one of the link's fifos carries, in the order of the fifo's stream."""
        if link.kind == "forward":
            return pool.parts
        names = link.outputs if link.kind == "split" else link.inputs
        return [pool.parts[names.index(fifo.name)]] if fifo.name in names else pool.parts

    def _channel(self, fifo: Fifo, end: End, port: str, stream: int, pool: _Pool | None, parts: list[_Part]) -> None:
        """Make a DMA channel with its circle of descriptors; a shim tile's has none."""
        direction = "output" if port == "produce" else "input"
        number = self.used[end.tile, direction]
        self.used[end.tile, direction] += 1
        words = WordWriter()
        words.text(f"{direction} channel {number} of {self._place(end.tile)} (fifo {fifo.name})")
        words.add(stream, int(port == "produce"))
        descriptors = [(memory, part) for memory in (pool.memories if pool is not None else []) for part in parts]
        words.add(len(descriptors))
        for memory, part in descriptors:
            takes, gives = (part.full, part.free) if port == "produce" else (part.free, part.full)
            words.add(memory, part.start, part.bytes, takes, gives, part.bytes if port == "produce" else 0)
            walk = end.walk or (Dimension(part.bytes // fifo.type.item_bytes, 1),)
            _walk(words, walk, fifo.type.item_bytes)
        self.channels.append(words)

    def _core_end(self, fifo: Fifo, end: End, port: str, pool: _Pool) -> None:
        part = pool.parts[0]
        takes, gives = (part.free, part.full) if port == "produce" else (part.full, part.free)
        self.end_of[end.tile, fifo.name, port] = len(self.ends)
        words = WordWriter()
        words.text(f"{port} end of fifo {fifo.name}")
        words.add(takes, gives, int(port == "consume"))
        words.list(pool.memories)
        self.ends.append(words)

    # --- Cores --------------------------------------------------------------------------------------------------------

    def _cores(self, buffers: dict[str, int], barriers: dict[str, int]) -> list[WordWriter]:
        kernels = {kernel.entry: number for number, kernel in enumerate(self.array.kernels)}
        numbers = tuple(tuple(numbers.items()) for numbers in (self.end_of, buffers, barriers, kernels))
        return [_core(core, _numbers(*numbers)) for core in self.array.cores]


class _Numbers:
    """The numbers of an array's parts, by the names that the cores' programs use."""

    def __init__(
        self,
        ends: tuple[tuple[tuple[Tile, str, str], int], ...],
        buffers: tuple[tuple[str, int], ...],
        barriers: tuple[tuple[str, int], ...],
        kernels: tuple[tuple[str, int], ...],
    ) -> None:
        self.buffers, self.barriers, self.kernels = dict(buffers), dict(barriers), dict(kernels)
        self.ends: defaultdict[Tile, dict[tuple[str, str], int]] = defaultdict(dict)
        for (tile, fifo, port), number in ends:
            self.ends[tile][fifo, port] = number


# Arrays that differ in one core, as in tests, share the code of the others. The numbers of the last 16 are kept.
_numbers = lru_cache(maxsize=16)(_Numbers)


@lru_cache(maxsize=512)
def _core(core: Core, numbers: _Numbers) -> WordWriter:
    """A core's name and program; not to be changed."""
    code = CoreCode(core, numbers.ends[core.tile], numbers.buffers, numbers.barriers, numbers.kernels)
    words = WordWriter()
    words.text(f"core {core.tile}")
    words.add(int(code.forever), len(code.variables), len(code.views))
    words.list(code.words)
    return words

# SPDX-License-Identifier: Apache-2.0
"""Checks a sequence: what each transfer touches, and how many are under way at once.

A task is known to be complete when it was awaited, or a later task of the same channel was (a channel's queue is in
order). It is also complete when a drain of its data was awaited, because the output cannot come before the input (arXiv
2512.13282, section 4.4; `_Known`). Only then may its buffer descriptor be freed; before, the DMA could read it while it
is rewritten.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from functools import lru_cache
from typing import TYPE_CHECKING

from flownpu.aie.check.resources import words
from flownpu.aie.check.structure import describe
from flownpu.aie.check.violation import Violation
from flownpu.aie.plan.data import Await, Free, SetBarrier, Transfer, WriteParameter
from flownpu.aie.plan.instructions import WORD_BYTES, words_of_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flownpu.aie.plan.data import Array, Dimension, Fifo, HostBuffer, Plan, Step, Tap, Tile
    from flownpu.aie.plan.limits import Limits


def check_sequence(plan: Plan, limits: Limits) -> list[Violation]:
    """Check every step by itself and, if all are right, their order and the size of their instructions."""
    places = _Places(plan, limits)
    found: list[Violation] = []
    for step in plan.sequence.steps:
        if isinstance(step, Transfer):
            found += _transfer(step, places, limits)
        elif isinstance(step, (WriteParameter, SetBarrier)):
            found += _start(step, places, limits)
    return found or [*_order(plan, limits), *_instructions(plan, limits)]


def _instructions(plan: Plan, limits: Limits) -> Iterator[Violation]:
    """All of a call's instructions must fit in the controller's heap."""
    need = words_of_steps(plan.sequence.steps) * WORD_BYTES
    if need > limits.heap_bytes:
        yield Violation("sequence", "instructions", f"{need} bytes", f"{limits.heap_bytes} bytes", "the heap")


def descriptor(tap: Tap) -> tuple[int, tuple[Dimension, ...]]:
    """A tap as a shim tile's buffer descriptor: how often the task is repeated, and the walk of one repetition.

    Dimensions of size 1 are left out. The outermost of the others is the repetition if there are 4 of them, or if there
    are several and its stride is 0.
    """
    walk = tuple(dimension for dimension in tap.walk if dimension.size != 1) or tap.walk[-1:]
    if len(walk) > 1 and (len(walk) == 4 or walk[0].stride == 0):
        return walk[0].size, walk[1:]
    return 1, walk


def iteration_stride(tap: Tap) -> int:
    """The stride from one of `descriptor`'s repetitions to the next, in elements; 0 if there is only one."""
    repeats, _ = descriptor(tap)
    return 0 if repeats == 1 else next(dimension.stride for dimension in tap.walk if dimension.size != 1)


def contiguous(walk: tuple[Dimension, ...]) -> bool:
    """Whether a walk visits neighbouring elements in order, so that a length describes it without wraps."""
    run = 1
    for dimension in reversed(walk):
        if dimension.size > 1 and dimension.stride != run:
            return False
        run *= dimension.size
    return True


class _Places:
    """The parts of a plan that its steps name."""

    def __init__(self, plan: Plan, limits: Limits) -> None:
        self.streams = _streams(plan.array, limits)
        self.host = {buffer.name: buffer for buffer in plan.sequence.buffers}
        self.buffers = {buffer.name: buffer for buffer in plan.array.buffers}


def _start(step: WriteParameter | SetBarrier, places: _Places, limits: Limits) -> Iterator[Violation]:
    if isinstance(step, WriteParameter):
        buffer = places.buffers.get(step.buffer)
        place = f"run-time parameter {step.buffer}"
        if buffer is None or not buffer.run_time_parameter:
            yield Violation(place, "a buffer for run-time parameters", 1, 0)
        elif not 0 <= step.index < buffer.type.elements:
            yield Violation(place, "index", step.index, f"0..{buffer.type.elements - 1}")
        elif buffer.type.item_bytes != limits.granule_bytes:
            yield Violation(place, "element type", "32-bit words", str(buffer.type))
        if not -(1 << 31) <= step.value < 1 << 32:
            yield Violation(place, "value", step.value, "32 bits")
    elif not 0 <= step.value <= limits.lock_maximum:
        yield Violation(f"barrier {step.barrier}", "value", step.value, f"0..{limits.lock_maximum}")


def _transfer(step: Transfer, places: _Places, limits: Limits) -> Iterator[Violation]:
    place = f"transfer {step.name}"
    fifo, buffer = places.streams.fifos.get(step.fifo), places.host[step.buffer]
    if fifo is None or places.streams.tiles[fifo.name] is None:
        yield Violation(place, f"an end of fifo {step.fifo} at a shim tile", 1, 0)
        return
    if buffer.type.dtype != fifo.type.dtype:
        yield Violation(place, "element type", str(fifo.type), str(buffer.type))
        return
    yield from _tap(place, step.tap, buffer, limits)
    if step.tap.elements % fifo.type.elements:
        need = f"whole objects of {fifo.type.elements} elements"
        yield Violation(place, f"elements for fifo {fifo.name}", need, step.tap.elements)


def _tap(place: str, tap: Tap, buffer: HostBuffer, limits: Limits) -> Iterator[Violation]:
    size, granule, shim = buffer.type.item_bytes, limits.granule_bytes, limits.shim
    repeats, walk = descriptor(tap)
    stride = (iteration_stride(tap) if repeats > 1 else 0) * size
    if tap.offset < 0 or tap.last >= buffer.type.elements:
        yield Violation(place, f"last element of host buffer {buffer.name}", tap.last, f"0..{buffer.type.elements - 1}")
    if tap.offset * size % granule:
        yield Violation(place, "offset", f"a multiple of {granule} bytes", f"{tap.offset} x {size} bytes")
    if len(walk) > shim.dimensions:
        yield Violation(place, "dimensions", len(tap.walk), shim.dimensions + 1, "with the iteration")
    if repeats > limits.iteration_maximum:
        yield Violation(place, "iteration", repeats, limits.iteration_maximum, "outermost dimension")
    if stride % granule:
        yield Violation(place, "stride of the iteration", f"a multiple of {granule} bytes", f"{stride} bytes")
    if stride // granule > 1 << shim.stride_bits:
        yield Violation(place, "stride of the iteration in words", stride // granule, 1 << shim.stride_bits)
    if any(dimension.stride < 1 and dimension.size > 1 for dimension in walk):
        yield Violation(place, "stride", "1 or more, but for the outermost", [d.stride for d in walk])
    if not contiguous(walk):
        yield from words(place, size, walk, shim.wrap_bits, shim.stride_bits, shim.dimensions, limits)
    length = tap.elements // repeats * size
    if length // granule >= 1 << shim.length_bits:
        yield Violation(place, "length in words", length // granule, (1 << shim.length_bits) - 1)
    if contiguous(walk) and length % granule:
        yield Violation(place, "length", f"a multiple of {granule} bytes", f"{tap.elements // repeats} x {size} bytes")


class _Streams:
    """The streams of an array, for checking its sequences: fifos, the host's ends, and which end feeds which.

    Attributes:
        fifos: all fifos, by name.
        tiles: by the name of a fifo, the shim tile of its host end or None; a tile is one object, to compare quickly.
        reach: what `downstream` gives.
    """

    def __init__(self, array: Array, limits: Limits) -> None:
        self.fifos = {fifo.name: fifo for fifo in array.fifos}
        places: dict[Tile | None, Tile | None] = {}
        tiles = {fifo.name: _shim_tile(fifo, limits) for fifo in array.fifos}
        self.tiles = {name: places.setdefault(tile, tile) for name, tile in tiles.items()}
        self.reach = downstream(array)


_streams = lru_cache(maxsize=32)(_Streams)  # programs of one array share it


def _shim_tile(fifo: Fifo, limits: Limits) -> Tile | None:
    """The shim tile at which the host's end of a fifo is, None if it has no such end."""
    ends = (fifo.producer, *fifo.consumers)
    return next((end.tile for end in ends if limits.kind(end.tile.column, end.tile.row) == "shim"), None)


def downstream(array: Array) -> dict[str, set[str]]:
    """For each fifo the names of those its data reaches: through links, and from a core's inputs to its outputs."""
    next_fifos: defaultdict[str, set[str]] = defaultdict(set)
    for link in array.links:
        for name in link.inputs:
            next_fifos[name] |= set(link.outputs)
    produced: defaultdict[Tile, set[str]] = defaultdict(set)
    for fifo in array.fifos:
        produced[fifo.producer.tile].add(fifo.name)
    cores = {core.tile for core in array.cores}
    for fifo in array.fifos:
        for end in fifo.consumers:
            if end.tile in cores:
                next_fifos[fifo.name] |= produced[end.tile]
    reached: dict[str, set[str]] = {}
    for fifo in array.fifos:
        seen: set[str] = set()
        waiting = [fifo.name]
        while waiting:
            for name in next_fifos[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        reached[fifo.name] = seen
    return reached


class _Known:
    """The transfers that have certainly ended when another one has.

    A channel's transfers end in the order of their starts. A transfer whose data reaches the ended one has also ended
    if it was started before it. If it was started later (a drain is often queued before its fills), shares are
    compared: a transfer's share is the part of its fifo's data that was moved up to and with it. It has ended if its
    share is no larger than the ended one's.

    This assumes that cores produce as they consume: of two drains of one size the first needs the first half of the
    filled data. The emulator, which follows the data itself, refuses a descriptor that is freed while it is used.
    """

    def __init__(self, steps: Iterable[Step], reach: dict[str, set[str]]) -> None:
        self._reach = reach
        self._reaching: dict[str, list[str]] = {}
        self._order: dict[str, int] = {}
        self._moved: dict[str, int] = {}  # elements that its fifo has moved up to and with each transfer
        self._total: defaultdict[str, int] = defaultdict(int)
        for number, step in enumerate(steps):
            if isinstance(step, Transfer):
                self._total[step.fifo] += step.tap.elements
                self._order[step.name], self._moved[step.name] = number, self._total[step.fifo]

    def reaching(self, fifo: str) -> list[str]:
        """The fifos whose data reaches this one, itself among them."""
        if fifo not in self._reaching:
            self._reaching[fifo] = [name for name, reached in self._reach.items() if name == fifo or fifo in reached]
        return self._reaching[fifo]

    def ends_with(self, other: Transfer, ended: Transfer) -> bool:
        """Whether `other` has ended when `ended` has."""
        if other.fifo == ended.fifo:
            return self._order[other.name] <= self._order[ended.name]
        if ended.fifo not in self._reach[other.fifo]:
            return False
        if self._order[other.name] <= self._order[ended.name]:
            return True
        share, shares = self._moved[other.name], self._total[other.fifo]
        return share * self._total[ended.fifo] <= self._moved[ended.name] * shares


def _order(plan: Plan, limits: Limits) -> Iterator[Violation]:
    """Follow the sequence: descriptors in use on each shim tile, tasks queued on each channel."""
    streams = _streams(plan.array, limits)
    known, tiles = _Known(plan.sequence.steps, streams.reach), streams.tiles
    live: dict[str, Transfer] = {}
    on_tile: Counter[Tile | None] = Counter()  # how many are live on each shim tile
    running: dict[str, deque[Transfer]] = {fifo.name: deque() for fifo in plan.array.fifos}  # not known to be complete
    ended: set[str] = set()
    for step in plan.sequence.steps:
        if isinstance(step, Transfer):
            live[step.name] = step
            on_tile[tiles[step.fifo]] += 1
            running[step.fifo].append(step)
            yield from _counts(step, tiles[step.fifo], on_tile, running[step.fifo], limits)
        elif isinstance(step, (Await, Free)):
            place = f"transfer {step.transfer}"
            if step.transfer in ended:
                yield Violation(place, "ends", 2, 1, "awaited or freed before")
            else:
                transfer = live.pop(step.transfer)
                on_tile[tiles[transfer.fifo]] -= 1
                ended.add(step.transfer)
                yield from _end(step, transfer, running, known)
    for name in live:
        yield Violation(f"transfer {name}", "an Await or a Free before the sequence ends", 1, 0)


def _counts(
    step: Transfer, tile: Tile | None, on_tile: Counter[Tile | None], queued: deque[Transfer], limits: Limits
) -> Iterator[Violation]:
    if tile is None:
        return
    if on_tile[tile] > limits.shim.buffer_descriptors:
        yield Violation(
            describe(tile, limits), "buffer descriptors live at once", on_tile[tile], limits.shim.buffer_descriptors
        )
    if len(queued) > limits.task_queue:
        yield Violation(describe(tile, limits), f"tasks queued for fifo {step.fifo}", len(queued), limits.task_queue)


def _end(
    step: Await | Free,
    transfer: Transfer,
    running: dict[str, deque[Transfer]],
    known: _Known,
) -> Iterator[Violation]:
    place = f"transfer {transfer.name}"
    if isinstance(step, Free):
        if transfer in running[transfer.fifo]:
            detail = "await it, or a drain of its data, first; its descriptor is still live"
            yield Violation(place, "completion known before Free", "yes", "no", detail)
        return
    if not transfer.token:
        yield Violation(place, "a token to await", 1, 0, "start it with wait=True")
    for fifo in known.reaching(transfer.fifo):
        queue = running[fifo]
        while queue and known.ends_with(queue[0], transfer):  # if one may still run, so may the later ones
            queue.popleft()

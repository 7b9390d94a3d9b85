# SPDX-License-Identifier: Apache-2.0
"""Makes a plan of a recorded program: finds its fifos, names them, and chooses open places.

IRON leaves the choice of tiles to the compiler (`--aie-place-tiles`); our own designs place everything themselves. The
simple rule here, for programs that do not: workers column by column from the left; links on the memory tile, and the
host's ends on the shim tile, of the column of the first core that they serve, whether or not it has channels left.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from flownpu.aie.iron.fifo import ObjectFifo, ObjectFifoHandle, ObjectFifoLink
from flownpu.aie.iron.runtime import Runtime
from flownpu.aie.iron.symbolic import RecordingError
from flownpu.aie.iron.types import Device, flatten, refuse
from flownpu.aie.iron.types import Tile as OpenTile
from flownpu.aie.iron.worker import Buffer, Kernel, Worker, WorkerRuntimeBarrier
from flownpu.aie.plan import data as plan
from flownpu.aie.plan.limits import LIMITS, Limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_T = TypeVar("_T")


class Program:
    """A whole design (`aie.iron.Program`)."""

    def __init__(self, device: Device, rt: Runtime, workers: Sequence[Worker] | None = None, **options: Any) -> None:
        refuse("Program", options)
        self.device, self.runtime, self.workers = device, rt, tuple(workers or ())

    def resolve_program(self, device_name: str = "main") -> plan.Plan:
        """Choose the open places of the design, run the functions of cores and sequence once, and return the plan.

        Programs that share their workers and the host's ends share the array, which is recorded once.

        Raises:
            RecordingError: IRON would refuse the design, or a plan cannot hold it; the message says what and where.
        """
        ends = tuple(end for end in flatten(self.runtime.fn_args) if isinstance(end, ObjectFifoHandle))
        return plan.Plan(device_name, _array(self.device.target, self.workers, ends), self.runtime.record())


@lru_cache(maxsize=32)  # as many as compat.shared keeps; workers and ends compare by identity
def _array(target: str, workers: tuple[Worker, ...], ends: tuple[ObjectFifoHandle, ...]) -> plan.Array:
    limits = LIMITS[target]
    arguments = [argument for worker in workers for argument in worker.arguments]
    fifos = _reachable([argument for argument in (*arguments, *ends) if isinstance(argument, ObjectFifoHandle)])
    buffers = _unique(argument for argument in arguments if isinstance(argument, Buffer))
    barriers = _unique(argument for argument in arguments if isinstance(argument, WorkerRuntimeBarrier))
    _name(fifos, buffers, barriers)
    _place(workers, fifos, limits)

    cores = tuple(worker.record(_place_of(worker.tile)) for worker in workers)
    links = {id(link): link for fifo in fifos for link in _links(fifo)}
    locks = [
        plan.Barrier(lock, _place_of(worker.tile))
        for barrier in barriers
        for lock, worker in zip(barrier.locks, barrier.workers, strict=True)
    ]
    kernels = {kernel.record.entry: kernel.record for kernel in arguments if isinstance(kernel, Kernel)}
    return plan.Array(
        target,
        tuple(_fifo(fifo) for fifo in fifos),
        tuple(_link(link) for link in links.values()),
        tuple(map(_buffer, buffers)),
        tuple(locks),
        tuple(kernels.values()),
        cores,
    )


def _links(fifo: ObjectFifo) -> list[ObjectFifoLink]:
    ends = [fifo.producer, *fifo.consumers]
    return [end.owner for end in ends if end is not None and isinstance(end.owner, ObjectFifoLink)]


def _reachable(handles: list[ObjectFifoHandle]) -> list[ObjectFifo]:
    """The fifos of these ends and all that are linked to them, in the order they are found."""
    found: dict[int, ObjectFifo] = {}
    waiting = [handle.fifo for handle in handles]
    while waiting:
        fifo = waiting.pop(0)
        if id(fifo) in found:
            continue
        found[id(fifo)] = fifo
        waiting += [end.fifo for link in _links(fifo) for end in (*link.inputs, *link.outputs)]
    return list(found.values())


def _ends(fifo: ObjectFifo) -> list[ObjectFifoHandle]:
    """The producer and the consumers.

    Raises:
        RecordingError: there is no producer or no consumer, or an end that nobody uses.
    """
    if fifo.producer is None or not fifo.consumers:
        missing = "producer" if fifo.producer is None else "consumer"
        raise RecordingError(f"[ObjectFifo {fifo.name}] has no {missing}")
    for end in (fifo.producer, *fifo.consumers):
        if end.owner is None:
            raise RecordingError(f"[ObjectFifo {fifo.name}] nobody uses its {end.port} end")
    return [fifo.producer, *fifo.consumers]


def _unique(objects: Iterable[_T]) -> list[_T]:
    return list({id(item): item for item in objects}.values())


def _name(fifos: list[ObjectFifo], buffers: list[Buffer], barriers: list[WorkerRuntimeBarrier]) -> None:
    for number, buffer in enumerate(buffers):
        buffer.name = buffer.name or f"buffer{number}"
    for number, barrier in enumerate(barriers):
        barrier.number = number
        barrier.locks.clear()
    taken = {fifo.name for fifo in fifos}
    number = 0
    for fifo in fifos:
        while fifo.name is None:
            if f"of{number}" not in taken:
                fifo.name = f"of{number}"
            number += 1


def _place_of(tile: OpenTile) -> plan.Tile:
    if tile.place is None:
        raise RecordingError("[tiles] a tile was left without a place: one that no worker, link or sequence uses")
    return tile.place


# --- From recorded objects to the plan's --------------------------------------------------------------------------


def _end(handle: ObjectFifoHandle) -> plan.End:
    owner = handle.owner
    tile = owner.tile if isinstance(owner, (Worker, ObjectFifoLink)) else handle.tile
    return plan.End(_place_of(tile), handle.depth, () if handle.walk is None else handle.walk.walk)


def _fifo(fifo: ObjectFifo) -> plan.Fifo:
    producer, *consumers = _ends(fifo)
    return plan.Fifo(fifo.name or "", fifo.type, _end(producer), tuple(map(_end, consumers)))


def _link(link: ObjectFifoLink) -> plan.Link:
    inputs, outputs = (tuple(end.fifo.name or "" for end in ends) for ends in (link.inputs, link.outputs))
    return plan.Link(inputs, outputs, link.offsets)


def _buffer(buffer: Buffer) -> plan.TileBuffer:
    tile = _place_of(buffer.tile) if buffer.tile else _place_of(OpenTile())
    return plan.TileBuffer(buffer.name or "", tile, buffer.type, buffer.run_time_parameter, buffer.initial_value)


# --- Places -------------------------------------------------------------------------------------------------------


def _place(workers: Sequence[Worker], fifos: list[ObjectFifo], limits: Limits) -> None:
    _place_workers(workers, limits)
    for link in {id(link): link for fifo in fifos for link in _links(fifo)}.values():
        linked = {id(end.fifo) for end in (*link.inputs, *link.outputs)}
        _settle(link.tile, [end for fifo in fifos if id(fifo) in linked for end in _ends(fifo)], row=1)
    for fifo in fifos:
        for end in _ends(fifo):
            if isinstance(end.owner, Runtime):
                _settle(end.tile, _ends(fifo), row=0)


def _settle(tile: OpenTile, served: list[ObjectFifoHandle], *, row: int) -> None:
    """Place an open tile in this row, in the column of the first core or link that it serves, or else in column 0."""
    places = (end.owner.tile.place for end in served if isinstance(end.owner, (Worker, ObjectFifoLink)))
    tile.place = tile.place or plan.Tile(next((place.column for place in places if place is not None), 0), row)


def _place_workers(workers: Sequence[Worker], limits: Limits) -> None:
    taken = {worker.tile.place for worker in workers}
    rows = range(limits.first_compute_row, limits.rows)
    every = [plan.Tile(column, row) for column in range(limits.columns) for row in rows]
    free = iter([place for place in every if place not in taken])
    for worker in workers:
        worker.tile.place = worker.tile.place or next(free, None)
        if worker.tile.place is None:
            raise RecordingError(f"[tiles] needs {len(workers)} compute tiles, {limits.name} has {len(every)}")

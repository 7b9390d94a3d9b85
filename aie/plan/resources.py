# SPDX-License-Identifier: Apache-2.0
"""The resources that the compiler gives to fifos: buffers and locks on tiles, DMA channels and their descriptors.

These are the rules of mlir-aie's `aie-objectFifo-stateful-transform` (lib/Dialect/AIE/Transforms), which the checker
counts with:

- A fifo with one consumer whose tile shares memory with the producer's, and without walks and links, is one pool of
  objects in that memory and no DMA. Every other fifo has a pool at each end and a DMA channel at each.
- At a link the ends that meet share one pool, that of the whole object (of the larger one where a link forwards). It
  has a pair of locks for every part, and its DMAs have a descriptor for every part of every object.
- A pool has one descriptor for each object on each channel.
- A core that counts its objects at run time (`Core.dynamic`) keeps one word for every fifo's end that it uses.
- Channels are handed out per tile and direction in the order of the fifos.

One deviation, to the safe side: where all ends have the same depth, IRON lets the compiler choose the depth at a core,
one more than the most objects it acquires; a pool counts the larger of that and the depth asked for.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from flownpu.aie.plan.data import Acquire, Array, Core, End, Fifo, Link, Tile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.aie.plan.limits import Limits

_WORD_BYTES = 4


@dataclass(frozen=True)
class Pool:
    """The objects of a fifo in the memory of a tile; the lock that counts free ones begins with their `count`."""

    fifo: str
    tile: Tile
    count: int
    object_bytes: int
    locks: int

    @property
    def bytes(self) -> int:
        """Bytes of all objects."""
        return self.count * self.object_bytes


@dataclass(frozen=True)
class Channel:
    """A DMA channel of a tile that a fifo uses; `number` counts from 0 per tile and direction ("in", "out")."""

    fifo: str
    tile: Tile
    direction: str
    number: int
    descriptors: int


@dataclass(frozen=True)
class Resources:
    """All pools and channels of an array."""

    pools: tuple[Pool, ...]
    channels: tuple[Channel, ...]


def shared_memory(fifo: Fifo, linked: bool, limits: Limits) -> Tile | None:
    """The tile whose memory holds a fifo without a DMA; None if the fifo needs one."""
    producer, consumer = fifo.producer, fifo.consumers[0]
    if linked or len(fifo.consumers) > 1 or producer.walk or consumer.walk:
        return None
    kinds = [limits.kind(end.tile.column, end.tile.row) for end in (producer, consumer)]
    if kinds != ["compute", "compute"]:
        return None
    ours, theirs = _place(producer.tile), _place(consumer.tile)
    if limits.reaches_memory(theirs, ours):
        return producer.tile
    return consumer.tile if limits.reaches_memory(ours, theirs) else None


def _place(tile: Tile) -> tuple[int, int]:
    return tile.column, tile.row


def consumer_at(fifo: Fifo, tile: Tile) -> End:
    """A fifo's consumer end on a tile; a fifo that is linked on may have others elsewhere.

    Raises:
        StopIteration: there is none, a mistake that `check.structure` finds.
    """
    return next(end for end in fifo.consumers if end.tile == tile)


def link_ranges(link: Link, fifos: dict[str, Fifo]) -> tuple[Fifo, list[tuple[int, int]]]:
    """The fifo that a split or join has whole, and the (start, end) of every part in its object, in elements."""
    whole = fifos[link.inputs[0] if link.kind == "split" else link.outputs[0]]
    return whole, list(zip(link.offsets, [*link.offsets[1:], whole.type.elements], strict=True))


def resources_of(array: Array, limits: Limits) -> Resources:
    """Count what an array needs; its links must name fifos that exist and meet on one tile (`check.structure`)."""
    fifos = {fifo.name: fifo for fifo in array.fifos}
    linked = {name for link in array.links for name in (*link.inputs, *link.outputs)}
    most = _most_acquired(array)
    pools = [_link_pool(link, fifos) for link in array.links]
    parts = {name: link for link in array.links for name in (*link.inputs, *link.outputs)}
    pool_of_link = {id(link): pool for link, pool in zip(array.links, pools, strict=True)}
    channels: list[Channel] = []
    used: defaultdict[tuple[Tile, str], int] = defaultdict(int)

    for fifo in array.fifos:
        memory = shared_memory(fifo, fifo.name in linked, limits)
        if memory is not None:
            pools.append(Pool(fifo.name, memory, fifo.producer.depth, fifo.type.bytes, 2))
            continue
        for end, direction in [(fifo.producer, "out"), *((end, "in") for end in fifo.consumers)]:
            link = parts.get(fifo.name)
            pool = pool_of_link[id(link)] if link is not None else None
            if link is not None and pool is not None and end.tile == pool.tile:
                whole = link.inputs[0] if link.kind == "split" else link.outputs[0]
                factor = (
                    max(len(link.inputs), len(link.outputs)) if link.kind != "forward" and fifo.name == whole else 1
                )
                descriptors = pool.count * factor
            elif limits.kind(end.tile.column, end.tile.row) == "shim":
                descriptors = 0  # the sequence's transfers have their own
                pools.append(Pool(fifo.name, end.tile, 0, 0, 2))
            else:
                count = _depth(fifo, end, most)
                pools.append(Pool(fifo.name, end.tile, count, fifo.type.bytes, 2))
                descriptors = count
            channels.append(Channel(fifo.name, end.tile, direction, used[end.tile, direction], descriptors))
            used[end.tile, direction] += 1
    return Resources(tuple(pools), tuple(channels))


def _link_pool(link: Link, fifos: dict[str, Fifo]) -> Pool:
    first, last = fifos[link.inputs[0]], fifos[link.outputs[0]]
    whole_first = link.kind == "forward" and first.type.bytes >= last.type.bytes
    if link.kind == "split" or whole_first:
        fifo, depth = first, consumer_at(first, last.producer.tile).depth
    else:
        fifo, depth = last, last.producer.depth
    parts = max(len(link.inputs), len(link.outputs))
    return Pool(fifo.name, last.producer.tile, depth, fifo.type.bytes, 2 * parts)


def _most_acquired(array: Array) -> dict[tuple[str, Tile], int]:
    return {(fifo, core.tile): count for core in array.cores for fifo, count in _acquired(core).items()}


# The cache holds the cores of several arrays, which often have some in common.
@lru_cache(maxsize=512)
def _acquired(core: Core) -> Mapping[str, int]:
    """The most objects of each fifo that a core acquires."""
    most: defaultdict[str, int] = defaultdict(int)
    for statement in core.statements:
        if isinstance(statement, Acquire):
            most[statement.fifo] = max(most[statement.fifo], statement.count)
    return MappingProxyType(most)


def _depth(fifo: Fifo, end: End, most: dict[tuple[str, Tile], int]) -> int:
    acquired = most.get((fifo.name, end.tile), 0)
    same = len({other.depth for other in (fifo.producer, *fifo.consumers)}) == 1
    return max(end.depth, acquired + 1) if same and acquired > 1 else end.depth


@lru_cache(maxsize=512)
def counter_bytes(core: Core) -> int:
    """Bytes in which a core counts its objects at run time; 0 for a core that is not `dynamic`."""
    if not core.dynamic:
        return 0
    return _WORD_BYTES * len({(s.fifo, s.port) for s in core.statements if isinstance(s, Acquire)})

# SPDX-License-Identifier: Apache-2.0
"""The use of every tile of a plan: memory, DMA channels, buffer descriptors.

Counted as the compiler places it (`flownpu.aie.plan.resources`), like the checker's limits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu.aie.plan.data import Await, Call, Free, Tile, Transfer
from flownpu.aie.plan.resources import Resources, counter_bytes, resources_of

if TYPE_CHECKING:
    from flownpu.aie.plan.data import Array, Core, Plan, Sequence
    from flownpu.aie.plan.limits import Limits


@dataclass(frozen=True)
class Use:
    """The used part of a resource, and the whole."""

    used: int
    available: int

    def __str__(self) -> str:
        return f"{self.used}/{self.available}"


@dataclass(frozen=True)
class MemoryUse:
    """One thing in a tile's memory, and its bytes in all; for a fifo, `objects` of equal size."""

    name: str
    bytes: int
    objects: int = 0

    def __str__(self) -> str:
        size = f"{self.objects} x {self.bytes // self.objects}" if self.objects else self.bytes
        return f"{self.name} {size}"


@dataclass(frozen=True)
class TileUse:
    """A tile that a plan uses: shim, memory or compute.

    `descriptors` of a shim tile are those of the sequence: the most that are live at once.
    """

    tile: Tile
    kind: str
    kernels: tuple[str, ...]
    memory: Use
    input_channels: Use
    output_channels: Use
    descriptors: Use


def memory_parts(array: Array, resources: Resources) -> dict[Tile, list[MemoryUse]]:
    """The contents of each tile's memory: objects of fifos, buffers, a core's stack and its counters of objects."""
    parts: defaultdict[Tile, list[MemoryUse]] = defaultdict(list)
    for pool in resources.pools:
        if pool.bytes:
            parts[pool.tile].append(MemoryUse(pool.fifo, pool.bytes, pool.count))
    for buffer in array.buffers:
        parts[buffer.tile].append(MemoryUse(buffer.name, buffer.type.bytes))
    for core in array.cores:
        parts[core.tile].append(MemoryUse("stack", core.stack_bytes))
        if counters := counter_bytes(core):
            parts[core.tile].append(MemoryUse("object counters", counters))
    return dict(parts)


def tile_uses(plan: Plan, limits: Limits) -> list[TileUse]:
    """Every tile that a plan uses, column by column; its structure must be right (`check.structure`)."""
    array = plan.array
    resources = resources_of(array, limits)
    parts = memory_parts(array, resources)
    channels: Counter[tuple[Tile, str]] = Counter()
    descriptors: Counter[Tile] = Counter()
    for channel in resources.channels:
        channels[channel.tile, channel.direction] += 1
        descriptors[channel.tile] += channel.descriptors
    ends = {fifo.name: fifo.producer.tile for fifo in array.fifos if fifo.producer.tile.row == 0}
    ends |= {fifo.name: end.tile for fifo in array.fifos for end in fifo.consumers if end.tile.row == 0}
    descriptors.update(live_descriptors(plan.sequence, ends))
    cores = {core.tile: core for core in array.cores}
    uses = []
    for tile in sorted({*parts, *cores, *descriptors, *(tile for tile, _ in channels)}):
        have = limits.tile(tile.column, tile.row)
        uses.append(
            TileUse(
                tile,
                limits.kind(tile.column, tile.row),
                kernels_of(cores[tile]) if tile in cores else (),
                Use(sum(part.bytes for part in parts.get(tile, ())), have.memory_bytes),
                Use(channels[tile, "in"], have.input_channels),
                Use(channels[tile, "out"], have.output_channels),
                Use(descriptors[tile], have.buffer_descriptors),
            )
        )
    return uses


def kernels_of(core: Core) -> tuple[str, ...]:
    """The kernels that a core calls, in the order of their first call."""
    return tuple(dict.fromkeys(s.kernel for s in core.statements if isinstance(s, Call)))


def live_descriptors(sequence: Sequence, ends: dict[str, Tile]) -> Counter[Tile]:
    """The most descriptors of a sequence that are live at once on each shim tile; `ends`: each fifo's shim tile."""
    live: Counter[Tile] = Counter()
    most: Counter[Tile] = Counter()
    tiles: dict[str, Tile] = {}
    for step in sequence.steps:
        if isinstance(step, Transfer) and step.fifo in ends:
            tile = tiles[step.name] = ends[step.fifo]
            live[tile] += 1
            most[tile] = max(most[tile], live[tile])
        elif isinstance(step, (Await, Free)) and step.transfer in tiles:
            live[tiles.pop(step.transfer)] -= 1
    return most

# SPDX-License-Identifier: Apache-2.0
"""Checks the resources of every tile against the array's needs: memory, channels, descriptors, locks, walks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

from flownpu.aie.check.structure import describe
from flownpu.aie.check.violation import Violation
from flownpu.aie.plan.data import BufferArgument, Call, Load, Store
from flownpu.aie.plan.resources import Resources, link_ranges, resources_of
from flownpu.aie.plan.usage import MemoryUse, memory_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flownpu.aie.plan.data import Array, Core, Dimension, End, Fifo, Plan, Tile
    from flownpu.aie.plan.limits import Limits


def check_resources(plan: Plan, limits: Limits) -> list[Violation]:
    """Check every tile's resources, counted as the compiler will place them (`flownpu.aie.plan.resources`)."""
    return list(_of_array(plan.array, limits))


@lru_cache(maxsize=32)  # programs of one array differ in their sequences only
def _of_array(array: Array, limits: Limits) -> tuple[Violation, ...]:
    resources = resources_of(array, limits)
    held = memory_parts(array, resources)
    return (
        *_memory(held, limits),
        *_constants(array, held, limits),
        *_channels(resources, limits),
        *_descriptors(resources, limits),
        *_lengths(array, resources, limits),
        *_locks(array, resources, limits),
        *_walks(array, limits),
        *_adjacency(array, limits),
    )


def _memory(held: dict[Tile, list[MemoryUse]], limits: Limits) -> Iterator[Violation]:
    for tile, parts in sorted(held.items()):
        need, have = sum(part.bytes for part in parts), limits.tile(tile.column, tile.row).memory_bytes
        if need > have:
            ordered = sorted(parts, key=lambda part: (part.bytes, str(part)), reverse=True)
            detail = " + ".join(map(str, ordered))
            yield Violation(describe(tile, limits), "memory", f"{need} bytes", f"{have} bytes", detail)


def _constants(array: Array, held: dict[Tile, list[MemoryUse]], limits: Limits) -> Iterator[Violation]:
    """The memory beside a core's stack and buffers must hold its constants; `_memory` reports buffers that do not fit.

    mlir_aie 1.4.4 and newer place the stack, each buffer and one region for a core's `.data`, `.rodata` and `.bss`,
    whose size aiecc measures before. Buffers may lie across banks, and where the preferred places do not do, all others
    are searched (programming_guide/core_data_memory.md there, read in November 2026). Neighbours in any order, each at
    the next multiple of the alignment, are one of the layouts that this search finds.
    """
    for core in array.cores:
        parts, have = held[core.tile], limits.tile(core.tile.column, core.tile.row).memory_bytes
        room = have - sum(_aligned_bytes(part, limits.buffer_alignment) for part in parts)
        if room < limits.constant_bytes and sum(part.bytes for part in parts) <= have:
            need, left = f"{limits.constant_bytes} bytes", f"{max(room, 0)} bytes"
            detail = "constants of its kernels go there"
            yield Violation(describe(core.tile, limits), "memory beside stack and buffers", need, left, detail)


def _aligned_bytes(part: MemoryUse, alignment: int) -> int:
    objects = max(part.objects, 1)
    return objects * alignment * -(-part.bytes // (objects * alignment))


def _channels(resources: Resources, limits: Limits) -> Iterator[Violation]:
    used: defaultdict[tuple[Tile, str], list[str]] = defaultdict(list)
    for channel in resources.channels:
        used[channel.tile, channel.direction].append(channel.fifo)
    for (tile, direction), fifos in sorted(used.items()):
        kind = limits.tile(tile.column, tile.row)
        have = kind.input_channels if direction == "in" else kind.output_channels
        if len(fifos) > have:
            name = "input" if direction == "in" else "output"
            yield Violation(describe(tile, limits), f"{name} DMA channels", len(fifos), have, ", ".join(fifos))


def _descriptors(resources: Resources, limits: Limits) -> Iterator[Violation]:
    need: Counter[Tile] = Counter()
    parity: Counter[tuple[Tile, int]] = Counter()
    for channel in resources.channels:
        need[channel.tile] += channel.descriptors
        parity[channel.tile, channel.number % 2] += channel.descriptors
    for tile, count in sorted(need.items()):
        have = limits.tile(tile.column, tile.row).buffer_descriptors
        if count > have:
            yield Violation(describe(tile, limits), "buffer descriptors", count, have)
    for (tile, odd), count in sorted(parity.items()):
        have = limits.memory_descriptors_per_parity
        if limits.kind(tile.column, tile.row) == "memory" and count > have:
            which = "odd" if odd else "even"
            yield Violation(describe(tile, limits), f"buffer descriptors of {which} channels", count, have)


def _lengths(array: Array, resources: Resources, limits: Limits) -> Iterator[Violation]:
    """A descriptor moves an object at most; its length register holds one word less than a memory tile's 2^17."""
    fifos = {fifo.name: fifo for fifo in array.fifos}
    for tile, name in sorted({(channel.tile, channel.fifo) for channel in resources.channels}):
        need, have = fifos[name].type.bytes // limits.granule_bytes, limits.tile(tile.column, tile.row).length_bits
        if limits.kind(tile.column, tile.row) != "shim" and need >= 1 << have:
            yield Violation(describe(tile, limits), f"length of an object of {name} in words", need, (1 << have) - 1)


def _locks(array: Array, resources: Resources, limits: Limits) -> Iterator[Violation]:
    need: Counter[Tile] = Counter(barrier.tile for barrier in array.barriers)
    for pool in resources.pools:
        need[pool.tile] += pool.locks
        if pool.count > limits.lock_maximum:
            resource = f"lock value of fifo {pool.fifo}"
            yield Violation(describe(pool.tile, limits), resource, pool.count, limits.lock_maximum)
    for tile, count in sorted(need.items()):
        have = limits.tile(tile.column, tile.row).locks
        if count > have:
            yield Violation(describe(tile, limits), "locks", count, have)


def _adjacency(array: Array, limits: Limits) -> Iterator[Violation]:
    """A core may use only buffers in memory that it reaches."""
    buffers = {buffer.name: buffer for buffer in array.buffers}
    for core in array.cores:
        for name in sorted(_used_buffers(core) & set(buffers)):
            tile = buffers[name].tile
            if not limits.reaches_memory((core.tile.column, core.tile.row), (tile.column, tile.row)):
                resource = f"buffer {name} in the memory of tile {tile}"
                yield Violation(describe(core.tile, limits), resource, "own, north, south or west", "out of reach")


# The cache holds the cores of several arrays, which often have some in common.
@lru_cache(maxsize=512)
def _used_buffers(core: Core) -> frozenset[str]:
    names: set[str] = set()
    for statement in core.statements:
        if isinstance(statement, Call):
            names |= {a.buffer for a in statement.arguments if isinstance(a, BufferArgument)}
        elif isinstance(statement, (Load, Store)):
            names.add(statement.buffer)
    return frozenset(names)


# --- Walks -----------------------------------------------------------------------------------------------------------


def _walks(array: Array, limits: Limits) -> Iterator[Violation]:
    sizes = _walked_elements(array)
    for fifo in array.fifos:
        ends = [(fifo.producer, "produce"), *((end, "consume") for end in fifo.consumers)]
        for end, port in ends:
            if end.walk:
                elements = sizes.get((fifo.name, port), [fifo.type.elements])
                place = f"{describe(end.tile, limits)}, {port} end of fifo {fifo.name}"
                yield from _walk(place, fifo, end, elements, limits)


def _walked_elements(array: Array) -> dict[tuple[str, str], list[int]]:
    """How many elements a walk at a link covers, by (fifo, port): the fifo's own part or, for the whole, each part."""
    fifos = {fifo.name: fifo for fifo in array.fifos}
    sizes: dict[tuple[str, str], list[int]] = {}
    for link in array.links:
        if link.kind == "forward":
            source, target = fifos[link.inputs[0]], fifos[link.outputs[0]]
            moved = max(source.type.elements, target.type.elements)
            sizes[source.name, "consume"] = sizes[target.name, "produce"] = [moved]
            continue
        whole, ranges = link_ranges(link, fifos)
        lengths = [end - start for start, end in ranges]
        names, ports = (link.outputs, "produce") if link.kind == "split" else (link.inputs, "consume")
        sizes[whole.name, "consume" if link.kind == "split" else "produce"] = lengths
        sizes.update({(name, ports): [length] for name, length in zip(names, lengths, strict=True)})
    return sizes


def _walk(place: str, fifo: Fifo, end: End, elements: list[int], limits: Limits) -> Iterator[Violation]:
    tile = limits.tile(end.tile.column, end.tile.row)
    if limits.kind(end.tile.column, end.tile.row) == "shim":
        yield Violation(place, "a walk", "none: the sequence's taps say it", len(end.walk))
        return
    if len(end.walk) > tile.dimensions:
        yield Violation(place, "dimensions", len(end.walk), tile.dimensions)
    steps = math.prod(dimension.size for dimension in end.walk)
    last = sum((dimension.size - 1) * dimension.stride for dimension in end.walk)
    for count in sorted(set(elements)):
        if steps != count:
            yield Violation(place, "elements of the walk", steps, count, "a walk covers what one transfer moves")
        elif last >= count:
            yield Violation(place, "last element of the walk", last, f"0..{count - 1}")
    for number, dimension in enumerate(end.walk):
        name = f"dimension {number}"
        if dimension.size > limits.layout_size_maximum:
            yield Violation(place, f"size of {name}", dimension.size, limits.layout_size_maximum)
        if dimension.size > 1 and dimension.stride < 1:
            yield Violation(place, f"stride of {name}", "1 or more", dimension.stride)
    yield from words(place, fifo.type.item_bytes, end.walk, tile.wrap_bits, tile.stride_bits, tile.dimensions, limits)


def words(
    place: str,
    item_bytes: int,
    walk: tuple[Dimension, ...],
    wrap_bits: int,
    stride_bits: int,
    dimensions: int,
    limits: Limits,
) -> Iterator[Violation]:
    """Check that a walk is one of whole 32-bit words, with wraps and strides that the registers hold.

    The innermost wrap counts words, the others repetitions. The outermost dimension of a descriptor that uses all its
    dimensions has no wrap register: the transfer's length ends it.
    """
    granule = limits.granule_bytes
    inner = walk[-1]
    if inner.size > 1 and inner.stride != 1 and item_bytes != granule:
        yield Violation(
            place, "innermost stride", 1, inner.stride, f"elements of {item_bytes} bytes, words of {granule}"
        )
    if inner.size * item_bytes % granule:
        need = f"a multiple of {granule} bytes"
        yield Violation(place, "innermost size", need, f"{inner.size} x {item_bytes} bytes")
    wraps = [dimension.size for dimension in walk[:-1]] + [inner.size * item_bytes // granule]
    for number, (dimension, wrap) in enumerate(zip(walk, wraps, strict=True)):
        name = f"dimension {number}"
        if number < len(walk) - 1 and dimension.size > 1 and dimension.stride * item_bytes % granule:
            need = f"a multiple of {granule} bytes"
            yield Violation(place, f"stride of {name}", need, f"{dimension.stride} x {item_bytes} bytes")
        step = dimension.stride * item_bytes // granule
        if dimension.size > 1 and step > 1 << stride_bits:
            yield Violation(place, f"stride of {name} in words", step, 1 << stride_bits)
        has_register = len(walk) - number < dimensions
        if has_register and wrap >= 1 << wrap_bits and len(walk) > 1:
            yield Violation(place, f"size of {name} in words", wrap, (1 << wrap_bits) - 1)

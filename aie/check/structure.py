# SPDX-License-Identifier: Apache-2.0
"""Checks that the parts of a plan fit together: names, places, ends of fifos, variables, links.

Plans come from the recorder (iron/), which itself refuses what no program can mean: types of arguments, depths, ends
without users, parts of another number than offsets.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

from flownpu.aie.check.violation import Violation
from flownpu.aie.plan.data import Call, Load, Loop, Operation, Store, Variable
from flownpu.aie.plan.resources import link_ranges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flownpu.aie.plan.data import Array, Fifo, Link, Plan, Statement, Tile
    from flownpu.aie.plan.limits import Limits

_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def describe(tile: Tile, limits: Limits) -> str:
    """A tile as messages name it."""
    return f"{limits.kind(tile.column, tile.row) or 'no'} tile {tile}"


def check_structure(plan: Plan, limits: Limits) -> list[Violation]:
    """Check that names are symbols and unique, tiles can hold what is on them, links meet and cover their object."""
    return list(_of_array(plan.array, limits))


@lru_cache(maxsize=32)  # programs of one array differ in their sequences only
def _of_array(array: Array, limits: Limits) -> tuple[Violation, ...]:
    found = *_names(array), *_places(array, limits)
    return found or (*_ends(array, limits), *_links(array, limits), *_variables(array, limits))


def _names(array: Array) -> Iterator[Violation]:
    names = Counter(fifo.name for fifo in array.fifos)
    names.update(buffer.name for buffer in array.buffers)
    names.update(barrier.name for barrier in array.barriers)
    names.update(kernel.entry for kernel in array.kernels)
    for name, count in names.items():
        if count > 1:
            yield Violation(
                "plan", f"the name {name}", f"{count} things", "1 thing", "fifos, buffers and kernels share names"
            )
        if not _SYMBOL.fullmatch(name):
            yield Violation("plan", "a name", "letters, digits and _", repr(name))


def _places(array: Array, limits: Limits) -> Iterator[Violation]:
    rule = f"{limits.name} has columns 0..{limits.columns - 1} and rows 0..{limits.rows - 1}"
    fifos, buffers = array.fifos, array.buffers
    tiles = {(f"fifo {fifo.name}", end.tile) for fifo in fifos for end in (fifo.producer, *fifo.consumers)}
    tiles |= {("core", core.tile) for core in array.cores} | {(f"buffer {b.name}", b.tile) for b in buffers}
    tiles |= {(f"barrier {barrier.name}", barrier.tile) for barrier in array.barriers}
    for what, tile in sorted(tiles):
        if not limits.kind(tile.column, tile.row):
            yield Violation(what, "place", f"tile {tile}", "no such tile", rule)
    for tile, count in Counter(core.tile for core in array.cores).items():
        if limits.kind(tile.column, tile.row) not in {"compute", ""}:
            yield Violation(describe(tile, limits), "a core", 1, 0, "only compute tiles have one")
        if count > 1:
            yield Violation(describe(tile, limits), "cores", count, 1)
    for buffer in array.buffers:
        if limits.kind(buffer.tile.column, buffer.tile.row) == "shim":
            yield Violation(describe(buffer.tile, limits), f"memory of buffer {buffer.name}", buffer.type.bytes, 0)


def _ends(array: Array, limits: Limits) -> Iterator[Violation]:
    cores = {core.tile for core in array.cores}
    fifos = {fifo.name: fifo for fifo in array.fifos}
    linked: set[tuple[str, str, Tile]] = set()
    for link in array.links:
        places = {fifos[name].producer.tile for name in link.outputs}
        linked |= {(name, "produce", tile) for name in link.outputs for tile in places}
        for name in link.inputs:
            ends = fifos[name].consumers
            meeting = [end for end in ends if len(ends) == 1 or end.tile in places]
            linked |= {(name, "consume", end.tile) for end in meeting}
    for fifo in array.fifos:
        for end, port in [(fifo.producer, "produce"), *((end, "consume") for end in fifo.consumers)]:
            kind = limits.kind(end.tile.column, end.tile.row)
            user = {"compute": end.tile in cores, "memory": (fifo.name, port, end.tile) in linked, "shim": True}[kind]
            if not user:
                need = "a core" if kind == "compute" else "a link"
                yield Violation(
                    f"fifo {fifo.name}", f"a user of its {port} end at {describe(end.tile, limits)}", need, "none"
                )
        yield from _fifo(fifo, limits)


def _fifo(fifo: Fifo, limits: Limits) -> Iterator[Violation]:
    place = f"fifo {fifo.name}"
    for tile, count in Counter(end.tile for end in fifo.consumers).items():
        if count > 1:
            yield Violation(place, f"consumers on {describe(tile, limits)}", count, 1, "one end a tile")
    if fifo.type.bytes % limits.granule_bytes:
        need = f"a multiple of {limits.granule_bytes} bytes"
        yield Violation(place, "object size", need, f"{fifo.type.bytes} bytes", "the DMA moves 32-bit words")


# --- Variables of a core's program ------------------------------------------------------------------------------------


def _variables(array: Array, limits: Limits) -> Iterator[Violation]:
    for core in array.cores:
        for name in _unbound_names(core.body):
            yield Violation(
                describe(core.tile, limits), f"the variable {name}", "a loop around it or a load before", "none"
            )


@lru_cache(maxsize=512)  # enough for the cores of several arrays
def _unbound_names(body: tuple[Statement, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_unbound(body, frozenset())))


def _unbound(body: tuple[Statement, ...], bound: frozenset[str]) -> Iterator[str]:
    """Names that are read without a value; a load's has one until the end of the loop around the load."""
    for statement in body:
        yield from (name for value in _expressions(statement) for name in _names_in(value) if name not in bound)
        if isinstance(statement, Load):
            bound |= {statement.variable}
        elif isinstance(statement, Loop):
            yield from _unbound(statement.body, bound | {statement.variable})


def _expressions(statement: Statement) -> tuple[object, ...]:
    match statement:
        case Loop():
            return statement.start, statement.stop, statement.step
        case Call():
            return statement.arguments
        case Load():
            return (statement.index,)
        case Store():
            return statement.index, statement.value
        case _:
            return ()


def _names_in(value: object) -> Iterator[str]:
    if isinstance(value, Variable):
        yield value.name
    elif isinstance(value, Operation):
        yield from _names_in(value.left)
        yield from _names_in(value.right)


# --- Links -----------------------------------------------------------------------------------------------------------


def _links(array: Array, limits: Limits) -> Iterator[Violation]:
    fifos = {fifo.name: fifo for fifo in array.fifos}
    uses = Counter((name, "input") for link in array.links for name in link.inputs)
    uses.update((name, "output") for link in array.links for name in link.outputs)
    for (name, side), count in uses.items():
        if count > 1:
            yield Violation(f"fifo {name}", f"links that have it as {side}", count, 1)
    both = {name for name, side in uses if side == "input"} & {name for name, side in uses if side == "output"}
    for name in sorted(both):
        yield Violation(
            f"fifo {name}", "links", 2, 1, "a fifo cannot be in more than one link: put a core between them"
        )
    for link in array.links:
        yield from _link(link, fifos, limits)


def _link(link: Link, fifos: dict[str, Fifo], limits: Limits) -> Iterator[Violation]:
    place = f"link {', '.join(link.inputs)} -> {', '.join(link.outputs)}"
    tile = fifos[link.outputs[0]].producer.tile
    if limits.kind(tile.column, tile.row) == "shim":
        yield Violation(place, "memory to link in", "a compute or memory tile", describe(tile, limits))
    yield from (_forward if link.kind == "forward" else _coverage)(place, link, fifos)


def _forward(place: str, link: Link, fifos: dict[str, Fifo]) -> Iterator[Violation]:
    source, target = fifos[link.inputs[0]], fifos[link.outputs[0]]
    small, large = sorted((source.type.bytes, target.type.bytes))
    if source.type.dtype != target.type.dtype:
        yield Violation(place, "element type", str(source.type), str(target.type))
    elif large % small:
        yield Violation(place, "object sizes", "one a multiple of the other", f"{source.type} and {target.type}")


def _coverage(place: str, link: Link, fifos: dict[str, Fifo]) -> Iterator[Violation]:
    """The parts of a split or join must tile the whole object, or the compiler silently loses or invents data."""
    whole, ranges = link_ranges(link, fifos)
    parts = [fifos[name] for name in (link.outputs if link.kind == "split" else link.inputs)]
    if link.offsets[0] != 0 or any(start >= end for start, end in ranges):
        need = f"ascending from 0, below {whole.type.elements}"
        yield Violation(place, "offsets", need, list(link.offsets), f"in elements of {whole.name}, {whole.type}")
        return
    for part, (start, end) in zip(parts, ranges, strict=True):
        if part.type.dtype != whole.type.dtype:
            yield Violation(place, f"element type of {part.name}", whole.type.dtype, part.type.dtype)
        small, large = sorted((end - start, part.type.elements))
        if large % small:
            yield Violation(
                place, f"coverage of {whole.name} by {part.name}",
                f"objects that fill elements {start}..{end - 1} exactly", f"objects of {part.type.elements} elements",
                "the parts must tile the whole object",
            )  # fmt: skip

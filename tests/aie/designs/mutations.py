# SPDX-License-Identifier: Apache-2.0
"""Possible mistakes of a design, planted in its plan one at a time, and the check that notices each.

A mistake is planted at every possible place of a plan: on one fifo of each name (a_0 represents a_1, a_2, ...) and in
one core of each kind.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from flownpu.aie.check import check
from flownpu.aie.designs.attention import ALL_KEYS
from flownpu.aie.plan.data import (
    Acquire,
    Await,
    BarrierRelease,
    Call,
    Core,
    Dimension,
    Free,
    Loop,
    Plan,
    Release,
    SetBarrier,
    Statement,
    Step,
    Transfer,
    WriteParameter,
)
from tests.aie.emulation import Case, emulator
from tests.aie.small_programs import indices, with_array, with_fifo, with_steps

Mutants = Iterator[tuple[str, Plan]]

_TWO = 0x40000000  # 2.0 as the bits of an f32
_FLAG = 5  # the word of attention's run-time parameters that says whether it is causal


def caught(cases: Iterable[Case], mutant: Plan) -> str:
    """The first to notice a mutant: "checker", "emulator" (deadlocks, bad accesses, leftovers), "numbers"; or ""."""
    if check(mutant):
        return "checker"
    for case in cases:
        array = emulator(mutant.array)
        try:
            dataclasses.replace(case, plan=mutant).check(array)
        except RuntimeError:
            return "emulator"
        except AssertionError:
            return "numbers"
        if array.leftovers():
            return "emulator"
    return ""


# --- In the sequence ------------------------------------------------------------------------------------------------


def _transfers(plan: Plan) -> Iterator[tuple[int, Transfer]]:
    """The first and the last transfer of one fifo of each name, with their places in the sequence."""
    of_fifo: dict[str, list[tuple[int, Transfer]]] = {}
    for place, step in enumerate(plan.sequence.steps):
        if isinstance(step, Transfer):
            of_fifo.setdefault(step.fifo, []).append((place, step))
    for name in _one_of_each(of_fifo):
        yield from dict(of_fifo[name][:1] + of_fifo[name][-1:]).items()


def _one_of_each(names: Iterable[str]) -> list[str]:
    """The first of the names that differ in digits only."""
    return list({re.sub(r"\d+", "", name): name for name in reversed(list(names))}.values())


def _with_step(plan: Plan, place: int, *steps: Step) -> Plan:
    return with_steps(plan, *plan.sequence.steps[:place], *steps, *plan.sequence.steps[place + 1 :])


def _granule(plan: Plan, buffer: str) -> int:
    """Elements in a word of 32 bits, 1 at least."""
    kind = next(record.type for record in plan.sequence.buffers if record.name == buffer)
    return max(1, 4 // kind.item_bytes)


def offsets_of_transfers(plan: Plan) -> Mutants:
    """A transfer begins a word late."""
    for place, step in _transfers(plan):
        tap = dataclasses.replace(step.tap, offset=step.tap.offset + _granule(plan, step.buffer))
        yield f"{step.name}: offset {tap.offset}", _with_step(plan, place, dataclasses.replace(step, tap=tap))


def _wrong_strides(walk: tuple[Dimension, ...], granule: int) -> Iterator[tuple[str, tuple[Dimension, ...]]]:
    for number, dimension in enumerate(walk):
        if dimension.size > 1 and number < len(walk) - 1:
            for stride in (dimension.stride - granule, dimension.stride + granule):
                changed = dataclasses.replace(dimension, stride=stride)
                yield f"stride {number} {stride}", (*walk[:number], changed, *walk[number + 1 :])


def strides_of_transfers(plan: Plan) -> Mutants:
    """A stride of a transfer is a word more or less."""
    for place, step in _transfers(plan):
        for text, walk in _wrong_strides(step.tap.walk, _granule(plan, step.buffer)):
            tap = dataclasses.replace(step.tap, walk=walk)
            yield f"{step.name}: {text}", _with_step(plan, place, dataclasses.replace(step, tap=tap))


def swapped_dimensions_of_transfers(plan: Plan) -> Mutants:
    """Two dimensions of a transfer are in the other order."""
    for place, step in _transfers(plan):
        walk = step.tap.walk
        for number in range(len(walk) - 2):  # the innermost runs over words
            if 1 not in {walk[number].size, walk[number + 1].size} and walk[number] != walk[number + 1]:
                swapped = (*walk[:number], walk[number + 1], walk[number], *walk[number + 2 :])
                tap = dataclasses.replace(step.tap, walk=swapped)
                yield (
                    f"{step.name}: {number}, {number + 1}",
                    _with_step(plan, place, dataclasses.replace(step, tap=tap)),
                )


def shorter_transfers(plan: Plan) -> Mutants:
    """A dimension of a transfer is shortened by one."""
    for place, step in _transfers(plan):
        for number, dimension in enumerate(step.tap.walk[:-1]):
            if dimension.size > 1:
                less = dataclasses.replace(dimension, size=dimension.size - 1)
                tap = dataclasses.replace(step.tap, walk=(*step.tap.walk[:number], less, *step.tap.walk[number + 1 :]))
                yield f"{step.name}: {number}", _with_step(plan, place, dataclasses.replace(step, tap=tap))


def missing_transfers(plan: Plan) -> Mutants:
    """A transfer is left out."""
    for _, left_out in _transfers(plan):
        steps = [
            step
            for step in plan.sequence.steps
            if left_out.name not in {getattr(step, "name", ""), getattr(step, "transfer", "")}
        ]
        yield left_out.name, with_steps(plan, *steps)


def swapped_transfers(plan: Plan) -> Mutants:
    """Two consecutive transfers of a fifo are swapped: the first ones that differ."""
    of_fifo: dict[str, list[tuple[int, Transfer]]] = {}
    for place, step in enumerate(plan.sequence.steps):
        if isinstance(step, Transfer):
            of_fifo.setdefault(step.fifo, []).append((place, step))
    for name in _one_of_each(of_fifo):
        for (place, first), (next_place, second) in pairwise(of_fifo[name]):
            if (first.buffer, first.tap) != (second.buffer, second.tap):
                steps = list(plan.sequence.steps)
                steps[place] = dataclasses.replace(first, buffer=second.buffer, tap=second.tap)
                steps[next_place] = dataclasses.replace(second, buffer=first.buffer, tap=first.tap)
                yield f"{first.name}, {second.name}", with_steps(plan, *steps)
                break


def ends_that_do_not_wait(plan: Plan) -> Mutants:
    """A drain's descriptor is freed instead of awaited."""
    # A fill that is awaited after the drains of its data has ended by then, so freeing it instead is no mistake.
    fills = {fifo.name for fifo in plan.array.fifos if fifo.producer.tile.row == 0}
    drains = {step.name for _, step in _transfers(plan) if step.token and step.fifo not in fills}
    for place, step in enumerate(plan.sequence.steps):
        if isinstance(step, Await) and step.transfer in drains:
            yield step.transfer, _with_step(plan, place, Free(step.transfer))


def wrong_parameters(plan: Plan) -> Mutants:
    """A run-time parameter grows by one; attention's flag is inverted, a window of all keys becomes 1, a float 2.0."""
    written = {
        (step.buffer, step.index): (place, step)
        for place, step in reversed(list(enumerate(plan.sequence.steps)))
        if isinstance(step, WriteParameter)
    }
    buffers = _one_of_each(sorted(buffer for buffer, _ in written))
    for (buffer, index), (place, step) in sorted(written.items()):
        if buffer in buffers:
            if step.value == ALL_KEYS:
                value = 1
            elif abs(step.value) >= 1 << 20:
                value = _TWO
            else:
                value = 1 - step.value if index == _FLAG else step.value + 1
            yield f"{buffer}[{index}] = {value}", _with_step(plan, place, dataclasses.replace(step, value=value))


def missing_starts(plan: Plan) -> Mutants:
    """A core is not started."""
    place = next((i for i, step in enumerate(plan.sequence.steps) if isinstance(step, SetBarrier)), None)
    if place is not None:
        yield plan.sequence.steps[place].barrier, _with_step(plan, place)


# --- In the array ---------------------------------------------------------------------------------------------------


def strides_in_tiles(plan: Plan) -> Mutants:
    """A stride of a tile's DMA is a word more or less."""
    for name in _one_of_each(fifo.name for fifo in plan.array.fifos):
        fifo = next(fifo for fifo in plan.array.fifos if fifo.name == name)
        granule = max(1, 4 // fifo.type.item_bytes)
        for text, walk in _wrong_strides(fifo.producer.walk, granule):
            yield f"{name} out: {text}", with_fifo(plan, name, producer=dataclasses.replace(fifo.producer, walk=walk))
        for text, walk in _wrong_strides(fifo.consumers[0].walk, granule):
            consumers = (dataclasses.replace(fifo.consumers[0], walk=walk), *fifo.consumers[1:])
            yield f"{name} in: {text}", with_fifo(plan, name, consumers=consumers)


def _is_linear(walk: tuple[Dimension, ...]) -> bool:
    steps = indices(walk)
    return bool((steps == range(len(steps))).all()) if walk else True


def missing_walks(plan: Plan) -> Mutants:
    """A tile's DMA goes through its memory from end to end."""
    for name in _one_of_each(fifo.name for fifo in plan.array.fifos):
        fifo = next(fifo for fifo in plan.array.fifos if fifo.name == name)
        if not _is_linear(fifo.producer.walk):
            yield f"{name} out", with_fifo(plan, name, producer=dataclasses.replace(fifo.producer, walk=()))
        if not _is_linear(fifo.consumers[0].walk):
            consumers = (dataclasses.replace(fifo.consumers[0], walk=()), *fifo.consumers[1:])
            yield f"{name} in", with_fifo(plan, name, consumers=consumers)


def swapped_parts(plan: Plan) -> Mutants:
    """Two parts of a split or a join are in the other order."""
    for place, link in enumerate(plan.array.links):
        many = "outputs" if link.kind == "split" else "inputs"
        names = getattr(link, many)
        if link.kind != "forward" and names[0] in _one_of_each(
            name for other in plan.array.links for name in (*other.inputs, *other.outputs)
        ):
            changed = dataclasses.replace(link, **{many: (names[1], names[0], *names[2:])})
            links = (*plan.array.links[:place], changed, *plan.array.links[place + 1 :])
            yield f"{names[0]}, {names[1]}", with_array(plan, links=links)


def offsets_of_parts(plan: Plan) -> Mutants:
    """A part of a split or a join begins a word late."""
    fifos = {fifo.name: fifo for fifo in plan.array.fifos}
    for place, link in enumerate(plan.array.links):
        if link.kind != "forward" and place in {0, len(plan.array.links) - 1}:
            granule = max(1, 4 // fifos[link.inputs[0]].type.item_bytes)
            offsets = (link.offsets[0], link.offsets[1] + granule, *link.offsets[2:])
            links = (
                *plan.array.links[:place],
                dataclasses.replace(link, offsets=offsets),
                *plan.array.links[place + 1 :],
            )
            yield f"{link.inputs[0]}: {offsets}", with_array(plan, links=links)


def _cores(plan: Plan) -> Iterator[tuple[int, Core]]:
    """One core of each kind, and its place; programs of one kind differ only in names that have digits."""
    kinds = {}
    for place, core in enumerate(plan.array.cores):
        kinds.setdefault(re.sub(r"'\w*\d\w*'", "", str(core.body)), (place, core))
    yield from kinds.values()


def _variants(
    body: tuple[Statement, ...], edit: Callable[[Statement], Iterator[tuple[str, tuple[Statement, ...]]]]
) -> Iterator[tuple[str, tuple[Statement, ...]]]:
    """The bodies with one statement replaced, statements in loops included."""
    for place, statement in enumerate(body):
        replacements = list(edit(statement))
        if isinstance(statement, Loop):
            replacements += [
                (text, (dataclasses.replace(statement, body=inner),)) for text, inner in _variants(statement.body, edit)
            ]
        for text, replacement in replacements:
            yield text, (*body[:place], *replacement, *body[place + 1 :])


def _edited(plan: Plan, edit: Callable[[Statement], Iterator[tuple[str, tuple[Statement, ...]]]]) -> Mutants:
    """Edits the first and the last of equal statements of a core, as a loop has that is written out."""
    for place, core in _cores(plan):
        bodies: dict[str, list[tuple[Statement, ...]]] = {}
        for text, body in _variants(core.body, edit):
            bodies.setdefault(text, []).append(body)
        for text, edited in bodies.items():
            for body in edited[:1] + edited[1:][-1:]:
                cores = (
                    *plan.array.cores[:place],
                    dataclasses.replace(core, body=body),
                    *plan.array.cores[place + 1 :],
                )
                yield f"core {core.tile}: {text}", with_array(plan, cores=cores)


def missing_releases(plan: Plan) -> Mutants:
    """A core keeps an object."""

    def edit(statement: Statement) -> Iterator[tuple[str, tuple[Statement, ...]]]:
        if isinstance(statement, Release):
            yield f"{statement.fifo}", ()

    return _edited(plan, edit)


def missing_releases_of_barriers(plan: Plan) -> Mutants:
    """A core does not release its barrier."""

    def edit(statement: Statement) -> Iterator[tuple[str, tuple[Statement, ...]]]:
        if isinstance(statement, BarrierRelease):
            yield statement.barrier, ()

    return _edited(plan, edit)


def early_releases(plan: Plan) -> Mutants:
    """A core releases an object before it uses it."""

    def edit(statement: Statement) -> Iterator[tuple[str, tuple[Statement, ...]]]:
        if isinstance(statement, Acquire):
            yield statement.fifo, (statement, Release(statement.fifo, statement.port, statement.count))

    return _edited(plan, edit)


def missing_calls(plan: Plan) -> Mutants:
    """A kernel is not called."""

    def edit(statement: Statement) -> Iterator[tuple[str, tuple[Statement, ...]]]:
        if isinstance(statement, Call):
            yield statement.kernel, ()

    return _edited(plan, edit)


def wrong_sizes(plan: Plan) -> Mutants:
    """A kernel gets half of a size."""

    def edit(statement: Statement) -> Iterator[tuple[str, tuple[Statement, ...]]]:
        if isinstance(statement, Call):
            for place, argument in enumerate(statement.arguments):
                if isinstance(argument, int) and argument > 1:
                    arguments = (*statement.arguments[:place], argument // 2, *statement.arguments[place + 1 :])
                    yield f"{statement.kernel} {place}", (dataclasses.replace(statement, arguments=arguments),)

    return _edited(plan, edit)


MUTATIONS: tuple[Callable[[Plan], Mutants], ...] = (
    offsets_of_transfers,
    strides_of_transfers,
    swapped_dimensions_of_transfers,
    shorter_transfers,
    missing_transfers,
    swapped_transfers,
    ends_that_do_not_wait,
    wrong_parameters,
    missing_starts,
    strides_in_tiles,
    missing_walks,
    swapped_parts,
    offsets_of_parts,
    missing_releases,
    missing_releases_of_barriers,
    early_releases,
    missing_calls,
    wrong_sizes,
)

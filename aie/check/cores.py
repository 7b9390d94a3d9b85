# SPDX-License-Identifier: Apache-2.0
"""Checks core programs: what they acquire, use and release, and what they give to kernels.

A loop's body is followed until the core holds as many objects after a pass as before it. A loop of unknown length must
reach this within a few passes. Otherwise the core would hold more (or fewer) objects with every pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from flownpu.aie.check.structure import describe
from flownpu.aie.check.violation import Violation
from flownpu.aie.plan.data import (
    Acquire,
    BarrierRelease,
    BarrierWait,
    BufferArgument,
    Call,
    Element,
    Load,
    Loop,
    Release,
    Statement,
    Store,
    statements,
)
from flownpu.aie.plan.kernel_memory import core_needs

if TYPE_CHECKING:
    from collections.abc import Iterator

    _End: TypeAlias = tuple[str, str]  # a fifo and a port
    _State: TypeAlias = tuple[
        frozenset[tuple[_End, int]], frozenset[_End], frozenset[tuple[str, tuple[_End, int, int]]]
    ]

    from flownpu.aie.plan.data import Array, Core, Fifo, Kernel, Link, Plan, TileBuffer
    from flownpu.aie.plan.limits import Limits

_WORD_BYTES = 4
_MANY = 3  # passes after which a loop of unknown length must hold as many objects as before


def _passes(loop: Loop) -> int | None:
    if isinstance(loop.start, int) and isinstance(loop.stop, int) and isinstance(loop.step, int):
        return len(range(loop.start, loop.stop, loop.step))
    return None


def check_cores(plan: Plan, limits: Limits) -> list[Violation]:
    """Follow every core's program."""
    return list(_of_array(plan.array, limits))


@lru_cache(maxsize=32)  # programs of one array differ in their sequences only
def _of_array(array: Array, limits: Limits) -> tuple[Violation, ...]:
    around = _around(array.fifos, array.links, array.buffers, array.kernels)
    followed = (violation for core in array.cores for violation in _violations(core, around, limits))
    return (*followed, *(violation for core in array.cores for violation in _kernel_memory(array, core, limits)))


def _kernel_memory(array: Array, core: Core, limits: Limits) -> Iterator[Violation]:
    """A core's stack against the largest that its kernels need, and its program memory against the lower estimate."""
    needs = core_needs(array, core)
    place = describe(core.tile, limits)
    stack, source = max(((need.stack, source) for source, need in needs.items()), default=(0, ""))
    if stack > core.stack_bytes:
        detail = f"kernels of {source}, by kernels/memory.toml: ask for Worker(stack_size={stack})"
        yield Violation(place, "stack", f"{stack} bytes", f"{core.stack_bytes} bytes", detail)
    program = sum(need.program[0] for need in needs.values())
    if program > limits.program_bytes:
        parts = " + ".join(f"{source} {need.program[0]}" for source, need in needs.items())
        detail = f"at least, {parts}: let two tiles share the kernels"
        yield Violation(place, "program memory", f"{program} bytes", f"{limits.program_bytes} bytes", detail)


class _Surroundings:
    """The parts of an array besides its cores, by name."""

    def __init__(
        self,
        fifos: tuple[Fifo, ...],
        links: tuple[Link, ...],
        buffers: tuple[TileBuffer, ...],
        kernels: tuple[Kernel, ...],
    ) -> None:
        self.fifos = {fifo.name: fifo for fifo in fifos}
        self.linked = {(name, "consume") for link in links for name in link.inputs}
        self.linked |= {(name, "produce") for link in links for name in link.outputs}
        self.buffers = {buffer.name: buffer for buffer in buffers}
        self.kernels = {kernel.entry: kernel for kernel in kernels}


# Arrays that differ only in their cores share this object, so a core that several of them have is followed once.
_around = lru_cache(maxsize=16)(_Surroundings)


@lru_cache(maxsize=512)
def _violations(core: Core, around: _Surroundings, limits: Limits) -> tuple[Violation, ...]:
    return tuple(_CoreCheck(core, around, limits).run())


class _CoreCheck:
    """One core's program, followed once from its start."""

    def __init__(self, core: Core, around: _Surroundings, limits: Limits) -> None:
        self.core, self.limits = core, limits
        self.place = describe(core.tile, limits)
        self.fifos, self.buffers, self.kernels = around.fifos, around.buffers, around.kernels
        self.linked = around.linked
        self.held: Counter[tuple[str, str]] = Counter()
        self.stale: set[tuple[str, str]] = set()  # ends with a release since their last acquire
        # view: end, first object (0: the oldest that is held), count
        self.views: dict[str, tuple[tuple[str, str], int, int]] = {}
        self.followed: dict[tuple[int, _State], _State] = {}  # a loop, by its id, and the state before it: that after
        self.found: dict[Violation, None] = {}  # each one once, though loops are followed several times

    def run(self) -> list[Violation]:
        """All violations."""
        self._repeat(self.core.body, None)
        used: defaultdict[tuple[str, str], set[type]] = defaultdict(set)
        for statement in self.core.statements:
            if isinstance(statement, (Acquire, Release)):
                used[statement.fifo, statement.port].add(type(statement))
        for name, fifo in self.fifos.items():
            mine = [("produce", fifo.producer)] + [("consume", end) for end in fifo.consumers]
            for port, end in mine:
                if end.tile == self.core.tile and (name, port) not in self.linked:
                    for verb, kind in (("acquires", Acquire), ("releases", Release)):
                        if kind not in used[name, port]:
                            self._add(f"a statement that {verb} fifo {name} ({port})", 1, 0)
        return list(self.found)

    def _add(self, resource: str, need: object, have: object, detail: str = "") -> None:
        self.found[Violation(self.place, resource, need, have, detail)] = None

    def _repeat(self, body: tuple[Statement, ...], passes: int | None) -> None:
        """Follow a loop's body until another pass changes nothing; `passes`: how many there are, if that is known."""
        for number in range(_MANY if passes is None else passes):
            before = +self.held
            self._follow(body)
            if number and before == +self.held:
                return
        if passes is None:
            for end in sorted(set(self.held) | set(before)):
                if before[end] != self.held[end]:
                    resource = f"objects of fifo {end[0]} ({end[1]}) held after a pass of a loop"
                    self._add(resource, before[end], self.held[end], "every pass must release what it acquires")

    def _follow(self, body: tuple[Statement, ...]) -> None:
        for statement in body:
            match statement:
                case Loop():
                    self._loop(statement)
                case Acquire():
                    self._acquire(statement)
                case Release():
                    self._release(statement)
                case Call():
                    self._call(statement)
                case Load() | Store():
                    self._word(statement)
                case BarrierWait() | BarrierRelease():
                    if not 0 <= statement.value <= self.limits.lock_maximum:
                        self._add(f"value of {statement.barrier}", statement.value, f"0..{self.limits.lock_maximum}")

    def _state(self) -> _State:
        return frozenset((+self.held).items()), frozenset(self.stale), frozenset(self.views.items())

    def _loop(self, loop: Loop) -> None:
        """Follow a loop, once for each state of the core before it."""
        before = id(loop), self._state()
        if before not in self.followed:
            self._lowering(loop)
            self._repeat(loop.body, _passes(loop))
            self.followed[before] = self._state()
        held, stale, views = self.followed[before]
        self.held, self.stale, self.views = Counter(dict(held)), set(stale), dict(views)

    def _lowering(self, loop: Loop) -> None:
        """A loop of unknown length with acquires must not be unrolled: aie-opt then ends with a segmentation fault."""
        moves = any(isinstance(statement, (Acquire, Release)) for statement in statements(loop.body))
        if moves and _passes(loop) is None and not self.core.dynamic:
            detail = "the loop's length is a run-time parameter: Worker(dynamic_objfifo_lowering=True)"
            self._add("lowering of acquires in a loop", "dynamic", "static", detail)

    def _depth(self, statement: Acquire | Release) -> int | None:
        fifo = self.fifos.get(statement.fifo)
        ends = () if fifo is None else (fifo.producer,) if statement.port == "produce" else fifo.consumers
        depth = next((end.depth for end in ends if end.tile == self.core.tile), None)
        if depth is None:
            self._add(f"a {statement.port} end of fifo {statement.fifo} on this tile", 1, 0)
        return depth

    def _acquire(self, statement: Acquire) -> None:
        depth, end = self._depth(statement), (statement.fifo, statement.port)
        if depth is None:
            return
        name = f"fifo {statement.fifo} ({statement.port})"
        # After a release, the remaining objects may be acquired again; the view counts from the oldest of them.
        if statement.count <= self.held[end] and end not in self.stale:
            detail = "acquire counts what is held already: it gets no new object without a release before it"
            self._add(f"objects of {name} to acquire", f"more than the {self.held[end]} held", statement.count, detail)
        self.held[end] = max(self.held[end], statement.count)
        self.stale.discard(end)
        self.views[statement.name] = (end, 0, statement.count)

    def _release(self, statement: Release) -> None:
        end = (statement.fifo, statement.port)
        if self._depth(statement) is None:
            return
        if statement.count > self.held[end]:
            name = f"objects of fifo {statement.fifo} ({statement.port}) held to release"
            self._add(name, statement.count, self.held[end])
        self.held[end] -= min(statement.count, self.held[end])
        self.stale.add(end)
        for view, (of, first, count) in self.views.items():
            if of == end:
                self.views[view] = end, max(first - statement.count, -count), count  # at -count all were released

    def _call(self, statement: Call) -> None:
        kernel = self.kernels.get(statement.kernel)
        if kernel is None:
            self._add(f"kernel {statement.kernel}", "one of the array's kernels", "none")
            return
        for argument in statement.arguments:
            if isinstance(argument, BufferArgument) and argument.buffer not in self.buffers:
                self._add(f"buffer {argument.buffer} for {kernel.entry}", "one of the array's buffers", "none")
            elif isinstance(argument, Element):
                self._object(argument, kernel.entry)

    def _object(self, argument: Element, entry: str) -> None:
        if argument.view not in self.views:
            self._add(f"view {argument.view} for {entry}", "one acquired before", "none")
            return
        end, first, _ = self.views[argument.view]
        if not 0 <= first + argument.index < self.held[end]:
            self._add(f"object of fifo {end[0]} for {entry}", "held", "released before the call")
        elif self.core.dynamic and first != 0:
            detail = "a dynamic lowering counts an index from the oldest that is held at the call"
            self._add(
                f"view {argument.view} of fifo {end[0]} for {entry}",
                "acquired behind the last release",
                "before it",
                detail,
            )

    def _word(self, statement: Load | Store) -> None:
        buffer = self.buffers.get(statement.buffer)
        if buffer is None:
            self._add(f"buffer {statement.buffer}", "one of the array's buffers", "none")
        elif buffer.type.item_bytes != _WORD_BYTES:
            self._add(f"element type of buffer {statement.buffer}", "32-bit integers", str(buffer.type))
        elif isinstance(statement.index, int) and not 0 <= statement.index < buffer.type.elements:
            self._add(f"index into buffer {statement.buffer}", statement.index, f"0..{buffer.type.elements - 1}")

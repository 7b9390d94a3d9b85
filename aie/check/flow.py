# SPDX-License-Identifier: Apache-2.0
"""Checks for every fifo that a call takes out as many elements as it sends in.

The sequence says how much enters and leaves the array. A core that waits on a barrier runs its program once for every
time the sequence sets it, with the run-time parameters written by then; its counts are exact. A core without a barrier
repeats until its inputs end. The number of repetitions follows from any fifo with a known count, and must suit the
other fifos.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from flownpu.aie.check.structure import describe
from flownpu.aie.check.violation import Violation
from flownpu.aie.plan.data import (
    BarrierWait,
    Load,
    Loop,
    Release,
    SetBarrier,
    Statement,
    Transfer,
    WriteParameter,
)
from flownpu.aie.plan.expressions import depends_on_index, evaluate, passes_of
from flownpu.aie.plan.resources import link_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.aie.plan.data import Array, Core, Fifo, Link, Plan, Tile
    from flownpu.aie.plan.limits import Limits

Ends: TypeAlias = "Counter[tuple[str, str]]"
_Parameters: TypeAlias = "Mapping[tuple[str, int], int]"


def objects_moved(body: tuple[Statement, ...], parameters: _Parameters, variables: dict[str, int]) -> Ends:
    """How many objects of each (fifo, port) a program releases.

    Args:
        body: the program's statements.
        parameters: run-time parameters, by (buffer, index).
        variables: values of the variables that have one before; the program's loads are added.

    Raises:
        KeyError: the program reads a run-time parameter that was not written.
    """
    moved: Ends = Counter()
    _add_moved(_that_count(body), parameters, variables, 1, moved)
    return moved


def _add_moved(
    body: tuple[Statement, ...], parameters: _Parameters, variables: dict[str, int], times: int, moved: Ends
) -> None:
    """Add to `moved` what a body releases when it runs `times` times."""
    for statement in body:
        if isinstance(statement, Release):
            moved[statement.fifo, statement.port] += statement.count * times
        elif isinstance(statement, Load):
            variables[statement.variable] = parameters[statement.buffer, evaluate(statement.index, variables)]
        elif isinstance(statement, Loop):
            passes = passes_of(statement, variables)
            (inside, alike), inner = _of_loop(statement), dict(variables)
            for index in passes[:1] if alike else passes:
                inner[statement.variable] = index
                _add_moved(inside, parameters, inner, times * (len(passes) if alike else 1), moved)


def _that_count(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """The statements of a body that determine how many objects it releases."""
    return tuple(statement for statement in body if isinstance(statement, (Release, Load, Loop)))


@cache
def _of_loop(loop: Loop) -> tuple[tuple[Statement, ...], bool]:
    """The statements that count, and whether all passes move the same amounts."""
    return _that_count(loop.body), not depends_on_index(loop)


# Plans of a design differ in their sequences, seldom in a core's pass. The cache is large enough for several arrays.
@lru_cache(maxsize=1024)
def _moved_in_a_pass(body: tuple[Statement, ...], parameters: tuple[tuple[tuple[str, int], int], ...]) -> Ends:
    """`objects_moved` of a core's program, for the parameters that it loads; not to be changed."""
    return objects_moved(body, dict(parameters), {})


class _CoreNames(NamedTuple):
    """The names in a core's program."""

    loaded: frozenset[str]  # the buffers that it loads run-time parameters from
    waits: tuple[BarrierWait, ...]
    released: tuple[tuple[str, str], ...]  # (fifo, port) of all releases; some may not run: a loop may have no pass


@lru_cache(maxsize=1024)
def _core_names(core: Core) -> _CoreNames:
    every = core.statements
    return _CoreNames(
        frozenset(statement.buffer for statement in every if isinstance(statement, Load)),
        tuple(statement for statement in every if isinstance(statement, BarrierWait)),
        tuple(dict.fromkeys((s.fifo, s.port) for s in every if isinstance(s, Release))),
    )


def check_flow(plan: Plan, limits: Limits) -> list[Violation]:
    """Count the elements that every fifo receives and gives."""
    return _Flow(plan, limits).run()


def _ends(fifo: Fifo) -> list[tuple[str, Tile, str]]:
    """A fifo's ends: the producer's, then the consumers'."""
    return [(fifo.name, fifo.producer.tile, "produce")] + [(fifo.name, e.tile, "consume") for e in fifo.consumers]


class _Flow:
    def __init__(self, plan: Plan, limits: Limits) -> None:
        self.plan, self.limits = plan, limits
        self.array: Array = plan.array
        self.fifos: dict[str, Fifo] = {fifo.name: fifo for fifo in plan.array.fifos}
        # Elements over the whole call at each end: (fifo, tile, port).
        self.known: dict[tuple[str, Tile, str], Fraction] = {}
        self.ends = {fifo.name: _ends(fifo) for fifo in plan.array.fifos}
        # By the name of a parameters' buffer or a barrier, the steps that write or set it, each with its place.
        self.starts: defaultdict[str, list[tuple[int, WriteParameter | SetBarrier]]] = defaultdict(list)
        for place, step in enumerate(plan.sequence.steps):
            if isinstance(step, (WriteParameter, SetBarrier)):
                self.starts[step.buffer if isinstance(step, WriteParameter) else step.barrier].append((place, step))
        self.idle: dict[Tile, str] = {}  # cores that no step starts
        self.found: list[Violation] = []

    def run(self) -> list[Violation]:
        self._host()
        open_cores: list[tuple[Core, Ends]] = []
        for core in self.array.cores:
            waits = _core_names(core).waits
            try:
                if waits:
                    self._take(core, self._passes(core, waits[0]))
                else:
                    open_cores.append((core, _moved_in_a_pass(core.body, tuple(self._initial(core).items()))))
            except KeyError as error:
                self._add(describe(core.tile, self.limits), "run-time parameters written before the core starts",
                          f"{error.args[0]}", "not written")  # fmt: skip
        if self.found:
            return self.found
        self._spread(open_cores)
        self._compare()
        return self.found

    def _add(self, place: str, resource: str, need: object, have: object, detail: str = "") -> None:
        self.found.append(Violation(place, resource, need, have, detail))

    def _initial(self, core: Core) -> dict[tuple[str, int], int]:
        """The run-time parameters that a core loads, as they are before the call."""
        loaded = _core_names(core).loaded
        buffers = [buffer for buffer in self.array.buffers if buffer.name in loaded]
        return {(b.name, i): int(v) for b in buffers for i, v in enumerate(b.initial_value)}

    def _host(self) -> None:
        moved: defaultdict[str, int] = defaultdict(int)
        for step in self.plan.sequence.steps:
            if isinstance(step, Transfer):
                moved[step.fifo] += step.tap.elements
        for fifo in self.array.fifos:
            for end, port in [(fifo.producer, "produce"), *((end, "consume") for end in fifo.consumers)]:
                if self.limits.kind(end.tile.column, end.tile.row) == "shim":
                    self.known[fifo.name, end.tile, port] = Fraction(moved[fifo.name])

    def _passes(self, core: Core, wait: BarrierWait) -> Ends:
        """The objects that a core moves in all the passes that the sequence starts."""
        parameters, loaded = self._initial(core), _core_names(core).loaded
        moved: Ends = Counter()
        passes = 0
        for _, step in sorted(start for name in {*loaded, wait.barrier} for start in self.starts[name]):
            if isinstance(step, WriteParameter):
                parameters[step.buffer, step.index] = step.value
            elif (step.barrier, step.value) == (wait.barrier, wait.value):
                moved.update(_moved_in_a_pass(core.body, tuple(parameters.items())))
                passes += 1
        if not passes:
            self.idle[core.tile] = f"no step sets {wait.barrier} to {wait.value}: the core never starts"
        return moved

    def _take(self, core: Core, moved: Ends, times: Fraction = Fraction(1)) -> None:
        for end in _core_names(core).released:
            name, port = end
            self.known[name, core.tile, port] = moved[end] * self.fifos[name].type.elements * times

    # --- Spreading what is known --------------------------------------------------------------------------------------

    def _spread(self, open_cores: list[tuple[Core, Ends]]) -> None:
        """Carry counts through fifos, links and cores until nothing changes."""
        before = -1
        while before != len(self.known):
            before = len(self.known)
            for fifo in self.array.fifos:
                self._through_fifo(fifo)
            for link in self.array.links:
                shares = self._shares(link)
                known = next((self.known[end] / share for end, share in shares.items() if end in self.known), None)
                if known is not None:
                    for end, share in shares.items():
                        self.known.setdefault(end, known * share)
            for core, moved in list(open_cores):
                for (name, port), objects in moved.items():
                    count = self.known.get((name, core.tile, port))
                    if objects and count is not None:
                        times = count / (objects * self.fifos[name].type.elements)
                        if times.denominator != 1:
                            self._add(describe(core.tile, self.limits), f"passes of the core for fifo {name} ({port})",
                                      "a whole number", str(float(times)))  # fmt: skip
                        self._take(core, moved, times)
                        open_cores.remove((core, moved))
                        break

    def _through_fifo(self, fifo: Fifo) -> None:
        ends = self.ends[fifo.name]
        known = next((self.known[end] for end in ends if end in self.known), None)
        if known is not None:
            for end in ends:
                self.known.setdefault(end, known)

    def _shares(self, link: Link) -> dict[tuple[str, Tile, str], Fraction]:
        """The part of the link's data that each of its ends carries."""
        tile = self.fifos[link.outputs[0]].producer.tile
        ends = [(name, tile, "consume") for name in link.inputs]
        ends += [(name, self.fifos[name].producer.tile, "produce") for name in link.outputs]
        if link.kind == "forward":
            return dict.fromkeys(ends, Fraction(1))
        whole, ranges = link_ranges(link, self.fifos)
        parts = [Fraction(stop - start, whole.type.elements) for start, stop in ranges]
        return dict(zip(ends, [Fraction(1), *parts] if link.kind == "split" else [*parts, Fraction(1)], strict=True))

    def _compare(self) -> None:
        for fifo in self.array.fifos:
            producer, *consumers = self.ends[fifo.name]
            for end in consumers:
                sent, taken = self.known.get(producer), self.known.get(end)
                if sent is None or taken is None:
                    self._add(
                        f"fifo {fifo.name}",
                        "data in a call",
                        "some",
                        "none",
                        "nothing that the sequence moves reaches it",
                    )
                elif sent != taken:
                    where = describe(end[1], self.limits)
                    detail = self.idle.get(end[1]) or self.idle.get(producer[1], "have: what its producer sends")
                    self._add(f"fifo {fifo.name}", f"elements that its consumer at {where} takes in a call",
                              int(taken), int(sent), detail)  # fmt: skip
        for link in self.array.links:
            through = [int(self.known[end] / share) for end, share in self._shares(link).items() if end in self.known]
            if len(set(through)) > 1:
                place = f"link {', '.join(link.inputs)} -> {', '.join(link.outputs)}"
                entering, leaving = through[: len(link.inputs)], through[len(link.inputs) :]
                self._add(
                    place, "elements in a call", f"{entering} in", f"{leaving} out", "as seen by each of its fifos"
                )

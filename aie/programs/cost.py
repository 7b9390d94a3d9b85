# SPDX-License-Identifier: Apache-2.0
"""The cost of a program (aie/programs/program.py), step by step: the only price of the host's work.

    program = every change of array + every dispatch + its calls' phases (cost/phases.py) + their instructions
              + the steps that the host computes + what it writes before and reads after

An array is an xclbin in a hardware context of its own, so that a step over another array than the one before changes
the array (`array_change`). Calls over one array are handed to the device together; nobody published what the second of
them costs, so each is taken to cost a dispatch. Steps of the host (array `HOST`) change no array.

What a call takes is counted from its plan at a few positions, the *knots*, and interpolated between them: what it reads
of the cache is linear in the position, except where a window begins to bound it, and those positions are knots. Beyond
all windows it grows by the same for every position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from flownpu.aie.cost.parameters import VALUES
from flownpu.aie.cost.phases import Cost, call_cost
from flownpu.aie.designs.common import ceil_div
from flownpu.aie.plan.instructions import WORD_BYTES
from flownpu.aie.programs.call import HOST

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from flownpu.aie.cost.chips import Chip
    from flownpu.aie.cost.parameters import Values
    from flownpu.aie.programs.call import ArtifactCall, HostCall
    from flownpu.aie.programs.program import Program, Step

CHANGES, DISPATCHES, INSTRUCTIONS = "changes of array", "dispatches", "instructions"
# Positions from the knot where the last window begins to bound a call to the next knot: as many as a long chunk has, so
# that rounding up to a whole chunk of keys counts little.
_SPAN = 4096


class Prices:
    """The prices of programs on a device, with these values of the parameters. Counted costs are kept."""

    def __init__(self, device: Chip, values: Values = VALUES) -> None:
        self.device, self.values = device, values
        self._counted: dict[tuple[str, str, int], Cost] = {}
        self._programs: dict[tuple[int, int], Cost] = {}
        self._kept: list[Program] = []  # keeps the programs alive, so that their ids stay valid

    def of(self, program: Program, position: int) -> Cost:
        """One run of a program from the position on, with its first array loaded already."""
        key = id(program), position
        if key not in self._programs:
            self._kept.append(program)
            self._programs[key] = self._of(program, position)
        return self._programs[key]

    def of_runs(self, runs: Sequence[tuple[Program, int]], before: Program | None = None) -> Cost:
        """Runs of programs, one after the other, after a run of `before`; None: no array is loaded yet."""
        cost, array = Cost(), _arrays(before)[-1] if before else ""
        changes = 0
        for program, position in runs:
            cost = cost + self.of(program, position)
            arrays = _arrays(program)
            if arrays:
                changes += arrays[0] != array
                array = arrays[-1]
        return cost + Cost({CHANGES: changes * self.values["array_change"]}, changes=changes)

    def of_call(self, call: ArtifactCall, position: int) -> Cost:
        """One call, interpolated between knots, or continued beyond the last one."""
        knots = _knots(call)
        if position <= knots[0] or len(knots) == 1:
            return self._at(call, knots[0])
        right = min(bisect_right(knots, position), len(knots) - 1)
        first, last = knots[right - 1], knots[right]
        share = (position - first) / (last - first)
        cost = self._at(call, first) * (1 - share) + self._at(call, last) * share
        if share <= 1:
            return cost
        # The bound of a phase may differ between the two knots, so a continued part's time could become negative.
        return replace(cost, seconds={name: max(value, 0.0) for name, value in cost.seconds.items()})

    def _at(self, call: ArtifactCall, position: int) -> Cost:
        key = call.array, call.name, position
        if key not in self._counted:
            self._counted[key] = call_cost(call.recorded(position), self.device, self.values)
        return self._counted[key]

    def of_calls(self, program: Program, position: int) -> list[tuple[Step, int, Cost]]:
        """Each call of a program once, as (its first step, how many steps it has, what one of them costs).

        Calls of later tokens of a chunk are at later positions: the cost is that at their mean position.
        """
        alike: dict[tuple[str, str, str], list[Step]] = {}
        for step in program.steps:
            alike.setdefault((step.call.array, step.call.operator, step.call.name), []).append(step)
        found = []
        for (array, *_), steps in alike.items():
            if array == HOST:
                cost = self._host(steps[0])
            else:
                cost = self.of_step(steps[0], position + sum(step.offset for step in steps) // len(steps))
            found.append((steps[0], len(steps), cost))
        return found

    def _of(self, program: Program, position: int) -> Cost:
        changes = max(len(_arrays(program)) - 1, 0)
        cost = Cost(
            {CHANGES: changes * self.values["array_change"], "host": self._ends(program)},
            changes=changes,
            dispatches=sum(steps[0].call.array != HOST for steps in program.dispatches),
        )
        for _, times, of_call in self.of_calls(program, position):
            cost = cost + of_call * times
        return cost

    def of_step(self, step: Step, position: int) -> Cost:
        """A call on the array, its dispatch, and the instructions that follow the position."""
        call, values = cast("ArtifactCall", step.call), self.values
        of_call = self.of_call(call, position)
        views = {buffer.name: view.buffer for buffer, view in zip(call.buffers, step.views, strict=True)}
        seconds = defaultdict[str, float](float)
        for name, value in of_call.seconds.items():
            seconds[f"{call.operator}: {views.get(name, name)}"] += value
        seconds[DISPATCHES] += values["dispatch"]
        if call.moves:
            seconds[INSTRUCTIONS] += of_call.words * WORD_BYTES / values["host_memory"]
        return Cost(seconds, of_call.read_bytes, of_call.written_bytes, words=of_call.words)

    def _host(self, step: Step) -> Cost:
        """A step of the host: its bytes at the rate of its memory, and again for flushing caches for the array.

        Constants are read while they are multiplied, and need no flushing.
        """
        call, values = cast("HostCall", step.call), self.values
        moved = call.reads + call.writes
        products = max(call.constants / values["host_memory"], call.multiply_adds / values["host_products"])
        seconds = moved / values["host_memory"] + moved / values["host_flush"] + products
        return Cost({f"host: {call.operator}": seconds}, host_bytes=moved + call.constants)

    def _ends(self, program: Program) -> float:
        """Seconds of the host's writes before a run, of its reads after it, and of a chunk's LM head."""
        made = program.made
        read = made.rows * made.columns if made else 0
        seconds = program.given.bytes / self.values["host_memory"] + read * self.values["own_host_per_logit"]
        if made and program.kind in ("prefill", "block"):  # rows that the host multiplies by the LM head
            seconds += read * program.attributes["vocabulary"][0] / self.values["host_products"]
        return seconds


def prompt_runs(programs: Iterable[Program], tokens: int, past: int = 0) -> Iterator[tuple[Program, int]]:
    """The runs of a prompt of `tokens` tokens, as the host chooses them (`part_at`, ops/npu/run/decoder_layers.cc).

    Each time the host takes the longest chunk that is worth its time (programs/chunks.py) for the remaining tokens
    before the last one. The last token, and tokens too few for any chunk, use the program of a token. Yields (program,
    position).
    """
    ordered = sorted(programs, key=lambda program: program.tokens)
    token = next(program for program in ordered if program.kind == "decode")
    chunks = [program for program in ordered if program.kind == "prefill"]
    done, last = 0, tokens - 1
    while done <= last:
        best = token
        for chunk in chunks:
            if last - done >= chunk.fewest and past + done + chunk.tokens <= chunk.context:
                best = chunk
        yield best, past + done
        done += 1 if best is token else min(last - done, best.tokens)


def _arrays(program: Program) -> list[str]:
    """The arrays that a program changes the device to, in order."""
    arrays = [steps[0].call.array for steps in program.dispatches if steps[0].call.array != HOST]
    return [array for before, array in zip(["", *arrays], arrays, strict=False) if array != before]


def _knots(call: ArtifactCall) -> list[int]:
    """Positions at which a call is counted. Between two of them, its price counts as linear."""
    sweeps, keys = call.positions.sweeps, call.positions.keys
    if not call.moves or not sweeps:
        return [call.last]
    edges = {0}
    for sweep in sweeps:
        if sweep.window:
            edges |= {sweep.window - sweep.tokens, sweep.window}
    bounded = ceil_div(max(edges), keys) * keys
    edges |= {bounded, bounded + ceil_div(_SPAN, keys) * keys}
    return sorted({edge for edge in edges if 0 <= edge <= call.last} | {call.last})

# SPDX-License-Identifier: Apache-2.0
"""Runs plans on the emulator with the kernels' host builds, and compares what comes out with an expectation.

    y = emulate(FusedDQP("npu2", 512).program(m, k), w=blocks, x=x)["y"]

A `Case` is a plan with its inputs and what must come out; `tests/aie/designs/cases.py` makes them for the designs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any

import numpy as np

from flownpu.aie.check import require_valid
from flownpu.aie.emulator import Emulator
from flownpu.aie.iron.compat import Program
from flownpu.aie.plan.data import DTYPES, Array, Plan
from flownpu.selftest.reference import case as known
from tests.aie.host_kernels import LIBRARIES, assert_within

ARCHITECTURES = {"npu1": "xdna", "npu2": "xdna2"}
# The byte that outputs hold before a call. An element that is not written stays NaN in bf16 and f32.
_NEVER_WRITTEN = 0xFF


def emulator(array: Array, functions: Mapping[str, Callable[..., None]] | None = None) -> Emulator:
    """An emulator of the array with its architecture's kernels; `functions`: kernels in Python, which replace these."""
    return Emulator(array, LIBRARIES / f"libflownpu_aie_{ARCHITECTURES[array.target]}.so", functions)


def plan_of(program: Program | Plan, *, checked: bool = True) -> Plan:
    """The plan of a design's program. A `PlanError` if the checker finds faults, unless `checked` is False."""
    plan = program if isinstance(program, Plan) else program.resolve_program("design")
    return require_valid(plan) if checked else plan


def call(
    array: Emulator, plan: Plan, *, seed: int = 0, settle: bool = True, last: str = "",
    shared: Mapping[str, np.ndarray] = MappingProxyType({}), **buffers: np.ndarray,
) -> dict[str, Any]:  # fmt: skip
    """Run a plan's sequence on an emulator of its array, which may have run other calls before.

    Args:
        array: the emulator.
        plan: the call.
        seed: the schedule.
        settle: as in `Emulator.run`.
        last: as in `Emulator.run`.
        shared: host buffers that are passed without a copy, so that the call changes them; they may be views of the
            same memory.
        buffers: host buffers by their names in the plan (those of the sequence function's arguments), in any shape;
            the call gets copies. Those that are not given are outputs.

    Returns:
        Every host buffer after the call, [elements] of its type; outputs hold bytes of 0xFF (NaN in floats, -1 in
        integers) where nothing was written.
    """
    unknown = {*buffers, *shared} - {record.name for record in plan.sequence.buffers}
    assert not unknown, f"the plan has no host buffers {unknown}"
    held = dict[str, Any]()
    for record in plan.sequence.buffers:
        dtype = DTYPES[record.type.dtype]
        if record.name in shared:
            held[record.name] = shared[record.name]
        elif record.name in buffers:
            held[record.name] = np.array(buffers[record.name], dtype).reshape(-1)
            given = buffers[record.name].dtype
            assert given == dtype, f"host buffer {record.name} is of {dtype}, got {given}"
        else:
            held[record.name] = np.full(record.type.bytes, _NEVER_WRITTEN, np.uint8).view(dtype)
    array.run(plan.sequence, held.values(), seed=seed, settle=settle, last=last)
    return held


def assert_nothing_left(array: Emulator) -> None:
    """Assert that the calls so far left no data under way and no core in the middle of a pass."""
    left = array.leftovers()
    assert left == [], "\n".join(left)


def emulate(
    program: Program | Plan,
    *,
    seed: int = 0,
    functions: Mapping[str, Callable[..., None]] | None = None,
    checked: bool = True,
    **buffers: np.ndarray,
) -> dict[str, Any]:
    """Run one call on a fresh array; see `call`. Nothing may be left in the array afterwards."""
    plan = plan_of(program, checked=checked)
    array = emulator(plan.array, functions)
    found = call(array, plan, seed=seed, **buffers)
    assert_nothing_left(array)
    return found


@dataclass
class Case:
    """A call, its inputs, and what must come out.

    Attributes:
        plan: the call.
        inputs: host buffers by name.
        output: the name of the output.
        expected: float64, in any shape.
        tolerance: absolute, for each element or for all; the case's maker derives it from the arithmetic.
        select: picks what is compared from the output buffer, [elements]; by default all of it.
    """

    plan: Plan
    inputs: dict[str, np.ndarray]
    output: str
    expected: np.ndarray
    tolerance: np.ndarray | float
    select: Callable[[np.ndarray], np.ndarray] | None = None

    def check(self, array: Emulator | None = None, *, seed: int = 0, settle: bool = True) -> np.ndarray:
        """Run, compare, and return the output buffer; `array`: an emulator that ran other calls before."""
        own = array is None
        array = emulator(self.plan.array) if array is None else array
        output = call(array, self.plan, seed=seed, settle=settle, **self.inputs)[self.output]
        assert_within(
            np.asarray(self.select(output) if self.select else output.reshape(self.expected.shape)),
            self.expected,
            self.tolerance,
        )
        if own:
            assert_nothing_left(array)
        return np.asarray(output)

    def fuzz(self, seeds: Iterable[int] = range(1, 101)) -> None:
        """Assert that every schedule gives the bytes of schedule 0, each on the array as the call before left it."""
        array = emulator(self.plan.array)
        self.check(array)
        first = call(array, self.plan, **self.inputs)
        for seed in seeds:
            found = call(array, self.plan, seed=seed, **self.inputs)
            differing = [name for name in first if found[name].tobytes() != first[name].tobytes()]
            assert not differing, f"schedule {seed} gives other {', '.join(differing)} than schedule 0"
        assert_nothing_left(array)


def emulated(make: Callable[..., known.Case]) -> Callable[..., Case]:
    """Decorate a function that makes the package's cases: it then makes cases for the emulator, with checked plans."""

    @wraps(make)
    def case(*arguments: Any, **options: Any) -> Case:
        found = make(*arguments, **options)
        return Case(plan_of(found.program()), found.inputs, found.output, found.expected, found.tolerance, found.select)

    return case

# SPDX-License-Identifier: Apache-2.0
"""A stage of the self-test: a program, its inputs, and its expected results."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flownpu.aie.plan.data import DTYPES
from flownpu.aie.programs.alone import program_of
from flownpu.aie.programs.call import fixed_call
from flownpu.selftest.reference.case import Deviation, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flownpu.aie.programs.call import ArtifactCall
    from flownpu.aie.programs.program import Program
    from flownpu.selftest.reference.case import Case

    Rng = np.random.Generator


@dataclass(frozen=True)
class Check:
    """A comparison with an expected result.

    Attributes:
        name: the name of the compared output, for people.
        select: picks it from the run's results: bytes by buffer, and under worker.RESULT the f32 that the host reads.
        expected: float64.
        tolerance: absolute tolerance of each element.
    """

    name: str
    select: Callable[[Mapping[str, np.ndarray]], np.ndarray]
    expected: np.ndarray
    tolerance: np.ndarray | float

    def compare(self, found: Mapping[str, np.ndarray]) -> Deviation:
        """How far the results are off."""
        return compare(self.select(found), self.expected, self.tolerance)


@dataclass(frozen=True)
class Trial:
    """The program that a stage runs, and the comparisons of its results.

    Attributes:
        program: the program that is run; its kind is the stage's name.
        inputs: initial contents of its buffers, by name.
        outputs: buffers that are read afterwards.
        checks: the comparisons.
        position: position of the first token.
        rows: activations that the host writes before each run, f32; None: none.
    """

    program: Program
    inputs: Mapping[str, np.ndarray]
    outputs: tuple[str, ...]
    checks: tuple[Check, ...]
    position: int = 0
    rows: np.ndarray | None = None


@dataclass(frozen=True)
class Stage:
    """A stage of the self-test.

    Attributes:
        name: name of the stage and of its program.
        group: stages of one group follow one another, and are built into one folder: they share arrays.
        make: makes its trial from random numbers.
        work: the amount of work in a run, in units of its own: bytes, calls, operations; see measures.py.
        seconds: time limit of all its runs together.
    """

    name: str
    group: str
    make: Callable[[Rng], Trial]
    work: float = 0
    seconds: float = 60


def call_of_case(case: Case, array: str, name: str) -> ArtifactCall:
    """A case's call, which is the same at all positions; `name` is the stage's."""
    return fixed_call(array, array, re.sub(r"\W+", "-", name), case.program)


def trial_of_cases(cases: Sequence[Case], name: str, array: str, *, has_result: bool = False) -> Trial:
    """A trial of one call.

    Args:
        cases: cases of this call, at least one; each compares one output.
        name: name of the stage.
        array: name of its array.
        has_result: whether the host reads the first case's output as it reads a model's logits.
    """
    first = cases[0]
    call = call_of_case(first, array, name)
    inputs = inputs_of_case(first, call)
    program = program_of([call], kind=name, constants=inputs, made=first.output if has_result else "")
    outputs = tuple(f"{call.name} {case.output}" for case in cases)
    return Trial(program, inputs, outputs, tuple(check_of_case(case, call) for case in cases))


def inputs_of_case(case: Case, call: ArtifactCall) -> dict[str, np.ndarray]:
    """A case's inputs, by the names that `program_of` gives the buffers."""
    return {f"{call.name} {buffer}": content for buffer, content in case.inputs.items()}


def check_of_case(case: Case, call: ArtifactCall) -> Check:
    """The comparison of a case's output."""
    (record,) = (buffer for buffer in call.buffers if buffer.name == case.output)
    select = partial(_select, f"{call.name} {case.output}", DTYPES[record.type.dtype], case)
    return Check(case.output, select, case.expected, case.tolerance)


def _select(buffer: str, dtype: np.dtype, case: Case, found: Mapping[str, np.ndarray]) -> np.ndarray:
    content = found[buffer].view(dtype)
    return np.asarray(case.select(content) if case.select else content.reshape(case.expected.shape))

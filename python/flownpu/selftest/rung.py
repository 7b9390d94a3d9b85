# SPDX-License-Identifier: Apache-2.0
"""A rung of the ladder: a program, what it is given, and what must come out."""

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

__all__ = ["Check", "Rung", "Trial", "call_of_case", "check_of_case", "given_of_case", "trial_of_cases"]


@dataclass(frozen=True)
class Check:
    """What must come out.

    Attributes:
        what: is compared, for people.
        select: picks it from all that was found: bytes by buffer, and worker.MADE in f32.
        expected: float64.
        tolerance: of each element.
    """

    what: str
    select: Callable[[Mapping[str, np.ndarray]], np.ndarray]
    expected: np.ndarray
    tolerance: np.ndarray | float

    def compare(self, found: Mapping[str, np.ndarray]) -> Deviation:
        """How far it is off."""
        return compare(self.select(found), self.expected, self.tolerance)


@dataclass(frozen=True)
class Trial:
    """A run.

    Attributes:
        program: is run; its kind is the rung's name.
        given: what its buffers begin with, by name.
        wanted: buffers that are looked at afterwards.
        checks: what must come out.
        position: of the first token.
        rows: that the host writes before a run, f32; None: none.
    """

    program: Program
    given: Mapping[str, np.ndarray]
    wanted: tuple[str, ...]
    checks: tuple[Check, ...]
    position: int = 0
    rows: np.ndarray | None = None


@dataclass(frozen=True)
class Rung:
    """A rung.

    Attributes:
        name: of it, and of its program.
        group: rungs of one group follow one another, and are built into one folder: they share arrays.
        make: makes its trial.
        work: how much of what its measurement counts, see measures.py.
        seconds: that its runs may take, all together.
    """

    name: str
    group: str
    make: Callable[[Rng], Trial]
    work: float = 0
    seconds: float = 60


def call_of_case(case: Case, array: str, name: str) -> ArtifactCall:
    """The call of a case, as one that is the same at all positions; `name`: of the rung."""
    return fixed_call(array, array, re.sub(r"\W+", "-", name), case.program)


def trial_of_cases(cases: Sequence[Case], name: str, array: str, *, made: bool = False) -> Trial:
    """A program of one call.

    Args:
        cases: of that call, which compare one output each; there is at least one.
        name: of the rung.
        array: name of its array.
        made: the host reads the first case's output as it reads a model's.
    """
    first = cases[0]
    call = call_of_case(first, array, name)
    given = given_of_case(first, call)
    program = program_of([call], kind=name, constants=given, made=first.output if made else "")
    wanted = tuple(f"{call.name} {case.output}" for case in cases)
    return Trial(program, given, wanted, tuple(check_of_case(case, call) for case in cases))


def given_of_case(case: Case, call: ArtifactCall) -> dict[str, np.ndarray]:
    """A case's inputs, as the buffers of `program_of`."""
    return {f"{call.name} {buffer}": content for buffer, content in case.inputs.items()}


def check_of_case(case: Case, call: ArtifactCall) -> Check:
    """The comparison of a case's output."""
    (record,) = (buffer for buffer in call.buffers if buffer.name == case.output)
    select = partial(_select, f"{call.name} {case.output}", DTYPES[record.type.dtype], case)
    return Check(case.output, select, case.expected, case.tolerance)


def _select(buffer: str, dtype: np.dtype, case: Case, found: Mapping[str, np.ndarray]) -> np.ndarray:
    content = found[buffer].view(dtype)
    return np.asarray(case.select(content) if case.select else content.reshape(case.expected.shape))

# SPDX-License-Identifier: Apache-2.0
"""The call of a program's step: a design's array, at any position, or an operator of the host's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flownpu.aie.check import PlanError, require_valid
from flownpu.aie.check.sequence import check_sequence
from flownpu.aie.designs.common import limits_of
from flownpu.aie.plan.limits import LIMITS
from flownpu.aie.programs.call_family import Positions, constant, derive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

    from flownpu.aie.iron.compat import Program as DesignProgram
    from flownpu.aie.plan.data import HostBuffer, Plan, Sequence
    from flownpu.aie.programs.call_family import CallFamily, CallSweep

HOST = "host"  # in place of an array's name


@dataclass(frozen=True)
class ArtifactCall:
    """A call of an array that the host makes, at any position.

    Attributes:
        operator: stem of the design.
        array: name of the array, the same for all calls that share one.
        name: the call's name among the array's calls.
        positions: the positions that its first token may have.
        program: gives the design's program at a position.
        moves: whether the program depends on the position.
    """

    operator: str
    array: str
    name: str
    positions: Positions
    program: Callable[[int], DesignProgram]
    moves: bool

    def plan(self, position: int) -> Plan:
        """The plan at a position, checked.

        Raises:
            PlanError: it breaks the hardware's limits.
        """
        return self.last_plan if position == self.last else require_valid(self.recorded(position))

    @cached_property
    def last_plan(self) -> Plan:
        """The plan at its last position, where it has most to do, checked.

        Raises:
            PlanError: it breaks the hardware's limits.
        """
        return require_valid(self._record(self.last))

    @property
    def buffers(self) -> tuple[HostBuffer, ...]:
        """The call's host buffers, in the order of its arguments; the same at all positions."""
        return self.last_plan.sequence.buffers

    def sequence(self, position: int) -> Sequence:
        """The sequence of the plan at a position; of the plan, only the sequence is checked.

        Raises:
            PlanError: it breaks the hardware's limits.
        """
        plan = self.recorded(position)
        if found := check_sequence(plan, LIMITS[plan.array.target]):
            raise PlanError(plan.name, found)
        return plan.sequence

    def recorded(self, position: int) -> Plan:
        """The plan at a position, unchecked except at the last one; it shares that plan's array if they are equal."""
        if position == self.last:
            return self.last_plan
        plan = self._record(position)
        return replace(plan, array=self.last_plan.array) if plan.array == self.last_plan.array else plan

    def _record(self, position: int) -> Plan:
        return self.program(position).resolve_program(f"{self.array}.{self.name}")

    def family(self, words: Callable[[int], NDArray[np.int64]], **options: Any) -> CallFamily:
        """The call's family, derived from its words at some positions; options: see `derive`."""
        if not self.moves:
            return constant(words(self.last), self.positions.count)
        return derive(words, self.positions, **options)

    @property
    def family_file(self) -> str:
        """Path of the family's file in the folder of artifacts."""
        return f"calls/{self.array}/{self.name}.words"

    def record(self) -> dict[str, Any]:
        """The call's record in a manifest."""
        return {
            "operator": self.operator,
            "array": self.array,
            "buffers": [{"name": b.name, "type": str(b.type), "bytes": b.type.bytes} for b in self.buffers],
        }

    @property
    def last(self) -> int:
        """The call's last position, where it has most to do."""
        return self.positions.count - 1


def fixed_call(
    operator: str, array: str, name: str, make: Callable[[], DesignProgram], positions: int = 1
) -> ArtifactCall:
    """A call that is the same at each of `positions` positions."""

    def program(_position: int) -> DesignProgram:
        return make()

    return ArtifactCall(operator, array, name, Positions(positions), program, moves=False)


def moving_call(
    operator: str,
    array: str,
    name: str,
    make: Callable[[int], DesignProgram],
    target: str,
    positions: int,
    keys: int = 1,
    sweeps: Iterable[CallSweep] = (),
) -> ArtifactCall:
    """A call that depends on its first token's position (below `positions`), and on sweeps over chunks of `keys`."""
    most = limits_of(target).iteration_maximum
    return ArtifactCall(
        operator, array, name, Positions(positions, keys, most, tuple(dict.fromkeys(sweeps))), make, moves=True
    )


@dataclass(frozen=True)
class HostArgument:
    """A buffer of a step of the host, and how many of its bytes the step reads and writes."""

    buffer: HostBuffer
    reads: int = 0
    writes: int = 0


@dataclass(frozen=True)
class HostCall:
    """A step that the host computes (ops/npu/run/host_operators.h), at any position.

    Attributes:
        operator: stem of the operator.
        parameters: the operator's, each a name and a size or an f32.
        arguments: its buffers, in order.
        constants: bytes that it reads of the graph's constants, which are no arguments.
        multiply_adds: those of its products with constants.
    """

    operator: str
    parameters: tuple[tuple[str, int | float], ...]
    arguments: tuple[HostArgument, ...]
    constants: int = 0
    multiply_adds: int = 0

    @property
    def array(self) -> str:
        """HOST: the step is no array's."""
        return HOST

    @property
    def name(self) -> str:
        """Its parameters as text."""
        return "-".join(f"{key}{value:g}" for key, value in self.parameters)

    @property
    def buffers(self) -> tuple[HostBuffer, ...]:
        """Its buffers, in the order of its arguments."""
        return tuple(argument.buffer for argument in self.arguments)

    @property
    def reads(self) -> int:
        """Bytes that it reads."""
        return sum(argument.reads for argument in self.arguments)

    @property
    def writes(self) -> int:
        """Bytes that it writes."""
        return sum(argument.writes for argument in self.arguments)

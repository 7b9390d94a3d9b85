# SPDX-License-Identifier: Apache-2.0
"""Runs programs (aie/programs/) on emulators, step by step, as ops/npu/run/program.h does it on a runtime."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import numpy as np

from flownpu.aie.emulator import Emulator
from flownpu.aie.plan.data import DTYPES, Plan
from flownpu.aie.programs.call import ArtifactCall, HostCall
from flownpu.aie.programs.program import Program, Role, Step, attribute_words
from tests.aie.emulation import emulator
from tests.aie.host_kernels import BFLOAT16
from tests.ops.device import testing


class Machine:
    """The buffers that some programs share, and the emulated arrays that work on them.

    Attributes:
        buffers: contents by name, uint8.
    """

    def __init__(self, programs: Iterable[Program], given: Mapping[str, np.ndarray]) -> None:
        self._arrays: dict[str, Emulator] = {}
        self.buffers = {name: content.view(np.uint8).reshape(-1) for name, content in given.items()}
        for program in programs:
            for buffer in program.buffers:
                if buffer.role is Role.CONSTANT:
                    assert self.buffers[buffer.name].size == buffer.bytes, buffer.name
                elif self.buffers.get(buffer.name, np.zeros(0)).size < buffer.bytes:
                    self.buffers[buffer.name] = np.zeros(buffer.bytes, np.uint8)

    def run(self, program: Program, rows: np.ndarray, position: int) -> Iterator[tuple[Step, dict[str, np.ndarray]]]:
        """Run a program at a position; `rows`: its input, bf16 [tokens, columns]; zeros follow them.

        Yields:
            After each step: the step, and the contents of its arguments by their names in the design.
        """
        given = program.given
        lines = np.zeros((given.rows, given.line), BFLOAT16)
        lines[: len(rows), : given.columns] = rows
        self.buffers[given.view.buffer][given.view.offset : given.view.offset + given.bytes] = lines.view(
            np.uint8
        ).reshape(-1)
        for step in program.steps:
            if isinstance(step.call, HostCall):
                yield step, self._compute(step, position + step.offset)
                continue
            plan = _plan(step.call, position + step.offset)
            array = self._arrays.setdefault(step.call.array, emulator(plan.array))
            arguments = {}
            for (name, offset), record in zip(step.views, plan.sequence.buffers, strict=True):
                content = self.buffers[name][offset : offset + record.type.bytes]
                arguments[record.name] = content.view(DTYPES[record.type.dtype])
            array.run(plan.sequence, arguments.values())
            assert array.leftovers() == []
            yield step, arguments

    def _compute(self, step: Step, position: int) -> dict[str, np.ndarray]:
        """Compute a step of the host by the operators of ops/npu/run/host_operators.h."""
        call = step.call
        buffers = [(buffer.name, buffer.type.bytes) for buffer in call.buffers]
        arguments = {
            record.name: self.buffers[name][offset : offset + record.type.bytes]
            for (name, offset), record in zip(step.views, call.buffers, strict=True)
        }
        parameters = {key: list(attribute_words(value)) for key, value in call.parameters}
        operator = testing.npu.HostOperator(call.operator, step.label, parameters, buffers)
        operator.run([(content, False) for content in arguments.values()], position)
        return {
            record.name: content.view(DTYPES[record.type.dtype])
            for record, content in zip(call.buffers, arguments.values(), strict=True)
        }


@cache
def _plan(call: ArtifactCall, position: int) -> Plan:
    """The plan of a call; other tests check it."""
    return call.program(position).resolve_program(call.name)

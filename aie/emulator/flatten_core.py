# SPDX-License-Identifier: Apache-2.0
"""A core's program as code for the emulator's stack machine, whose operations `program.h` (`Op`) describes."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from flownpu.aie.plan.data import (
    Acquire,
    BarrierRelease,
    BarrierWait,
    BufferArgument,
    Call,
    Element,
    Expression,
    Load,
    Loop,
    Operation,
    Release,
    Statement,
    Store,
    Variable,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.aie.plan.data import Core


class Op(IntEnum):
    """The same as `enum class Op` of `program.h`."""

    PUSH = 0
    GET = 1
    SET = 2
    ADD = 3
    SUBTRACT = 4
    MULTIPLY = 5
    FLOOR_DIVIDE = 6
    REMAINDER = 7
    LOOP = 8
    NEXT = 9
    ACQUIRE = 10
    RELEASE = 11
    CALL = 12
    LOAD = 13
    STORE = 14
    WAIT = 15
    ADD_LOCK = 16
    END = 17


_OPERATORS = {"+": Op.ADD, "-": Op.SUBTRACT, "*": Op.MULTIPLY, "//": Op.FLOOR_DIVIDE, "%": Op.REMAINDER}
_INTEGER, _MEMORY, _VIEW = 0, 1, 2  # kinds of a call's arguments


class CoreCode:
    """The code of one core, while it is written.

    Args:
        core: the program.
        ends: the number of each (fifo, port) of the core.
        memories: the number of each buffer.
        locks: the number of each barrier.
        kernels: the number of each entry.
    """

    def __init__(
        self,
        core: Core,
        ends: Mapping[tuple[str, str], int],
        memories: Mapping[str, int],
        locks: Mapping[str, int],
        kernels: Mapping[str, int],
    ) -> None:
        self.ends, self.memories, self.locks, self.kernels = ends, memories, locks, kernels
        self.words: list[int] = []
        self.variables: dict[str, int] = {}
        self.views: dict[str, int] = {}
        self._body(core.body)
        self.words.append(Op.END)
        # A core that never waits would never let another one run.
        self.forever = any(isinstance(statement, (Acquire, BarrierWait)) for statement in core.statements)

    def _body(self, body: tuple[Statement, ...]) -> None:
        for statement in body:
            match statement:
                case Loop():
                    self._loop(statement)
                case Acquire():
                    view = self.views.setdefault(statement.name, len(self.views))
                    self.words += [Op.ACQUIRE, self.ends[statement.fifo, statement.port], view, statement.count]
                case Release():
                    self.words += [Op.RELEASE, self.ends[statement.fifo, statement.port], statement.count]
                case Call():
                    self._call(statement)
                case Load():
                    self._push(statement.index)
                    self.words += [Op.LOAD, self.memories[statement.buffer], self._variable(statement.variable)]
                case Store():
                    self._push(statement.index)
                    self._push(statement.value)
                    self.words += [Op.STORE, self.memories[statement.buffer]]
                case BarrierWait():
                    self.words += [Op.WAIT, self.locks[statement.barrier], statement.value]
                case BarrierRelease():
                    self.words += [Op.ADD_LOCK, self.locks[statement.barrier], statement.value]

    def _variable(self, name: str) -> int:
        return self.variables.setdefault(name, len(self.variables))

    def _loop(self, loop: Loop) -> None:
        index = self._variable(loop.variable)
        stop, step = (self._variable(f"{loop.variable} {name}") for name in ("stop", "step"))
        for place, bound in ((stop, loop.stop), (step, loop.step), (index, loop.start)):
            self._push(bound)
            self.words += [Op.SET, place]
        top = len(self.words)
        self.words += [Op.LOOP, index, stop, step, 0]
        self._body(loop.body)
        self.words += [Op.NEXT, index, step, top]
        self.words[top + 4] = len(self.words)  # the loop's exit

    def _call(self, call: Call) -> None:
        arguments: list[int] = []
        for argument in call.arguments:
            if isinstance(argument, Element):
                arguments += [_VIEW, self.views[argument.view], argument.index]
            elif isinstance(argument, BufferArgument):
                arguments += [_MEMORY, self.memories[argument.buffer], 0]
            else:
                self._push(argument)
                arguments += [_INTEGER, 0, 0]
        self.words += [Op.CALL, self.kernels[call.kernel], len(call.arguments), *arguments]

    def _push(self, value: Expression) -> None:
        if isinstance(value, Variable):
            self.words += [Op.GET, self._variable(value.name)]
        elif isinstance(value, Operation):
            self._push(value.left)
            self._push(value.right)
            self.words.append(_OPERATORS[value.operator])
        else:
            self.words += [Op.PUSH, value]

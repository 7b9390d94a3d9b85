# SPDX-License-Identifier: Apache-2.0
"""What a core's program computes with integers: bounds of loops, indices, arguments of kernels."""

from __future__ import annotations

import operator
from functools import cache
from typing import TYPE_CHECKING

from flownpu.aie.plan.data import BufferArgument, Element, Load, Loop, Operation, Variable, statements

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flownpu.aie.plan.data import Call, Expression

__all__ = ["call_arguments", "depends_on_index", "evaluate"]

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}


def evaluate(value: Expression, variables: Mapping[str, int]) -> int:
    """The value of an expression.

    Raises:
        KeyError: a variable is not known.
        ZeroDivisionError: as in Python.
    """
    if isinstance(value, Variable):
        return variables[value.name]
    if isinstance(value, Operation):
        return _OPERATIONS[value.operator](evaluate(value.left, variables), evaluate(value.right, variables))
    return value


def call_arguments(
    call: Call, variables: Mapping[str, int], view_bytes: Mapping[str, int], buffer_bytes: Mapping[str, int]
) -> tuple[list[int], int]:
    """The integers of a kernel's call, and the bytes of its objects and buffers together.

    Args:
        call: the statement.
        variables: integers by name.
        view_bytes: of one object of each view that is held.
        buffer_bytes: of each buffer.

    Raises:
        KeyError: a name is not known.
    """
    integers, size = [], 0
    for argument in call.arguments:
        if isinstance(argument, Element):
            size += view_bytes[argument.view]
        elif isinstance(argument, BufferArgument):
            size += buffer_bytes[argument.buffer]
        else:
            integers.append(evaluate(argument, variables))
    return integers, size


@cache
def depends_on_index(loop: Loop) -> bool:
    """Whether passes of a loop may differ in what they move: a bound or a load inside uses the index."""

    def uses(value: Expression) -> bool:
        if isinstance(value, Operation):
            return uses(value.left) or uses(value.right)
        return value == Variable(loop.variable)

    inner = list(statements(loop.body))
    bounds = [bound for s in inner if isinstance(s, Loop) for bound in (s.start, s.stop, s.step)]
    return any(map(uses, [*bounds, *(s.index for s in inner if isinstance(s, Load))]))

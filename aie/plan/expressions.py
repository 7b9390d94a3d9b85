# SPDX-License-Identifier: Apache-2.0
"""The integers that a core's program computes: bounds of loops, indices, arguments of kernels."""

from __future__ import annotations

import operator
from functools import cache
from typing import TYPE_CHECKING

from flownpu.aie.plan.data import BufferArgument, Element, Load, Loop, Operation, Variable, statements

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flownpu.aie.plan.data import Call, Expression


def _remainder(left: int, right: int) -> int:
    """The remainder with the sign of `left`, as in MLIR's arith.remsi and in the emulator; Python's has `right`'s."""
    rest = abs(left) % abs(right)
    return -rest if left < 0 else rest


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": _remainder,
}


def evaluate(value: Expression, variables: Mapping[str, int]) -> int:
    """The value of an expression.

    Raises:
        KeyError: a variable is not known.
        ZeroDivisionError: a division by 0.
    """
    if isinstance(value, int):
        return value
    if isinstance(value, Variable):
        return variables[value.name]
    # Many operands are numbers, which need no call.
    left = value.left if isinstance(value.left, int) else evaluate(value.left, variables)
    right = value.right if isinstance(value.right, int) else evaluate(value.right, variables)
    return _OPERATIONS[value.operator](left, right)


def passes_of(loop: Loop, variables: Mapping[str, int]) -> range:
    """The indices of a loop's passes; errors as of `evaluate`."""
    start, stop, step = loop.start, loop.stop, loop.step  # mostly numbers, which need no call
    return range(
        start if isinstance(start, int) else evaluate(start, variables),
        stop if isinstance(stop, int) else evaluate(stop, variables),
        step if isinstance(step, int) else evaluate(step, variables),
    )


def call_integers(call: Call, variables: Mapping[str, int]) -> tuple[int, ...]:
    """The values of a kernel call's integer arguments, in order.

    Raises:
        KeyError: a variable is not known.
    """
    arguments = call.arguments
    return tuple(evaluate(each, variables) for each in arguments if not isinstance(each, (Element, BufferArgument)))


def call_bytes(call: Call, view_bytes: Mapping[str, int], buffer_bytes: Mapping[str, int]) -> int:
    """The bytes of all objects and buffers that a kernel's call is given.

    Args:
        call: the statement.
        view_bytes: for each view that is held, the bytes of one object.
        buffer_bytes: for each buffer, its bytes.

    Raises:
        KeyError: a name is not known.
    """
    size = 0
    for argument in call.arguments:
        if isinstance(argument, Element):
            size += view_bytes[argument.view]
        elif isinstance(argument, BufferArgument):
            size += buffer_bytes[argument.buffer]
    return size


@cache
def depends_on_index(loop: Loop) -> bool:
    """Whether passes of a loop may move different amounts: an inner loop's bound or a load's index uses the index."""

    def uses(value: Expression) -> bool:
        if isinstance(value, Operation):
            return uses(value.left) or uses(value.right)
        return value == Variable(loop.variable)

    inner = list(statements(loop.body))
    bounds = [bound for s in inner if isinstance(s, Loop) for bound in (s.start, s.stop, s.step)]
    return any(map(uses, [*bounds, *(s.index for s in inner if isinstance(s, Load))]))

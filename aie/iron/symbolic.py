# SPDX-License-Identifier: Apache-2.0
"""Records a core's function as statements of a plan.

The function runs once. Loops over `range_` run their body once with a symbol as the index, so a loop of any length is
one statement, and its bounds may be run-time parameters: this is what the compiler sees, too.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from flownpu.aie.plan import data as plan

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_FLOATS = (
    "a plan's cores compute with integers only: give a kernel the bits of a float as an integer, "
    "np.float32(x).view(np.int32), or write the number into the kernel"
)
_CURRENT: ContextVar[CoreTrace | None] = ContextVar("current_core", default=None)


class RecordingError(ValueError):
    """A design does what IRON refuses, or what a plan cannot hold."""


class Symbol:
    """An integer that is known only when the core runs."""

    def __init__(self, value: plan.Expression) -> None:
        self.value = value

    def _operation(self, operator: str, other: Symbol | int, *, swap: bool = False) -> Symbol:
        left, right = self.value, expression(other)
        return Symbol(plan.Operation(operator, right, left) if swap else plan.Operation(operator, left, right))

    def __add__(self, other: Symbol | int) -> Symbol:
        return self._operation("+", other)

    def __radd__(self, other: int) -> Symbol:
        return self._operation("+", other, swap=True)

    def __sub__(self, other: Symbol | int) -> Symbol:
        return self._operation("-", other)

    def __rsub__(self, other: int) -> Symbol:
        return self._operation("-", other, swap=True)

    def __mul__(self, other: Symbol | int) -> Symbol:
        return self._operation("*", other)

    def __rmul__(self, other: int) -> Symbol:
        return self._operation("*", other, swap=True)

    def __floordiv__(self, other: Symbol | int) -> Symbol:
        return self._operation("//", other)

    def __mod__(self, other: Symbol | int) -> Symbol:
        return self._operation("%", other)

    def _unknown(self, *_: Any) -> NoReturn:
        raise RecordingError(
            f"[core] {self.value} is not known before the core runs: Python cannot branch on it or count to it; "
            "use range_ for loops, and let a kernel take the decision"
        )

    __bool__ = __index__ = __int__ = __lt__ = __le__ = __gt__ = __ge__ = _unknown


class ElementReference:
    """One object of an acquired view."""

    def __init__(self, view: View, index: int) -> None:
        self.view, self.index = view, index

    def _refuse(self, *_: Any) -> NoReturn:
        raise RecordingError(
            f"[core] a plan's cores do not read or write the elements of an object ({self.view.type}): give the object "
            "to a kernel; of a Buffer they read and write integers"
        )

    __getitem__ = __setitem__ = __iter__ = __len__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse


class View:
    """Several acquired objects; the oldest is `view[0]`."""

    def __init__(self, name: str, kind: plan.Type, count: int) -> None:
        self.name, self.type, self.count = name, kind, count

    def __getitem__(self, index: int) -> ElementReference:
        if not 0 <= index < self.count:
            raise RecordingError(f"[core] expected an index in 0..{self.count - 1} of the objects held, got {index}")
        return ElementReference(self, index)


def expression(value: Symbol | int) -> plan.Expression:
    """The plan's expression of a symbol or an integer.

    Raises:
        RecordingError: it is neither; floats are refused, too.
    """
    if isinstance(value, Symbol):
        return value.value
    if isinstance(value, (float, np.floating)):
        raise RecordingError(f"[core] {NO_FLOATS}, got {value!r}")
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise RecordingError(f"[core] expected an integer, got {value!r}")
    return int(value)


class CoreTrace:
    """The statements of one core so far; blocks are nested as loops are."""

    def __init__(self) -> None:
        self._blocks: list[list[plan.Statement]] = [[]]
        self._names = 0

    def add(self, statement: plan.Statement) -> None:
        """Append a statement to the innermost block."""
        self._blocks[-1].append(statement)

    def name(self, stem: str) -> str:
        """A name that is new in this core."""
        self._names += 1
        return f"{stem}{self._names - 1}"

    @contextmanager
    def loop(self, start: plan.Expression, stop: plan.Expression, step: plan.Expression) -> Iterator[Symbol]:
        """A loop, whose body are the statements that are added inside."""
        variable = self.name("i")
        self._blocks.append([])
        yield Symbol(plan.Variable(variable))
        body = tuple(self._blocks.pop())
        self.add(_one_of_equal(plan.Loop(variable, start, stop, step, body)))

    @property
    def body(self) -> tuple[plan.Statement, ...]:
        """The whole program.

        Raises:
            RecordingError: a loop was left by break or return, which only Python can do.
        """
        if len(self._blocks) != 1:
            raise RecordingError("[core] a loop over range_ was left by break or return, which no core can do")
        return tuple(self._blocks[0])

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record here whatever runs inside."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)


@lru_cache(maxsize=4096)  # enough for the loops of several arrays
def _one_of_equal(loop: plan.Loop) -> plan.Loop:
    """The first loop that was equal to this one. Caches have loops as keys, and find an identical object at once."""
    return loop


def current_core() -> CoreTrace | None:
    """The core being recorded, None outside of one."""
    return _CURRENT.get()


def range_(start: Symbol | int, stop: Symbol | int | None = None, step: Symbol | int = 1, **_: Any) -> Iterator[Symbol]:
    """A loop of the core (`aie.iron.controlflow.range_`); arguments as Python's range.

    Raises:
        RecordingError: outside of a core's function; a sequence, recorded for given shapes, uses Python's range.
    """
    trace = current_core()
    if trace is None:
        raise RecordingError("[range_] expected to be called in a core's function; a sequence uses Python's range")
    first, last = (0, start) if stop is None else (start, stop)
    with trace.loop(expression(first), expression(last), expression(step)) as index:
        yield index

# SPDX-License-Identifier: Apache-2.0
"""Records a sequence: host buffers, transfers, task groups."""

from __future__ import annotations

import itertools
import operator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from flownpu.aie.iron.symbolic import RecordingError
from flownpu.aie.plan import data as plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flownpu.aie.iron.access_pattern import TensorAccessPattern

_SEQUENCE: ContextVar[SequenceTrace | None] = ContextVar("sequence", default=None)


class RuntimeData:
    """A host buffer in a sequence."""

    def __init__(self, record: plan.HostBuffer) -> None:
        self.record = record

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, in elements."""
        return self.record.type.shape


class Task:
    """A transfer that was started."""

    def __init__(self, record: plan.Transfer) -> None:
        self.record = record

    def await_(self) -> None:
        """Wait for the transfer's end; it must have been started with `wait=True`."""
        current_sequence("await_").steps.append(plan.Await(self.record.name))

    def free(self) -> None:
        """Release its buffer descriptor without waiting."""
        current_sequence("free").steps.append(plan.Free(self.record.name))


class TaskGroup:
    """Transfers that end together: `finish` awaits those started with `wait=True`, then frees the others."""

    @staticmethod
    def pipelined(steps: int, depth: int = 2) -> Iterator[tuple[int, TaskGroup]]:
        """Yield each step with a group of its own, which is finished once `depth - 1` more steps have been recorded.

        Raises:
            RecordingError: `steps` is no integer, or `depth` is less than 1.
        """
        try:
            count = operator.index(steps)
        except TypeError as error:
            refusal = f"[TaskGroup] a plan's sequence is for given shapes: expected a number, got {steps!r}"
            raise RecordingError(refusal) from error
        if depth < 1:
            raise RecordingError(f"[TaskGroup] expected a depth of 1 or more, got {depth}")
        unfinished: list[TaskGroup] = []
        for step in range(count):
            group = TaskGroup()
            yield step, group
            unfinished.append(group)
            if len(unfinished) == depth:
                unfinished.pop(0).finish()
        for group in unfinished:
            group.finish()

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.open = True
        current_sequence("TaskGroup").groups.append(self)

    def finish(self) -> None:
        """Close the group.

        Raises:
            RecordingError: it was closed before.
        """
        if not self.open:
            raise RecordingError("[TaskGroup] finished twice")
        self.open = False
        for task in self.tasks:
            if task.record.token:
                task.await_()
        for task in self.tasks:
            if not task.record.token:
                task.free()


class SequenceTrace:
    """The steps of a sequence so far."""

    def __init__(self) -> None:
        self.steps: list[plan.Step] = []
        self.groups: list[TaskGroup] = []
        self._names = itertools.count()
        self._default: list[Task] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record here whatever runs inside."""
        token = _SEQUENCE.set(self)
        try:
            yield
        finally:
            _SEQUENCE.reset(token)

    def transfer(
        self,
        name: str,
        data: RuntimeData,
        tap: TensorAccessPattern | None,
        wait: bool,
        group: TaskGroup | None,
        managed: bool,
    ) -> Task:
        """Note a fill or a drain of the fifo `name`; other arguments as for `ObjectFifoHandle.fill`."""
        if not isinstance(data, RuntimeData):
            raise RecordingError(f"[ObjectFifo {name}] expected a buffer of the sequence, got {data!r}")
        elements = data.record.type.elements
        record = plan.Tap(0, (plan.Dimension(elements, 1),)) if tap is None else plan.Tap(tap.offset, tap.walk)
        task = Task(plan.Transfer(f"{name}_task{next(self._names)}", name, data.record.name, record, wait))
        self.steps.append(task.record)
        if managed:
            (group.tasks if group else self._default).append(task)
        return task

    def finish(self, *, strict: bool) -> None:
        """End the transfers that have no group.

        Raises:
            RecordingError: a group is open, or (strict) some transfers have a group and some have none.
        """
        if any(group.open for group in self.groups):
            raise RecordingError("[Runtime] a TaskGroup was not finished")
        if strict and self._default and self.groups:
            raise RecordingError("[Runtime] expected all transfers in task groups or none, got both")
        group = TaskGroup()
        group.tasks = self._default
        group.finish()


def current_sequence(what: str) -> SequenceTrace:
    """The sequence being recorded.

    Raises:
        RecordingError: there is none, and `what` belongs in one.
    """
    trace = _SEQUENCE.get()
    if trace is None:
        raise RecordingError(f"[Runtime] {what} is for the function given to Runtime")
    return trace

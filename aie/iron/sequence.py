# SPDX-License-Identifier: Apache-2.0
"""Records a sequence: host buffers and transfers."""

from __future__ import annotations

import itertools
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


class SequenceTrace:
    """The steps of a sequence so far."""

    def __init__(self) -> None:
        self.steps: list[plan.Step] = []
        self._names = itertools.count()
        self._unfinished: list[Task] = []

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
            self._unfinished.append(task)
        return task

    def finish(self) -> None:
        """Await the transfers that were started with `wait=True`, then free the others."""
        for task in self._unfinished:
            if task.record.token:
                task.await_()
        for task in self._unfinished:
            if not task.record.token:
                task.free()


def current_sequence(what: str) -> SequenceTrace:
    """The sequence being recorded.

    Raises:
        RecordingError: there is none, and `what` belongs in one.
    """
    trace = _SEQUENCE.get()
    if trace is None:
        raise RecordingError(f"[Runtime] {what} is for the function given to Runtime")
    return trace

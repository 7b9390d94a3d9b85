# SPDX-License-Identifier: Apache-2.0
"""Records a worker, with its buffers, barriers and kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.aie.iron.fifo import ObjectFifo, ObjectFifoHandle
from flownpu.aie.iron.sequence import current_sequence
from flownpu.aie.iron.symbolic import (
    NO_FLOATS,
    CoreTrace,
    ElementReference,
    RecordingError,
    Symbol,
    current_core,
    expression,
)
from flownpu.aie.iron.types import Tile, flatten, plan_type, refuse
from flownpu.aie.plan import data as plan
from flownpu.aie.plan.limits import NPU2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Buffer:
    """Memory of a tile (`aie.iron.Buffer`); with `use_write_rtp` the sequence may write it: `buffer[i] = v`."""

    def __init__(
        self,
        type: Any = None,  # noqa: A002
        initial_value: np.ndarray[Any, Any] | None = None,
        name: str | None = None,
        tile: Tile | None = None,
        use_write_rtp: bool = False,
        **options: Any,
    ) -> None:
        refuse("Buffer", options)
        if type is None and initial_value is None:
            raise RecordingError("[Buffer] expected a type, an initial value or both")
        if type is not None:
            self.type = plan_type(type)
        elif initial_value is not None:
            self.type = plan.Type(initial_value.shape, plan_type(initial_value.dtype.type).dtype)
        self.name = name  # an unnamed one is named when the program is put together
        self.tile = tile
        self.run_time_parameter = use_write_rtp
        self.initial_value = () if initial_value is None else tuple(np.ravel(initial_value).tolist())

    def __getitem__(self, index: Symbol | int) -> Symbol:
        trace = current_core()
        if trace is None:
            raise RecordingError(f"[Buffer {self.name}] only a core reads it")
        variable = trace.name("value")
        trace.add(plan.Load(variable, self.name or "", expression(index)))
        return Symbol(plan.Variable(variable))

    def __setitem__(self, index: Symbol | int, value: Symbol | int) -> None:
        trace = current_core()
        if trace is not None:
            trace.add(plan.Store(self.name or "", expression(index), expression(value)))
            return
        if not self.run_time_parameter:
            raise RecordingError(f"[Buffer {self.name}] expected use_write_rtp=True for a buffer the sequence writes")
        if isinstance(index, Symbol) or isinstance(value, Symbol) or not hasattr(value, "__index__"):
            raise RecordingError(
                f"[Buffer {self.name}] a sequence writes integers to it, got {value!r}: of a float give the bits, "
                "np.float32(x).view(np.int32)"
            )
        current_sequence("a run-time parameter").steps.append(
            plan.WriteParameter(self.name or "", int(index), int(value))
        )


class WorkerRuntimeBarrier:
    """Lets workers wait for the sequence (`aie.iron.WorkerRuntimeBarrier`): one lock on each worker's tile."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.locks: list[str] = []
        self.number = 0

    def _add(self, statement: Callable[[str, int], plan.Statement], value: int) -> None:
        trace = current_core()
        if trace is None or not self.locks:
            raise RecordingError(
                "[WorkerRuntimeBarrier] expected to be used in the function of a worker that it is given to"
            )
        trace.add(statement(self.locks[-1], value))

    def wait_for_value(self, value: int) -> None:
        """In a core's function: wait until the barrier is exactly `value`."""
        self._add(plan.BarrierWait, value)

    def release_with_value(self, value: int) -> None:
        """In a core's function: add `value` to the barrier."""
        self._add(plan.BarrierRelease, value)

    def set(self, value: int) -> None:
        """In a sequence: set the barrier on the tiles of all its workers."""
        current_sequence("a barrier").steps.extend(plan.SetBarrier(lock, value) for lock in self.locks)


class Kernel:
    """An entry point in C++ (`aie.iron.Kernel`): its arguments' types are checked when a call is recorded."""

    def __init__(self, name: str, object_file_name: str, arg_types: Sequence[Any] = ()) -> None:
        self.record = plan.Kernel(name, tuple(plan_type(kind) for kind in arg_types), object_file_name)

    def __call__(self, *arguments: Any) -> None:
        """In a core's function: call it."""
        trace = current_core()
        entry, kinds = self.record.entry, self.record.arguments
        if trace is None:
            raise RecordingError(f"[{entry}] expected to be called in a core's function")
        if len(arguments) != len(kinds):
            raise RecordingError(f"[{entry}] expected {len(kinds)} arguments, got {len(arguments)}")
        pairs = zip(arguments, kinds, strict=True)
        recorded = tuple(self._argument(place, value, kind) for place, (value, kind) in enumerate(pairs))
        trace.add(plan.Call(entry, recorded))

    def _argument(
        self, place: int, value: Any, kind: plan.Type
    ) -> plan.Element | plan.BufferArgument | plan.Expression:
        if not isinstance(value, (ElementReference, Buffer)):
            if kind.shape:
                raise RecordingError(f"[{self.record.entry}] argument {place}: expected {kind}, got {value!r}")
            if not np.issubdtype(plan.DTYPES[kind.dtype], np.integer):
                raise RecordingError(f"[{self.record.entry}] argument {place}: {NO_FLOATS}, got a {kind}")
            return expression(value)
        given = value.type if isinstance(value, Buffer) else value.view.type
        # IRON passes N-dimensional objects flattened.
        if (given.elements, given.dtype) != (kind.elements, kind.dtype) or not kind.shape:
            raise RecordingError(f"[{self.record.entry}] argument {place}: expected {kind}, got {given}")
        return (
            plan.BufferArgument(value.name or "")
            if isinstance(value, Buffer)
            else plan.Element(value.view.name, value.index)
        )


class Worker:
    """The program of a compute tile (`aie.iron.Worker`): `core_fn(*fn_args)`.

    `stack_size` is in bytes. `dynamic_objfifo_lowering`: see `plan.Core`.
    """

    def __init__(
        self,
        core_fn: Callable[..., None],
        fn_args: Sequence[Any] | None = None,
        tile: Tile | None = None,
        stack_size: int | None = None,
        dynamic_objfifo_lowering: bool | None = None,
        **options: Any,
    ) -> None:
        refuse("Worker", options)
        self.core_fn, self.fn_args = core_fn, list(fn_args or ())
        self.tile = tile or Tile()
        self.stack_size, self.dynamic = stack_size, bool(dynamic_objfifo_lowering)
        self.arguments = list(flatten(self.fn_args))
        for argument in self.arguments:
            if isinstance(argument, ObjectFifo):
                raise RecordingError("[Worker] expected the ends of a fifo, prod() or cons(), got the fifo itself")
            if isinstance(argument, ObjectFifoHandle):
                argument.belongs_to(self)
            if isinstance(argument, Buffer) and argument.tile is None:
                argument.tile = self.tile
            if isinstance(argument, WorkerRuntimeBarrier):
                argument.workers.append(self)

    def record(self, place: plan.Tile) -> plan.Core:
        """Run the function once and record its actions."""
        trace = CoreTrace()
        for argument in self.arguments:
            if isinstance(argument, WorkerRuntimeBarrier):
                argument.locks.append(f"barrier{argument.number}_{place.column}_{place.row}")
        with trace.active():
            self.core_fn(*self.fn_args)
        stack = NPU2.stack_bytes if self.stack_size is None else self.stack_size
        return plan.Core(place, trace.body, stack, self.dynamic)

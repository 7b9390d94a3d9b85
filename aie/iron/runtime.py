# SPDX-License-Identifier: Apache-2.0
"""Records the run-time sequence of a program."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, get_args

from flownpu.aie.iron.fifo import ObjectFifoHandle
from flownpu.aie.iron.sequence import RuntimeData, SequenceTrace
from flownpu.aie.iron.symbolic import RecordingError
from flownpu.aie.iron.types import flatten, plan_type, refuse
from flownpu.aie.plan import data as plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Runtime:
    """The sequence (`aie.iron.Runtime`): `seq_fn` gets one argument for each entry of `fn_args`.

    A tensor type (`np.ndarray[shape, np.dtype[T]]`) declares a host buffer; anything else is passed on as it is.

    Raises:
        RecordingError: an argument is a bare type, whose value only a call would give.
    """

    def __init__(
        self,
        seq_fn: Callable[..., None],
        fn_args: Sequence[Any] | None = None,
        *,
        name: str | None = None,
        **options: Any,
    ) -> None:
        refuse("Runtime", options)
        self.seq_fn, self.fn_args = seq_fn, list(fn_args or ())
        self.name = name or "sequence"
        for argument in flatten(self.fn_args):
            if isinstance(argument, ObjectFifoHandle):
                argument.belongs_to_host(self)
            if isinstance(argument, type) and not get_args(argument):
                raise RecordingError(
                    f"[Runtime] a plan's sequence is for given shapes: give a number rather than the type {argument!r}"
                )

    def record(self) -> plan.Sequence:
        """Run the function once and record its actions."""
        trace = SequenceTrace()
        buffers: list[plan.HostBuffer] = []

        # A host buffer is named after the function's parameter.
        names = dict(enumerate(inspect.signature(self.seq_fn).parameters))

        def bind(place: int, argument: Any) -> Any:
            if not get_args(argument):
                return argument
            buffers.append(plan.HostBuffer(names.get(place, f"argument{place}"), plan_type(argument)))
            return RuntimeData(buffers[-1])

        with trace.active():
            self.seq_fn(*map(bind, range(len(self.fn_args)), self.fn_args))
            trace.finish()
        return plan.Sequence(self.name, tuple(buffers), tuple(trace.steps))

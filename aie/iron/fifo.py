# SPDX-License-Identifier: Apache-2.0
"""Records object fifos, their ends, and the links between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.aie.iron.sequence import RuntimeData, Task, current_sequence
from flownpu.aie.iron.symbolic import CoreTrace, ElementReference, RecordingError, View, current_core
from flownpu.aie.iron.types import Tile, plan_type, refuse
from flownpu.aie.plan import data as plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.iron.access_pattern import TensorAccessPattern


class ObjectFifo:
    """A circular buffer between one producer and its consumers (`aie.iron.ObjectFifo`).

    `depth` counts objects of `obj_type`; an end may have its own (`prod`, `cons`).
    """

    def __init__(
        self,
        obj_type: Any,
        *,
        depth: int | None = 2,
        name: str | None = None,
        to_stream: TensorAccessPattern | None = None,
        from_stream_per_cons: TensorAccessPattern | None = None,
        **options: Any,
    ) -> None:
        refuse("ObjectFifo", options)
        if depth is not None and depth < 1:
            raise RecordingError(f"[ObjectFifo] expected a depth of 1 or more, got {depth}")
        self.obj_type = obj_type
        self.type = plan_type(obj_type)
        self.depth = depth
        self.name = name
        self.to_stream = _object_walk(to_stream)
        self.from_stream_per_cons = _object_walk(from_stream_per_cons)
        self.producer: ObjectFifoHandle | None = None
        self.consumers: list[ObjectFifoHandle] = []

    def prod(self, depth: int | None = None, channel: int | None = None, tile: Tile | None = None) -> ObjectFifoHandle:
        """The producer's handle; later calls return the same one and ignore their arguments."""
        refuse("ObjectFifo.prod", {"channel": channel is not None})
        if self.producer is None:
            self.producer = ObjectFifoHandle(self, True, depth, tile)
        return self.producer

    def cons(
        self,
        depth: int | None = None,
        channel: int | None = None,
        tile: Tile | None = None,
    ) -> ObjectFifoHandle:
        """One more consumer's handle."""
        refuse("ObjectFifo.cons", {"channel": channel is not None})
        self.consumers.append(ObjectFifoHandle(self, False, depth, tile))
        return self.consumers[-1]


def _object_walk(tap: TensorAccessPattern | None) -> TensorAccessPattern | None:
    if tap is not None and tap.offset:
        raise RecordingError(f"[ObjectFifo] a walk over an object starts at its beginning, got {tap}")
    return tap


class ObjectFifoHandle:
    """One end of a fifo, as a worker, a link or the sequence holds it."""

    def __init__(
        self,
        fifo: ObjectFifo,
        is_producer: bool,
        depth: int | None,
        tile: Tile | None,
    ) -> None:
        depth = depth if depth is not None else fifo.depth
        if depth is None or depth < 1:
            raise RecordingError(f"[ObjectFifo] expected a depth of 1 or more for the fifo or its end, got {depth}")
        self.fifo, self.is_producer, self.depth = fifo, is_producer, depth
        self.walk = fifo.to_stream if is_producer else fifo.from_stream_per_cons
        self.tile = tile or Tile()
        self.owner: object = None  # the Worker, Runtime or ObjectFifoLink that uses it

    @property
    def obj_type(self) -> Any:
        """The type of one object."""
        return self.fifo.obj_type

    @property
    def port(self) -> str:
        """The end's name in a plan."""
        return "produce" if self.is_producer else "consume"

    def belongs_to(self, owner: object) -> None:
        """Record the user of the end.

        Raises:
            RecordingError: another owner already uses it.
        """
        if self.owner is not None and self.owner is not owner:
            raise RecordingError(f"[ObjectFifo {self.fifo.name}] its {self.port} end is already in use")
        self.owner = owner

    def belongs_to_host(self, sequence: object) -> None:
        """Record that a sequence uses the end; several sequences of one array may.

        Raises:
            RecordingError: a worker or a link already uses it.
        """
        if type(self.owner) is type(sequence):
            self.owner = None
        self.belongs_to(sequence)

    def acquire(self, num_elem: int) -> ElementReference | View:
        """Wait until the core holds `num_elem` objects in all; return the object for 1, else a view to index."""
        view = View(self._trace("acquire", num_elem).name("view"), self.fifo.type, num_elem)
        self._trace("acquire", num_elem).add(plan.Acquire(view.name, self.fifo.name or "", self.port, num_elem))
        return view[0] if num_elem == 1 else view

    def release(self, num_elem: int) -> None:
        """Give up the oldest `num_elem` objects."""
        self._trace("release", num_elem).add(plan.Release(self.fifo.name or "", self.port, num_elem))

    def _trace(self, verb: str, count: int) -> CoreTrace:
        trace, name = current_core(), self.fifo.name
        if trace is None:
            raise RecordingError(f"[ObjectFifo {name}] {verb} is for a core's function")
        if not 1 <= count <= self.depth:
            raise RecordingError(f"[ObjectFifo {name}] {verb} expected 1..{self.depth} (its depth), got {count}")
        return trace

    def fill(
        self,
        source: RuntimeData,
        tap: TensorAccessPattern | None = None,
        wait: bool = False,
        managed: bool = True,
        **options: Any,
    ) -> Task:
        """Send elements of a host buffer into the fifo.

        Args:
            source: the host buffer.
            tap: which elements, in which order; None: all.
            wait: the task reports its end, so that it can be awaited.
            managed: False leaves it to the caller to await or free the task.
            options: IRON's others, which are refused.
        """
        refuse("fill", options)
        if not self.is_producer:
            raise RecordingError(f"[ObjectFifo {self.fifo.name}] fill is for the producer's end")
        return current_sequence("fill").transfer(self.fifo.name or "", source, tap, wait, managed)

    def drain(
        self,
        dest: RuntimeData,
        tap: TensorAccessPattern | None = None,
        wait: bool = False,
        managed: bool = True,
        **options: Any,
    ) -> Task:
        """Write what comes out of the fifo to elements of a host buffer; arguments as for `fill`."""
        refuse("drain", options)
        if self.is_producer:
            raise RecordingError(f"[ObjectFifo {self.fifo.name}] drain is for a consumer's end")
        return current_sequence("drain").transfer(self.fifo.name or "", dest, tap, wait, managed)

    def split(
        self,
        offsets: Sequence[int],
        tile: Tile | None = None,
        depths: Sequence[int] | None = None,
        obj_types: Sequence[Any] | None = None,
        names: Sequence[str | None] | None = None,
        to_stream: Sequence[TensorAccessPattern | None] | None = None,
        **options: Any,
    ) -> list[ObjectFifo]:
        """New fifos, each fed with the part of every object that begins at its offset (in elements)."""
        refuse("split", options)
        if self.is_producer:
            raise RecordingError(f"[ObjectFifo {self.fifo.name}] split is for a consumer's end")
        parts = self._parts(len(offsets), "split", depths, obj_types, names, to_stream)
        ObjectFifoLink([self], [part.prod() for part in parts], tile, offsets if len(offsets) > 1 else ())
        return parts

    def join(
        self,
        offsets: Sequence[int],
        tile: Tile | None = None,
        depths: Sequence[int] | None = None,
        obj_types: Sequence[Any] | None = None,
        **options: Any,
    ) -> list[ObjectFifo]:
        """New fifos, each of which feeds the part of every object that begins at its offset (in elements)."""
        refuse("join", options)
        if not self.is_producer:
            raise RecordingError(f"[ObjectFifo {self.fifo.name}] join is for the producer's end")
        parts = self._parts(len(offsets), "join", depths, obj_types, None, None)
        ObjectFifoLink([part.cons() for part in parts], [self], tile, offsets if len(offsets) > 1 else ())
        return parts

    def forward(
        self,
        tile: Tile | None = None,
        obj_type: Any = None,
        depth: int | None = None,
        name: str | None = None,
        to_stream: TensorAccessPattern | None = None,
        **options: Any,
    ) -> ObjectFifo:
        """A new fifo with the same stream of data."""
        refuse("forward", options)
        return self.split(
            [0],
            tile,
            depths=None if depth is None else [depth],
            obj_types=[obj_type] if obj_type is not None else None,
            names=[name or (self.fifo.name and f"{self.fifo.name}_fwd")],
            to_stream=[to_stream],
        )[0]

    def _parts(self, count: int, verb: str, *lists: Sequence[Any] | None) -> list[ObjectFifo]:
        """The fifos of a split or join; every list given has one entry for each."""
        stem = self.fifo.name
        names = [stem and f"{stem}_{verb}{place}" for place in range(count)]
        defaults: list[list[Any]] = [[self.depth] * count, [self.obj_type] * count, names, [None] * count]
        filled = [default if given is None else given for given, default in zip(lists, defaults, strict=True)]
        if any(len(values) != count for values in filled):
            raise RecordingError(f"[{verb}] expected lists of {count} entries, as many as offsets")
        return [
            ObjectFifo(kind, depth=depth, name=name, to_stream=to_stream)
            for depth, kind, name, to_stream in zip(*filled, strict=True)
        ]


class ObjectFifoLink:
    """Joins fifos on a tile without a core; made by `split`, `join` and `forward`."""

    def __init__(
        self,
        inputs: Sequence[ObjectFifoHandle],
        outputs: Sequence[ObjectFifoHandle],
        tile: Tile | None,
        offsets: Sequence[int],
    ) -> None:
        self.inputs, self.outputs, self.offsets = list(inputs), list(outputs), tuple(offsets)
        self.tile = tile or Tile()
        for handle in (*inputs, *outputs):
            handle.belongs_to(self)

# SPDX-License-Identifier: Apache-2.0
"""The weights' way into a decode layer (design.py): tasks on the projecting columns' streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import BLOCK_BYTES, TILES, ceil_div, limits_of, run
from flownpu.aie.designs.decode_layer.rows import STREAMS, TILES_OF_STREAM
from flownpu.aie.iron.compat import TensorAccessPattern

if TYPE_CHECKING:
    from flownpu.aie.designs.decode_layer.rows import Phase
    from flownpu.aie.iron.compat import ObjectFifoHandle

OBJECT_BYTES = TILES_OF_STREAM * BLOCK_BYTES  # an object of a stream: a block for each of its tiles
_PIECE = BLOCK_BYTES // 2  # a block is longer than a shim's innermost wrap
_LIMITS = limits_of("npu2")


def weight_taps(phase: Phase, offset: int, total: int, span: int, number: int) -> list[TensorAccessPattern]:
    """A projection's weights for one stream, in objects of two neighbouring blocks: shared rows, then its own.

    A last object may have a block for the first of its tiles only. The second is then the next row's (after shared
    rows), or the same block once more (after the stream's own rows).

    Args:
        phase: the projection, and what each column takes of it.
        offset: byte of the buffer where the projection's weights begin.
        total: bytes of the buffer.
        span: columns whose tiles share rows.
        number: the stream's, among those of all columns.
    """
    column, stream = divmod(number, STREAMS)
    rows, line, sharers, taps = phase.columns[column], phase.projection.row_bytes, TILES * span, []
    # The first shared block that is for the first of the stream's tiles.
    block = (number % (STREAMS * span) * TILES_OF_STREAM - rows.start) % sharers
    if (rounds := ceil_div(phase.blocks(rows.shared) - block, sharers)) > 0:
        first = offset + rows.first * line + block * BLOCK_BYTES
        sizes, strides = [rounds, OBJECT_BYTES // _PIECE, _PIECE], [sharers * BLOCK_BYTES, _PIECE, 1]
        taps.append(TensorAccessPattern([total], first, sizes, strides))
    first, blocks = offset + (rows.begin + stream * rows.rows) * line, phase.blocks(rows.rows)
    if blocks > 1:
        taps.append(run(total, first, blocks // TILES_OF_STREAM * OBJECT_BYTES))
    if blocks % TILES_OF_STREAM:
        first += (blocks - 1) * BLOCK_BYTES
        sizes, strides = [TILES_OF_STREAM, BLOCK_BYTES // _PIECE, _PIECE], [0, _PIECE, 1]
        taps.append(TensorAccessPattern([total], first, sizes, strides))
    return taps


@dataclass
class Stream:
    """A stream of weights: what is to be sent, and what is under way.

    Attributes:
        end: the host's end.
        waiting: (phase, buffer, tap) of each task to come.
        started: (phase, task) of each task that was started and not awaited.
    """

    end: ObjectFifoHandle
    waiting: list[tuple[int, Any, TensorAccessPattern]] = field(default_factory=list)
    started: list[tuple[int, Any]] = field(default_factory=list)

    def await_oldest(self) -> None:
        """Await the oldest task."""
        self.started.pop(0)[1].await_()


class WeightStreams:
    """The weights of all phases of a sequence, in order.

    A stream has up to four tasks (`Limits.task_queue`). Tasks start as soon as there is room, also those of coming
    phases. So weights fill L2 and L1 while a phase's x is still being computed.
    """

    def __init__(self, ends: list[list[ObjectFifoHandle]], span: int) -> None:
        self.streams = [Stream(end) for ends_of_column in ends for end in ends_of_column]
        self._span = span

    def add(self, number: int, phase: Phase, buffer: Any, offset: int, total: int) -> None:
        """Add phase `number`, whose projection's weights begin at `offset` of a buffer of `total` bytes."""
        for place, stream in enumerate(self.streams):
            taps = weight_taps(phase, offset, total, self._span, place)
            stream.waiting += [(number, buffer, tap) for tap in taps]

    def start(self, phase: int) -> None:
        """Start all that is left of a phase, and of the phases to come what there is room for.

        The phases before it are over, and its x was sent: to make room, tasks of theirs and of its own may be awaited.
        """
        busy = True
        while busy:
            busy = False
            for stream in self.streams:  # one task of each stream in turn, so that no column waits for another's tasks
                full = len(stream.started) == _LIMITS.task_queue
                if not stream.waiting:
                    continue
                if full and stream.waiting[0][0] > phase and stream.started[0][0] >= phase:
                    continue
                if full:
                    stream.await_oldest()
                number, buffer, tap = stream.waiting.pop(0)
                stream.started.append((number, stream.end.fill(buffer, tap=tap, wait=True, managed=False)))
                busy = True

    def finish(self) -> None:
        """Await the tasks that are left."""
        for stream in self.streams:
            while stream.started:
                stream.await_oldest()

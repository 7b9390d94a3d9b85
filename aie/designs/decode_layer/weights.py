# SPDX-License-Identifier: Apache-2.0
"""The weights' way into a decode layer (design.py): tasks on the projecting columns' streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import BLOCK_BYTES, TILES, equal_steps, limits_of
from flownpu.aie.iron.compat import TensorAccessPattern

if TYPE_CHECKING:
    from flownpu.aie.designs.decode_layer.shape import Projection
    from flownpu.aie.iron.compat import ObjectFifoHandle

__all__ = ["HALF_BLOCK", "STREAMS", "WeightStreams", "weight_taps"]

STREAMS = 2  # weight streams of a column: all that its shim tile sends
HALF_BLOCK = BLOCK_BYTES // 2  # a block is longer than a shim's innermost wrap
_LIMITS = limits_of("npu2")
_SHARE = TILES // STREAMS  # tiles that a stream feeds


def weight_taps(
    projection: Projection, offset: int, total: int, columns: int, column: int, stream: int
) -> list[TensorAccessPattern]:
    """A projection's weights for one stream: row x half block x tile x half block's bytes.

    First shared rows, of which each tile has its quarter: all in a tap, but of gate and up, which are a dimension more.
    Then a tap for up to 64 row groups at equal distances, one for each where these are more than a stride holds.

    Args:
        projection: its weights begin at `offset` of a buffer of `total` bytes.
        offset: see there.
        total: see there.
        columns: columns that project.
        column: one of them.
        stream: stream of the column, for two of its tiles.
    """
    line, step, of_column = projection.row_bytes, TILES, projection.column_rows(columns)[column]
    taps, here = list[TensorAccessPattern](), [projection.quarter_start(stream * _SHARE + tile) for tile in range(2)]
    apart = (here[1] - here[0]) * BLOCK_BYTES
    times, stride = (2, line // 2) if projection.gated else (of_column.shared, line)
    for row in range(of_column.shared if projection.gated else min(of_column.shared, 1)):
        first = offset + (of_column.first + row) * line + here[0] * BLOCK_BYTES
        sizes = [times, 2 * projection.quarter, _SHARE, HALF_BLOCK]
        taps.append(TensorAccessPattern([total], first, sizes, [stride, HALF_BLOCK, apart, 1]))
    reachable = step * line // _LIMITS.granule_bytes <= 1 << _LIMITS.shim.stride_bits
    runs = equal_steps(of_column.groups, step, _LIMITS.iteration_maximum if reachable else 1)
    return taps + [
        TensorAccessPattern(
            [total],
            offset + (start + stream * _SHARE) * line,
            [count, line // HALF_BLOCK, _SHARE, HALF_BLOCK],
            [step * line, HALF_BLOCK, line, 1],
        )
        for start, count in runs
    ]


@dataclass
class Stream:
    """A stream of weights: what is to be sent, and what is under way.

    Attributes:
        end: the host's.
        waiting: phase, buffer and tap of each task to come, and whether it may start before its phase.
        started: phase and task.
    """

    end: ObjectFifoHandle
    waiting: list[tuple[int, Any, TensorAccessPattern, bool]] = field(default_factory=list)
    started: list[tuple[int, Any]] = field(default_factory=list)

    def await_oldest(self) -> None:
        """Its task is over."""
        self.started.pop(0)[1].await_()


class WeightStreams:
    """The weights of all phases of a sequence, in order.

    A stream has up to four tasks (`Limits.task_queue`). They are started as soon as there is room, also those of phases
    to come: weights then fill L2 and L1 while the phase's x is still being made.
    """

    def __init__(self, ends: list[list[ObjectFifoHandle]]) -> None:
        self.streams = [Stream(end) for ends_of_column in ends for end in ends_of_column]
        self._columns = len(ends)

    def add(self, phase: int, projection: Projection, buffer: Any, offset: int, total: int) -> None:
        """A projection whose weights begin at `offset` of a buffer of `total` bytes."""
        for number, stream in enumerate(self.streams):
            taps = weight_taps(projection, offset, total, self._columns, *divmod(number, STREAMS))
            stream.waiting += [(phase, buffer, tap, True) for tap in taps]

    def start(self, phase: int) -> None:
        """Start what is left of a phase, and of those to come what there is room for.

        The phases before are over, and x of this one was sent: their tasks may be waited for, to make room.
        """
        busy = True
        while busy:
            busy = False
            for stream in self.streams:  # one task each in turn, so that no column waits for another's
                full = len(stream.started) == _LIMITS.task_queue
                if not stream.waiting:
                    continue
                number, _, _, early = stream.waiting[0]
                if number > phase and (not early or (full and stream.started[0][0] >= phase)):
                    continue
                if full:
                    stream.await_oldest()
                number, buffer, tap, _ = stream.waiting.pop(0)
                stream.started.append((number, stream.end.fill(buffer, tap=tap, wait=True, managed=False)))
                busy = True

    def finish(self) -> None:
        """Await those that are left."""
        for stream in self.streams:
            while stream.started:
                stream.await_oldest()

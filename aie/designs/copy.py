# SPDX-License-Identifier: Apache-2.0
"""A copy through compute tiles: the smallest task of an array, which measures the speed of a stream.

Rows go to the cores in turn (`stream`); a core sends on the first `part` elements of each. With all of a row that is a
copy. With a small part next to nothing goes out, so that the time is that of reading: of one stream with one core, of
main memory with all cores and two streams each.

Run-time parameters of a core: word 0, its number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import I32, kernel, tensor
from flownpu.aie.designs.stream import each, stream
from flownpu.aie.iron.compat import range_

if TYPE_CHECKING:
    from flownpu.aie.iron.compat import Program

_LINE = 16  # the fewest elements that the kernel copies


@dataclass(frozen=True)
class Copy:
    """The array of a copy.

    Attributes:
        target: npu1 or npu2.
        n: elements of a row, bf16.
        part: elements of a row that are sent on, a multiple of 16.
        cores: compute tiles, at most the target's columns.
        streams: into a core, and as many out: 1 or 2, each with rows of its own.
    """

    target: str
    n: int
    part: int
    cores: int = 1
    streams: int = 1

    def __post_init__(self) -> None:
        if self.streams not in {1, 2} or self.part % _LINE or not 0 < self.part <= self.n:
            raise ValueError(
                f"[copy] expected one or two streams and parts in multiples of {_LINE} of rows of {self.n} elements, "
                f"got {self.streams} and {self.part}"
            )

    def program(self, rows: int) -> Program:
        """Host buffers x [rows, n] of each stream (x_0, x_1), then y [rows, part] of each, bf16."""
        part, streams = self.part, self.streams
        copy = kernel("copy_part", "copy_part", tensor(self.n), tensor(part), I32, I32)

        def body(*arguments: Any) -> None:
            *fifos, copy, rtp = arguments
            for _ in range_(rtp[0]):
                held = [fifo.acquire(1) for fifo in fifos]
                for whole, sent in zip(held[:streams], held[streams:], strict=True):
                    copy(whole, sent, 0, part)
                for fifo in fifos:
                    fifo.release(1)

        inputs = [each(f"x_{number}", rows, self.n) for number in range(streams)]
        outputs = [each(f"y_{number}", rows, part) for number in range(streams)]
        return stream(self.target, self.cores, rows, inputs, outputs, body, [copy])

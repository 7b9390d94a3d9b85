# SPDX-License-Identifier: Apache-2.0
"""The rows of a projection's blocks that each tile of a decode layer takes (design.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flownpu.aie.designs.common import BLOCK_BYTES, BLOCK_ROWS, TILES, ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.designs.decode_layer.shape import Projection

STREAMS = 2  # weight streams of a column: all that its shim tile sends
TILES_OF_STREAM = TILES // STREAMS


class ColumnRows(NamedTuple):
    """The rows of blocks of a column of tiles: equally many for each of its streams, and those that its span shares.

    Tiles share rows block by block: the blocks of the rows, one row's after the other's, are dealt to them in turn. The
    rows of a stream are shared by its two tiles.

    Attributes:
        first: the first row that the span shares.
        shared: how many rows the span shares.
        start: the number of the span's tile that the first shared block is for; even.
        begin: the first row of the first stream.
        rows: neighbouring rows of each stream.
    """

    first: int
    shared: int
    start: int
    begin: int
    rows: int


NO_ROWS = ColumnRows(0, 0, 0, 0, 0)


class Phase(NamedTuple):
    """A projection, and what each column takes of it."""

    projection: Projection
    columns: list[ColumnRows]

    def blocks(self, rows: int) -> int:
        """Blocks of `rows` rows; gated: of the gate's and up's."""
        return rows * self.projection.row_bytes // BLOCK_BYTES


def deal_rows(projections: Sequence[Projection], columns: int, span: int) -> list[Phase]:
    """Deal the rows of projections that follow one another to `columns` columns.

    `span`: how many neighbouring columns share rows. A span takes as many rows as any other, or one more. Its streams
    have equally many, and the rows that are left are shared. The spans that take one row more, and the tiles that take
    one block more, continue in turn from one projection to the next. If there are fewer rows than streams, each column
    takes two, and the last columns all end with the matrix. A row may then be computed several times, with equal
    results. Every column has a row, because its product tells the host its progress.
    """
    spans, streams = columns // span, STREAMS * span
    before, starts, phases = 0, [0] * spans, list[Phase]()
    for projection in projections:
        rows = projection.rows // BLOCK_ROWS
        each, more = divmod(rows, spans)
        if each < streams:
            firsts = [min(STREAMS * column, rows - STREAMS) for column in range(columns)]
            phases.append(Phase(projection, [ColumnRows(0, 0, 0, first, 1) for first in firsts]))
            continue
        phase, first = Phase(projection, []), 0
        for place in range(spans):
            count = each + ((place - before) % spans < more)
            of_stream, shared = divmod(count, streams)
            for begin in range(first + shared, first + count, STREAMS * of_stream):
                phase.columns.append(ColumnRows(first, shared, starts[place], begin, of_stream))
            end = starts[place] + phase.blocks(shared)
            starts[place] = ceil_div(end, TILES_OF_STREAM) * TILES_OF_STREAM % (TILES * span)
            first += count
        before += more
        phases.append(phase)
    return phases

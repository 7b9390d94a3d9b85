# SPDX-License-Identifier: Apache-2.0
"""Which rows of a projection's blocks which tiles of a decode layer take (design.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flownpu.aie.designs.common import BLOCK_BYTES, BLOCK_ROWS, TILES, ceil_div

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.designs.decode_layer.shape import Projection

__all__ = ["STREAMS", "TILES_OF_STREAM", "ColumnRows", "Phase", "deal_rows"]

STREAMS = 2  # weight streams of a column: all that its shim tile sends
TILES_OF_STREAM = TILES // STREAMS


class ColumnRows(NamedTuple):
    """Rows of blocks of a column of tiles: as many for each of its streams, and what all tiles of its span share.

    Tiles share rows block by block: the blocks of the rows, one row's after the other's, are dealt to them in turn. The
    rows of a stream are shared by its two tiles.

    Attributes:
        first: the first row that the span shares.
        shared: how many are.
        start: the span's tile that the first block is for, even.
        begin: the first row of the first stream.
        rows: of each stream, neighbours.
    """

    first: int
    shared: int
    start: int
    begin: int
    rows: int


class Phase(NamedTuple):
    """A projection, and what each column takes of it."""

    projection: Projection
    columns: list[ColumnRows]

    def blocks(self, rows: int) -> int:
        """Blocks of so many rows; gated: of the gate's and up's."""
        return rows * self.projection.row_bytes // BLOCK_BYTES


def deal_rows(projections: Sequence[Projection], columns: int, span: int) -> list[Phase]:
    """What each of so many columns takes of projections that follow one another; `span`: neighbours that share rows.

    A span takes as many rows as any other, or one more. Its streams have as many as each other, and what these leave is
    shared. Spans that take a row more, and tiles that take a block more, begin where those of the projection before
    ended. Where there are fewer rows than streams, columns take two each, and the last ones all end with the matrix: a
    row may be computed several times, with equal results. No column is without a row: what it gives is how the host
    hears that it has come so far.
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

# SPDX-License-Identifier: Apache-2.0
"""The array of a decode layer (design.py): its tiles, their programs and the fifos between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from flownpu.aie.designs.common import (
    BLOCK_BYTES,
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    F32,
    I32,
    TILES,
    U8,
    RunTimeParameters,
    bytes_of,
    kernel,
    limits_of,
    tensor,
    worker,
)
from flownpu.aie.designs.decode_layer.attention import Meeting, rope_tile
from flownpu.aie.designs.decode_layer.residual import residual_tile
from flownpu.aie.designs.decode_layer.rows import STREAMS, TILES_OF_STREAM
from flownpu.aie.designs.decode_layer.shape import RESIDUAL_COLUMN, ROPE_COLUMN
from flownpu.aie.designs.decode_layer.weights import OBJECT_BYTES
from flownpu.aie.iron.compat import Buffer, ObjectFifo, Tile, range_, shared
from flownpu.aie.plan.kernel_memory import stack_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.designs.decode_layer.attention import Attention, AttentionEnds
    from flownpu.aie.designs.decode_layer.rows import Phase
    from flownpu.aie.iron.compat import Kernel, ObjectFifoHandle, Worker

_LIMITS = limits_of("npu2")
# Blocks in a compute tile's memory: two for computing, and two that arrive while a phase waits for its x.
_MOST_BLOCKS, _FEWEST_BLOCKS = 4, 2
# Bytes of that memory for constants of kernels, run-time parameters, objects' counters and alignment.
_SMALL_THINGS = _LIMITS.constant_bytes + 512


class Ends(NamedTuple):
    """The host's ends of all streams; lists are by column (`weights`: by column, then stream; `key_value`: by type)."""

    weights: list[list[ObjectFifoHandle]]
    products: list[ObjectFifoHandle]
    vectors: ObjectFifoHandle
    hidden: ObjectFifoHandle
    heads: ObjectFifoHandle
    key_value: list[ObjectFifoHandle]
    attention: AttentionEnds


class _Column(NamedTuple):
    """Four tiles that project, two for each stream of weights, and the tiles that their data goes through.

    Attributes:
        tiles: the compute tiles, the first stream's two before the second's.
        memory: the memory tile.
        streams: the shim tile of each stream of weights.
        products: the shim tile of their products.
    """

    tiles: list[Tile]
    memory: Tile
    streams: list[Tile]
    products: Tile


def _columns(count: int) -> list[_Column]:
    """`count` columns that project: whole ones, then one of two tiles each of the residual tile's and the RoPE tile's.

    The shim tiles of those two have a stream left each, and the residual tile's column does not use its memory tile.
    """
    first = _LIMITS.first_compute_row
    # In this order the second and the third tile reach the memory of the first, and the last tile reaches the third's.
    # The first and the third also reach the memory of the first and the third in the previous column.
    whole = [
        _Column(
            [Tile(column, first + row) for row in (1, 0, 2, 3)], Tile(column, 1), [Tile(column, 0)] * STREAMS,
            Tile(column, 0),
        )
        for column in range(count - 1)
    ]  # fmt: skip
    beside = RESIDUAL_COLUMN, ROPE_COLUMN
    tiles = [Tile(column, first + row) for row in (1, 2) for column in beside]
    streams = [Tile(column, 0) for column in beside]
    return [*whole, _Column(tiles, Tile(RESIDUAL_COLUMN, 1), streams, Tile(RESIDUAL_COLUMN, 0))]


class DecodeArray(NamedTuple):
    """The parts of the array that a sequence uses."""

    workers: list[Worker]
    ends: Ends
    projecting: RunTimeParameters  # the tiles of the columns that project, then the residual tile
    attending: RunTimeParameters  # the RoPE tile, then the cores of attention

    def of_a_sequence(self) -> DecodeArray:
        """The same array for another sequence."""
        return self._replace(projecting=self.projecting.of_a_sequence(), attending=self.attending.of_a_sequence())


@shared
def build(way: Attention) -> DecodeArray:
    """The array for layers of one shape, with a way of attention."""
    tiles = [f"tile_{column}_{row}" for column in range(way.columns) for row in range(TILES)]
    projecting = RunTimeParameters([*tiles, "residual_tile"])
    attending = RunTimeParameters(["rope_tile", *way.cores])
    x = ObjectFifo(tensor(BLOCK_COLUMNS), name="x")
    places = _columns(way.columns)
    sums = _sums(way)
    shares = way.meetings(sums)
    columns = [
        _projection_column(way, number, place, x, projecting, attending, sums[number], shares[number])
        for number, place in enumerate(places)
    ]
    heads, queries, key_value, rope_worker = rope_tile(way, attending)
    vectors, hidden, residual_worker = residual_tile(way, x, queries, projecting)
    attention, attending_workers = way.place(queries, attending)

    def host(column: int) -> Tile:
        return Tile(column, 0)

    ends = Ends(
        weights=[
            [w.prod(tile=tile) for w, tile in zip(streams, place.streams, strict=True)]
            for place, (streams, _, _) in zip(places, columns, strict=True)
        ],
        products=[y.cons(tile=place.products) for place, (_, y, _) in zip(places, columns, strict=True)],
        vectors=vectors.prod(tile=host(RESIDUAL_COLUMN)),
        hidden=hidden.cons(tile=host(RESIDUAL_COLUMN)),
        heads=heads.prod(tile=host(ROPE_COLUMN)),
        key_value=[fifo.cons(tile=host(ROPE_COLUMN)) for fifo in key_value],
        attention=attention,
    )
    workers = [tile for _, _, tiles_of_column in columns for tile in tiles_of_column]
    return DecodeArray([*workers, residual_worker, rope_worker, *attending_workers], ends, projecting, attending)


# --- Projections ------------------------------------------------------------------------------------------------------


def _sums(way: Attention) -> list[list[Meeting]]:
    """By column and tile: the way on which the sums of a row that a span shares meet in the span's first tile.

    On the way, the sums of a stream's two tiles meet in the first of the two.
    """
    kind, found = tensor(BLOCK_ROWS, F32), list[list[Meeting]]()
    behind: list[ObjectFifoHandle] = []
    for column in reversed(range(way.columns)):
        second, third, last = (ObjectFifo(kind, name=f"sum_{column}_{tile}") for tile in range(1, TILES))
        leaves = column % way.span == 0
        across = [] if leaves else [ObjectFifo(kind, name=f"sum_{column}_0")]
        meetings = [
            Meeting([second.cons(), third.cons(), *behind], [fifo.prod() for fifo in across], leaves),
            Meeting([], [second.prod()], leaves=False),
            Meeting([last.cons()], [third.prod()], leaves),
            Meeting([], [last.prod()], leaves=False),
        ]
        found.insert(0, meetings)
        behind = [fifo.cons() for fifo in across]
    return found


def _projection_column(
    way: Attention, column: int, place: _Column, x: ObjectFifo, projecting: RunTimeParameters,
    attending: RunTimeParameters, sums_of_tiles: Sequence[Meeting], shares: Sequence[Meeting | None],
) -> tuple[list[ObjectFifo], ObjectFifo, list[Worker]]:  # fmt: skip
    """The streams of weights, the products, and the four tiles of a column."""
    shape, memory, block, product = way.shape, place.memory, tensor(BLOCK_BYTES, U8), tensor(BLOCK_ROWS)
    streams = [ObjectFifo(tensor(OBJECT_BYTES, U8), name=f"w_{column}_{stream}") for stream in range(STREAMS)]
    offsets = [tile * BLOCK_BYTES for tile in range(TILES_OF_STREAM)]
    parts = [part for w in streams for part in w.cons().split(offsets, memory, obj_types=[block] * TILES_OF_STREAM)]
    y = ObjectFifo(tensor(STREAMS * BLOCK_ROWS), name=f"y_{column}")
    offsets = [stream * BLOCK_ROWS for stream in range(STREAMS)]
    y_parts = y.prod().join(offsets, memory, obj_types=[product] * STREAMS)

    line, sums, accumulator = tensor(way.x_size), tensor(way.x_size // 16), tensor(BLOCK_ROWS, F32)
    gated = "store_gelu_mul" if shape.activation == "geglu" else "store_silu_mul"
    kernels = [
        kernel("fused_dqp", "fused_dqp_take", tensor(BLOCK_COLUMNS), line, sums, I32),
        kernel("epilogue", "zero_f32", accumulator, I32),
        kernel("epilogue", "add_f32", accumulator, accumulator, I32),
        kernel("fused_dqp", "fused_dqp", block, line, sums, accumulator, I32, I32),
        kernel("epilogue", "store_bf16", accumulator, product, I32),
        kernel("epilogue", gated, accumulator, accumulator, product, I32),
    ]
    kinds = {"x": line, "sums": sums, "accumulator": accumulator, "second": accumulator}
    share_kinds, share_kernels = way.share()
    # The objects of x, of y, and of what tiles give one another (two fifos at most).
    fifos_held = [tensor(BLOCK_COLUMNS), product, accumulator, accumulator]
    held = [*kinds.values(), *share_kinds.values(), *fifos_held * 2]
    room = _LIMITS.compute.memory_bytes - stack_for(("flow_kv_split",)) - _SMALL_THINGS - sum(map(bytes_of, held))
    blocks_ahead = max(_FEWEST_BLOCKS, min(_MOST_BLOCKS, room // BLOCK_BYTES))
    workers = []
    for row in range(TILES):
        number, name = column * TILES + row, f"tile_{column}_{row}"
        sharer = number % (TILES * way.span), TILES * way.span
        stream, place_in_stream = divmod(row, TILES_OF_STREAM)
        # The results of a stream's tiles leave through the first of them.
        out = None if place_in_stream else y_parts[stream].prod()
        fifos = parts[row].cons(depth=blocks_ahead), x.cons(), out
        buffers, share_buffers = (
            [Buffer(kind, name=f"{name}_{what}") for what, kind in of.items()] for of in (kinds, share_kinds)
        )
        # A tile that only projects has no words of attention.
        words = [projecting.buffers[number], *([attending.buffers[1 + number]] if share_kinds else [])]
        arguments = [
            *fifos, sharer, sums_of_tiles[row], buffers, words, projecting.barrier, kernels, share_buffers,
            share_kernels, way, shares[row],
        ]  # fmt: skip
        workers.append(worker(_tile, arguments, tile=place.tiles[row]))
    return streams, y, workers


_GATED = 1024  # the factor of gated rows in words that count rows
_START = 1 << 16  # the factor, in the word of shared rows, of the tile where sharing starts
_PLANES = 1024  # the factor of planes beyond the first in the word that counts columns
_LAYERS = 13  # the word with the number of layers, after the words of four phases


def projecting_words(phases: Sequence[Phase | None], column: int, layers: int) -> list[int | None]:
    """The run-time parameters of a column's tiles for `layers` equal layers.

    Word 0: phases; words 1 to 12: three for each of up to four phases, None (left as they are) where there are fewer;
    word 13: layers.

    The three of a phase: columns / 256 + 1024 x planes beyond the first; rows of a stream; rows that the span shares.
    Rows are plain ones + 1024 x gated ones; the word of shared rows has 65536 x the tile that sharing starts with in
    addition. A phase that is None has no blocks.
    """
    words: list[int | None] = [len(phases)]
    for phase in phases:
        if phase is None:
            words += [0, 0, 0]
            continue
        rows, kind = phase.columns[column], _GATED if phase.projection.gated else 1
        columns = phase.projection.column_blocks + _PLANES * (phase.projection.planes - 1)
        words += [columns, rows.rows * kind, rows.shared * kind + rows.start * _START]
    return [*words, *[None] * (_LAYERS - len(words)), layers]


def _tile(
    w: ObjectFifoHandle, parts: ObjectFifoHandle, y: ObjectFifoHandle | None, sharer: tuple[int, int], of_span: Meeting,
    buffers: list[Buffer], words: list[Buffer], barrier: Any, kernels: list[Kernel], share_buffers: list[Buffer],
    share_kernels: list[Kernel], way: Attention, share: Meeting | None,
) -> None:  # fmt: skip
    """The program of a projecting tile. Words: `projecting_words`.

    If the tile has a share of attention, that comes after the first phase, which is not gated. All rows are shared, by
    the tiles of a span or of a stream: each multiplies its blocks and adds the sums that it is given, and the first
    tile has the whole sum. `sharer`: which of how many tiles of the span it is; `of_span`: how the span's sums meet.
    """
    (x, sums, accumulator, second), rtp, rtp_of_share = buffers, words[0], words[-1]
    take, zero, add, dqp, store, store_gated = kernels
    parts_of_line = way.shape.line // BLOCK_COLUMNS
    # The second tile of a stream gives its sums to the first.
    of_stream = of_span if y is None else Meeting(of_span.others[:1], [], leaves=True)

    def take_parts(count: Any) -> None:
        for j in range_(count):
            take(parts.acquire(1), x, sums, j)
            parts.release(1)

    def give(y: ObjectFifoHandle, totals: list[Any]) -> None:
        """Send a row's sums to the host; without sums, an empty object that accompanies the column's other stream."""
        out = y.acquire(1)
        if len(totals) > 1:
            store_gated(*totals, out, BLOCK_ROWS)
        elif totals:
            store(*totals, out, BLOCK_ROWS)
        y.release(1)

    def share_rows(
        blocks: Any, planes: Any, rows: Any, totals: list[Buffer], tile: Any, tiles: int, meeting: Meeting
    ) -> None:
        """Multiply this tile's blocks of shared rows: every `tiles`-th, counted through all blocks row after row."""
        for row in range_(rows):
            for weight, buffer in enumerate(totals):
                total = meeting.onward[0].acquire(1) if meeting.onward else buffer
                zero(total, BLOCK_ROWS)
                before = (row * len(totals) + weight) * (blocks % tiles)
                first = (tile + before * (tiles - 1)) % tiles
                for j in range_((blocks + (tiles - 1) - first) // tiles):
                    dqp(w.acquire(1), x, sums, total, first + j * tiles, planes)
                    w.release(1)
                for other in meeting.others:
                    add(other.acquire(1), total, BLOCK_ROWS)
                    other.release(1)
                for onward in meeting.onward:
                    onward.release(1)
            if y is not None and meeting.leaves:
                give(y, [] if meeting.onward else totals)
        # The last object may have a block for the stream's first tile only; the other tiles drop their part of it.
        if sharer[0] % TILES_OF_STREAM:
            every = blocks * rows * len(totals)
            for _ in range_((every + tiles - tile) // tiles - (every + (tiles - 1) - tile) // tiles):
                w.acquire(1)
                w.release(1)

    def project(phase: Any, *, may_be_gated: bool = True) -> None:
        of_row, rows, shared = (rtp[phase * 3 + place] for place in (1, 2, 3))
        columns, planes = of_row % _PLANES, of_row // _PLANES + 1
        take_parts((columns + (parts_of_line - 1)) // parts_of_line * parts_of_line)
        place, tiles = sharer
        tile = (place + tiles - shared // _START) % tiles
        kinds = [
            ([accumulator], rows % _GATED, shared % _GATED),
            ([accumulator, second], rows // _GATED, shared % _START // _GATED),
        ][: 1 + may_be_gated]
        for totals, _, rows_of_span in kinds:
            share_rows(columns * planes, planes, rows_of_span, totals, tile, tiles, of_span)
        place, tiles = place % TILES_OF_STREAM, TILES_OF_STREAM
        for totals, rows_of_stream, _ in kinds:
            share_rows(columns * planes, planes, rows_of_stream, totals, place, tiles, of_stream)

    barrier.wait_for_value(1)
    barrier.release_with_value(1)
    for _ in range_(rtp[_LAYERS]):
        # The last thing that the host awaits of a call with an LM head is the product of the head's projection. Then it
        # may write the next call's words, so the words that are needed after a first projection are read before it.
        phases, counts = rtp[0], way.counts_of_share(rtp_of_share)
        if share is not None:
            project(0, may_be_gated=False)
            way.attend_to_share(w, y, x, take_parts, rtp_of_share, counts, share_buffers, share_kernels, share)
        for phase in range_(int(share is not None), phases):
            project(phase)

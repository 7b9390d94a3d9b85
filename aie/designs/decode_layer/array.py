# SPDX-License-Identifier: Apache-2.0
"""The array of a decode layer (design.py): its tiles, their programs and the fifos between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flownpu.aie.designs.common import (
    BF16,
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
from flownpu.aie.designs.decode_layer.attention import Chain, rope_tile
from flownpu.aie.designs.decode_layer.shape import RESIDUAL_COLUMN, ROPE_COLUMN
from flownpu.aie.designs.decode_layer.weights import HALF_BLOCK, STREAMS
from flownpu.aie.iron.compat import Buffer, ObjectFifo, Tile, range_

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.aie.designs.decode_layer.attention import Attention, AttentionEnds, Meeting
    from flownpu.aie.designs.decode_layer.shape import ColumnRows, LayerShape, Projection
    from flownpu.aie.iron.compat import Kernel, ObjectFifoHandle, Worker

__all__ = ["DecodeArray", "Ends", "build", "phase_words"]

_SHARE = TILES // STREAMS
_LIMITS = limits_of("npu2")
# Blocks in a compute tile's memory: two to work, two more that arrive while a phase waits for its x.
_MOST_BLOCKS, _FEWEST_BLOCKS = 4, 2
# Bytes of it for constants of kernels, and for run-time parameters, objects' counters and what alignment takes.
_SMALL_THINGS = _LIMITS.constant_bytes + 512


class Ends(NamedTuple):
    """The host's ends of all streams; lists are by column."""

    weights: list[list[ObjectFifoHandle]]
    products: list[ObjectFifoHandle]
    vectors: ObjectFifoHandle
    hidden: ObjectFifoHandle
    heads: ObjectFifoHandle
    key_value: ObjectFifoHandle
    attention: AttentionEnds


class _Column(NamedTuple):
    """Four tiles that project, and the tiles of their streams: `streams`, of the shim, one for each stream."""

    tiles: list[Tile]
    memory: Tile
    streams: list[Tile]
    products: Tile


def _columns(count: int) -> list[_Column]:
    """Whole columns from the first on, and one of tiles that the residual tile's column and the RoPE tile's have left.

    Their shim tiles have a stream left each, and the residual tile's memory tile is free.
    """
    first = _LIMITS.first_compute_row
    whole = [
        _Column(
            [Tile(column, first + row) for row in range(TILES)], Tile(column, 1), [Tile(column, 0)] * STREAMS,
            Tile(column, 0),
        )
        for column in range(count - 1)
    ]  # fmt: skip
    beside = RESIDUAL_COLUMN, ROPE_COLUMN
    # In an order in which each reaches the memory of the one before it, and the inner two that of the column before.
    left, right = beside
    tiles = [Tile(column, first + row) for column, row in [(right, 1), (left, 1), (left, 2), (right, 2)]]
    streams = [Tile(column, 0) for column in beside]
    return [*whole, _Column(tiles, Tile(RESIDUAL_COLUMN, 1), streams, Tile(RESIDUAL_COLUMN, 0))]


class DecodeArray(NamedTuple):
    """What a sequence needs of the array."""

    workers: list[Worker]
    ends: Ends
    projecting: RunTimeParameters  # the tiles of the columns that project, then the residual tile
    attending: RunTimeParameters  # the RoPE tile, then the cores of attention


def build(way: Attention) -> DecodeArray:
    """The array for layers of one shape, with a way of attention."""
    shape = way.shape
    tiles = [f"tile_{column}_{row}" for column in range(way.columns) for row in range(TILES)]
    projecting = RunTimeParameters([*tiles, "residual_tile"])
    attending = RunTimeParameters(["rope_tile", *way.cores])
    x = ObjectFifo(tensor(BLOCK_COLUMNS), name="x")
    places = _columns(way.columns)
    chains = [_chain(column) for column in range(way.columns)]
    meetings = way.meetings(chains)
    columns = [
        _projection_column(way, number, place, x, projecting, attending, chains[number], meetings)
        for number, place in enumerate(places)
    ]
    vectors, hidden, residual_worker = _residual_tile(shape, x, projecting)
    heads, queries, key_value, rope_worker = rope_tile(way, attending)
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
        key_value=key_value.cons(tile=host(ROPE_COLUMN)),
        attention=attention,
    )
    workers = [tile for _, _, tiles_of_column in columns for tile in tiles_of_column]
    return DecodeArray([*workers, residual_worker, rope_worker, *attending_workers], ends, projecting, attending)


# --- Projections ------------------------------------------------------------------------------------------------------


def _chain(column: int) -> list[Chain]:
    """The ends of a column's tiles: sums of shared rows, and shares of attention, go to the tile before."""
    fifos = [ObjectFifo(tensor(BLOCK_ROWS, F32), name=f"sum_{column}_{row}") for row in range(TILES - 1)]
    taken, given = [[fifo.cons()] for fifo in fifos], [[fifo.prod()] for fifo in fifos]
    return [Chain(*ends) for ends in zip([*taken, []], [[], *given], strict=True)]


def _projection_column(
    way: Attention, column: int, place: _Column, x: ObjectFifo, projecting: RunTimeParameters,
    attending: RunTimeParameters, chain: list[Chain], meetings: Mapping[tuple[int, int], Meeting],
) -> tuple[list[ObjectFifo], ObjectFifo, list[Worker]]:  # fmt: skip
    """The streams of weights, the products, and the four tiles of a column."""
    shape, memory, block, product = way.shape, place.memory, tensor(BLOCK_BYTES, U8), tensor(BLOCK_ROWS)
    streams = [ObjectFifo(tensor(_SHARE * HALF_BLOCK, U8), name=f"w_{column}_{stream}") for stream in range(STREAMS)]
    offsets = [tile * HALF_BLOCK for tile in range(_SHARE)]
    parts = [part for w in streams for part in w.cons().split(offsets, memory, obj_types=[block] * _SHARE)]
    y = ObjectFifo(tensor(TILES * BLOCK_ROWS), name=f"y_{column}")
    y_parts = y.prod().join([row * BLOCK_ROWS for row in range(TILES)], memory, obj_types=[product] * TILES)

    line, sums, accumulator = tensor(shape.x_size), tensor(shape.x_size // 16), tensor(BLOCK_ROWS, F32)
    gated = "store_gelu_mul" if shape.activation == "geglu" else "store_silu_mul"
    kernels = [
        kernel("fused_dqp", "fused_dqp_take", tensor(BLOCK_COLUMNS), line, sums, I32),
        kernel("epilogue", "zero_f32", accumulator, I32),
        kernel("epilogue", "add_f32", accumulator, accumulator, I32),
        kernel("fused_dqp", "fused_dqp", block, line, sums, accumulator, I32),
        kernel("epilogue", "store_bf16", accumulator, product, I32),
        kernel("epilogue", gated, accumulator, accumulator, product, I32),
    ]
    kinds = {"x": line, "sums": sums, "accumulator": accumulator, "second": accumulator}
    share_kinds, share_kernels = way.share()
    # x, y and what tiles give one another: of shares one fifo more is held at most.
    fifos_held = [tensor(BLOCK_COLUMNS), product, accumulator, *[accumulator] * bool(share_kinds)]
    held = [*kinds.values(), *share_kinds.values(), *fifos_held * 2]
    room = _LIMITS.compute.memory_bytes - _LIMITS.stack_bytes - _SMALL_THINGS - sum(map(bytes_of, held))
    blocks_ahead = max(_FEWEST_BLOCKS, min(_MOST_BLOCKS, room // BLOCK_BYTES))
    workers = []
    for row in range(TILES):
        number, name = column * TILES + row, f"tile_{column}_{row}"
        fifos = parts[row].cons(depth=blocks_ahead), x.cons(), y_parts[row].prod()
        buffers, share_buffers = (
            [Buffer(kind, name=f"{name}_{what}") for what, kind in of.items()] for of in (kinds, share_kinds)
        )
        # A tile that only projects has no words of attention.
        words = [projecting.buffers[number], *([attending.buffers[1 + number]] if share_kinds else [])]
        arguments = [
            *fifos, *chain[row], buffers, words, projecting.barrier, kernels, share_buffers, share_kernels, way,
            meetings.get((column, row)),
        ]  # fmt: skip
        workers.append(worker(_tile, arguments, tile=place.tiles[row]))
    return streams, y, workers


_GATED = 4096  # what gated groups are multiplied with in their word
_GATED_SHARED, _TAKEN, _FIRST = 4, 16, 4096  # gated shared rows, and blocks of a shared row, in theirs


def phase_words(projection: Projection, rows: ColumnRows, tile: int) -> list[int]:
    """A tile's words of a phase: its blocks in a row; its groups; its shared rows, and what it takes of one.

    Groups: plain + 4096 gated ones. The last: shared rows, plain + 4 gated ones, + 16 blocks + 4096 times the first.
    """
    gated = projection.gated
    groups = len(rows.groups) * (_GATED if gated else 1)
    shared = rows.shared * (_GATED_SHARED if gated else 1)
    blocks = _TAKEN * projection.quarter_count(tile) + _FIRST * tile * projection.quarter
    return [projection.blocks, groups, shared + blocks]


def _tile(
    w: ObjectFifoHandle, parts: ObjectFifoHandle, y: ObjectFifoHandle, sums_in: list[ObjectFifoHandle],
    sums_out: list[ObjectFifoHandle], buffers: list[Buffer], words: list[Buffer], barrier: Any, kernels: list[Kernel],
    share_buffers: list[Buffer], share_kernels: list[Kernel], way: Attention, meeting: Meeting | None,
) -> None:  # fmt: skip
    """A projecting tile. Words: phases, and those of each (`phase_words`).

    Where it has a share of attention, this comes after the first phase, which is not gated. Of a row that the tiles of
    a column share, each multiplies its blocks and adds what the tile after it made; the first has the whole sum.
    """
    x, sums, accumulator, second = buffers
    take, zero, add, dqp, store, store_gated = kernels
    rtp, rtp_of_share = words[0], words[-1]
    parts_of_line = way.shape.line // BLOCK_COLUMNS

    def take_parts(count: Any) -> None:
        for j in range_(count):
            take(parts.acquire(1), x, sums, j)
            parts.release(1)

    def multiply(total: Any, blocks: Any, first: Any = 0) -> None:
        for j in range_(blocks):
            dqp(w.acquire(1), x, sums, total, first + j)
            w.release(1)

    def give(totals: list[Any]) -> None:
        out = y.acquire(1)
        if len(totals) > 1:
            store_gated(*totals, out, BLOCK_ROWS)
        elif totals:
            store(*totals, out, BLOCK_ROWS)
        y.release(1)

    def whole_row(blocks: Any, totals: list[Buffer]) -> None:
        for total in totals:
            zero(total, BLOCK_ROWS)
            multiply(total, blocks)
        give(totals)

    def shared_row(blocks: Any, shared: Any, totals: list[Buffer]) -> None:
        quarter, taken = (blocks + (TILES - 1)) // TILES, shared % _FIRST // _TAKEN
        for buffer in totals:
            total = sums_out[0].acquire(1) if sums_out else buffer
            zero(total, BLOCK_ROWS)
            for _ in range_(quarter - taken):
                w.acquire(1)
                w.release(1)
            multiply(total, taken, shared // _FIRST)
            for before in sums_in:
                add(before.acquire(1), total, BLOCK_ROWS)
                before.release(1)
            for after in sums_out:
                after.release(1)
        give([] if sums_out else totals)

    def project(phase: Any, *, may_be_gated: bool = True) -> None:
        blocks, groups, shared = (rtp[phase * 3 + place] for place in (1, 2, 3))
        take_parts((blocks + (parts_of_line - 1)) // parts_of_line * parts_of_line)
        kinds = [([accumulator], shared % _GATED_SHARED, groups % _GATED)]
        if may_be_gated:
            gated = shared % _TAKEN // _GATED_SHARED, groups // _GATED
            kinds.append(([accumulator, second], *gated))
        for totals, shared_rows, _ in kinds:
            for _ in range_(shared_rows):
                shared_row(blocks, shared, totals)
        for totals, _, rows in kinds:
            for _ in range_(rows):
                whole_row(blocks, totals)

    barrier.wait_for_value(1)
    barrier.release_with_value(1)
    first = 0
    if meeting is not None:
        project(0, may_be_gated=False)
        way.attend_to_share(w, y, x, take_parts, rtp_of_share, share_buffers, share_kernels, meeting)
        first = 1
    for phase in range_(first, rtp[0]):
        project(phase)


# --- The residual stream ----------------------------------------------------------------------------------------------


def _residual_tile(
    shape: LayerShape, x: ObjectFifo, parameters: RunTimeParameters
) -> tuple[ObjectFifo, ObjectFifo, Worker]:
    """The tile that adds to the residual stream, normalises it, and deals every projection's x out in parts.

    Words: epsilon's bits; lines of attention's output (with split keys, of the queries before it); whether there is a
    feed-forward; lines of its activations.
    """
    line, norms, post_norms, hidden_size = tensor(shape.line), shape.entry_norms, shape.post_norms, shape.hidden
    vectors, hidden = ObjectFifo(line, name="vectors"), ObjectFifo(line, name="hidden", depth=1)
    copy = kernel("copy_part", "copy_part", line, tensor(BLOCK_COLUMNS), I32, I32)
    if post_norms:
        kernels = [
            kernel("rms_norm", "rms_norm_add", *[line] * 4, *[I32] * 3),
            kernel("rms_norm", "rms_norm", *[line] * 3, *[I32] * 3),
        ]
    else:
        kernels = [kernel("rms_norm", "add_rms_norm", *[line] * 5, *[I32] * 3)]

    def core(
        vectors: ObjectFifoHandle, x: ObjectFifoHandle, hidden: ObjectFifoHandle, residual: Buffer, normal: Buffer,
        rtp: Buffer, barrier: Any, copy: Kernel, kernels: list[Kernel],
    ) -> None:  # fmt: skip
        barrier.wait_for_value(1)
        barrier.release_with_value(1)
        sizes = 1, hidden_size, rtp[0]
        context_lines, second, activated_lines = rtp[1], rtp[2], rtp[3]

        def enter(weights: list[Any], update: Any, before: Any, after: Any) -> None:
            """After = before + update, normalised first where there are post-norms; normal = norm(after)."""
            if post_norms:
                kernels[0](update, weights[0], before, after, *sizes)
                kernels[1](after, weights[1], normal, *sizes)
            else:
                kernels[0](update, before, weights[0], after, normal, *sizes)

        def deal(whole: Any) -> None:
            for part in range_(shape.line // BLOCK_COLUMNS):
                copy(whole, x.acquire(1), part, BLOCK_COLUMNS)
                x.release(1)

        def pass_on(lines: Any) -> None:
            for _ in range_(lines):
                deal(vectors.acquire(1))
                vectors.release(1)

        held: Any = vectors.acquire(norms + 2)
        enter([held[1 + place] for place in range(norms)], held[1 + norms], held[0], residual)
        vectors.release(norms + 2)
        deal(normal)
        pass_on(context_lines)
        for _ in range_(second):
            held, after = vectors.acquire(norms + 1), hidden.acquire(1)
            enter([held[place] for place in range(norms)], held[norms], residual, after)
            vectors.release(norms + 1)
            hidden.release(1)
            deal(normal)
        pass_on(activated_lines)

    # The kernels write D elements; what is sent beyond is multiplied with minima of padding, which are 0: it must be
    # finite, and zeros are.
    normal = Buffer(line, initial_value=np.zeros(shape.line, BF16), name="normal")
    fifos = vectors.cons(depth=norms + 2), x.prod(), hidden.prod()
    arguments = [*fifos, Buffer(line, name="residual"), normal, parameters.buffers[-1], parameters.barrier]
    return (
        vectors,
        hidden,
        worker(core, [*arguments, copy, kernels], tile=Tile(RESIDUAL_COLUMN, _LIMITS.first_compute_row)),
    )

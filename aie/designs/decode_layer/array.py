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
from flownpu.aie.designs.decode_layer.attention import rope_tile
from flownpu.aie.designs.decode_layer.shape import RESIDUAL_COLUMN, ROPE_COLUMN
from flownpu.aie.designs.decode_layer.weights import HALF_BLOCK, STREAMS
from flownpu.aie.iron.compat import Buffer, ObjectFifo, Tile, range_

if TYPE_CHECKING:
    from flownpu.aie.designs.decode_layer.attention import Attention, AttentionEnds
    from flownpu.aie.designs.decode_layer.shape import LayerShape
    from flownpu.aie.iron.compat import Kernel, ObjectFifoHandle, Worker

__all__ = ["DecodeArray", "Ends", "build"]

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
    tables: ObjectFifoHandle
    key: ObjectFifoHandle
    value: ObjectFifoHandle
    value_line: ObjectFifoHandle
    attention: AttentionEnds


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
    columns = [_projection_column(way, column, x, projecting, attending) for column in range(way.columns)]
    vectors, hidden, residual_worker = _residual_tile(shape, x, projecting)
    heads, tables, queries, key, rope_worker = rope_tile(way, attending)
    value = ObjectFifo(tensor(shape.kv_heads * shape.d), name="value")
    value_line = value.cons().forward(Tile(RESIDUAL_COLUMN, 1), name="value_line")
    attention, attending_workers = way.place(queries, attending)

    def host(column: int) -> Tile:
        return Tile(column, 0)

    ends = Ends(
        weights=[[w.prod(tile=host(column)) for w in streams] for column, (streams, _, _) in enumerate(columns)],
        products=[y.cons(tile=host(column)) for column, (_, y, _) in enumerate(columns)],
        vectors=vectors.prod(tile=host(RESIDUAL_COLUMN)),
        hidden=hidden.cons(tile=host(RESIDUAL_COLUMN)),
        heads=heads.prod(tile=host(ROPE_COLUMN)),
        tables=tables.prod(tile=host(ROPE_COLUMN)),
        key=key.cons(tile=host(ROPE_COLUMN)),
        value=value.prod(tile=host(RESIDUAL_COLUMN)),
        value_line=value_line.cons(tile=host(RESIDUAL_COLUMN)),
        attention=attention,
    )
    workers = [tile for _, _, tiles_of_column in columns for tile in tiles_of_column]
    return DecodeArray([*workers, residual_worker, rope_worker, *attending_workers], ends, projecting, attending)


# --- Projections ------------------------------------------------------------------------------------------------------


def _projection_column(
    way: Attention, column: int, x: ObjectFifo, projecting: RunTimeParameters, attending: RunTimeParameters
) -> tuple[list[ObjectFifo], ObjectFifo, list[Worker]]:
    """The streams of weights, the products, and the four tiles of a column."""
    shape, memory, block, product = way.shape, Tile(column, 1), tensor(BLOCK_BYTES, U8), tensor(BLOCK_ROWS)
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
        kernel("fused_dqp", "fused_dqp", block, line, sums, accumulator, I32),
        kernel("epilogue", "store_bf16", accumulator, product, I32),
        kernel("epilogue", gated, accumulator, accumulator, product, I32),
    ]
    kinds = {"x": line, "sums": sums, "accumulator": accumulator, "second": accumulator}
    share_kinds, share_kernels = way.share()
    held = [*kinds.values(), *share_kinds.values(), *[tensor(BLOCK_COLUMNS), product] * 2]
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
        arguments = [*fifos, buffers, words, projecting.barrier, kernels, share_buffers, share_kernels, way]
        workers.append(worker(_tile, arguments, tile=Tile(column, _LIMITS.first_compute_row + row)))
    return streams, y, workers


def _tile(
    w: ObjectFifoHandle, parts: ObjectFifoHandle, y: ObjectFifoHandle, buffers: list[Buffer], words: list[Buffer],
    barrier: Any, kernels: list[Kernel], share_buffers: list[Buffer], share_kernels: list[Kernel], way: Attention,
) -> None:  # fmt: skip
    """A projecting tile. Words: phases; for each its blocks in a row, its plain row groups, its gated ones.

    Where it has a share of attention, this comes after the first phase, which is not gated.
    """
    x, sums, accumulator, second = buffers
    take, zero, dqp, store, store_gated = kernels
    rtp, rtp_of_share = words[0], words[-1]
    parts_of_line = way.shape.line // BLOCK_COLUMNS

    def take_parts(count: Any) -> None:
        for j in range_(count):
            take(parts.acquire(1), x, sums, j)
            parts.release(1)

    def multiply(y: Buffer, blocks: Any) -> None:
        zero(y, BLOCK_ROWS)
        for j in range_(blocks):
            dqp(w.acquire(1), x, sums, y, j)
            w.release(1)

    def project(phase: Any, *, may_be_gated: bool = True) -> None:
        blocks, plain, gated = (rtp[phase * 3 + place] for place in (1, 2, 3))
        take_parts((blocks + (parts_of_line - 1)) // parts_of_line * parts_of_line)
        for _ in range_(plain):
            multiply(accumulator, blocks)
            store(accumulator, y.acquire(1), BLOCK_ROWS)
            y.release(1)
        if not may_be_gated:
            return
        for _ in range_(gated):
            multiply(accumulator, blocks)
            multiply(second, blocks)
            store_gated(accumulator, second, y.acquire(1), BLOCK_ROWS)
            y.release(1)

    barrier.wait_for_value(1)
    barrier.release_with_value(1)
    first = 0
    if share_buffers:
        project(0, may_be_gated=False)
        way.attend_to_share(w, y, x, take_parts, rtp_of_share, share_buffers, share_kernels)
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

# SPDX-License-Identifier: Apache-2.0
"""The array of a split decode layer (designs/split_layer.py): its tiles, their programs and the fifos between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import (
    F32,
    I32,
    PARAMETERS,
    TILES,
    U8,
    RunTimeParameters,
    kernel,
    limits_of,
    tensor,
    worker,
)
from flownpu.aie.designs.decode_layer_array import HALF_BLOCK, RESIDUAL_COLUMN, DecodeArray, Ends, residual_tile
from flownpu.aie.designs.decode_layer_attention import ROPE_COLUMN
from flownpu.aie.designs.decode_layer_shape import BLOCK_BYTES, BLOCK_COLUMNS
from flownpu.aie.designs.split_layer_shape import COLUMNS, PART, PARTIAL_LINE
from flownpu.aie.iron_compat import Buffer, ObjectFifo, Tile, range_

if TYPE_CHECKING:
    from flownpu.aie.designs.split_layer_shape import SplitShape
    from flownpu.aie.iron_compat import Kernel, ObjectFifoHandle, Worker

__all__ = ["build"]

_STREAMS_OF_COLUMN = 2
_SHARE = TILES // _STREAMS_OF_COLUMN
_FIRST_ROW = limits_of("npu2").first_compute_row
_BLOCKS_AHEAD = 4  # blocks in a compute tile's memory, as in decode_layer_array.py
_STATE = 16 + 2 * 8 * 16  # kernels/flow_kv_split.cc
_WEIGHTS_OF_HEAD = 32  # kernels/flow_kv_merge.cc


def build(shape: SplitShape) -> DecodeArray:
    """The array for layers of one shape. `attending` has the RoPE tile's words, then those of each tile's share."""
    names = [f"tile_{column}_{row}" for column in range(COLUMNS) for row in range(TILES)]
    projecting = RunTimeParameters([*names, "residual_tile"])
    attending = RunTimeParameters(["rope_tile", *(f"share_{name}" for name in names)])
    x = ObjectFifo(tensor(BLOCK_COLUMNS), name="x")
    columns = [_column(shape, column, x, projecting, attending) for column in range(COLUMNS)]
    vectors, hidden, residual_worker = residual_tile(shape, x, projecting)
    heads, tables, queries, key, rope_worker = _rope_tile(shape, attending)
    value = ObjectFifo(tensor(shape.kv_heads * shape.d), name="value")
    value_line = value.cons().forward(Tile(RESIDUAL_COLUMN, 1), name="value_line")

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
        keys=[],
        values=[],
        contexts=[queries.cons(tile=host(ROPE_COLUMN))],
    )
    workers = [tile for _, _, tiles_of_column in columns for tile in tiles_of_column]
    return DecodeArray([*workers, residual_worker, rope_worker], ends, projecting, attending)


# --- Projections and attention ----------------------------------------------------------------------------------------


def _column(
    shape: SplitShape, column: int, x: ObjectFifo, projecting: RunTimeParameters, attending: RunTimeParameters
) -> tuple[list[ObjectFifo], ObjectFifo, list[Worker]]:
    """The streams of weights, keys and values, the products, and the four tiles of a column."""
    memory, block, product = Tile(column, 1), tensor(BLOCK_BYTES, U8), tensor(PART)
    streams = [
        ObjectFifo(tensor(_SHARE * HALF_BLOCK, U8), name=f"w_{column}_{stream}") for stream in range(_STREAMS_OF_COLUMN)
    ]
    offsets = [tile * HALF_BLOCK for tile in range(_SHARE)]
    parts = [part for w in streams for part in w.cons().split(offsets, memory, obj_types=[block] * _SHARE)]
    y = ObjectFifo(tensor(TILES * PART), name=f"y_{column}")
    y_parts = y.prod().join([row * PART for row in range(TILES)], memory, obj_types=[product] * TILES)

    line, sums, accumulator = tensor(shape.x_size), tensor(shape.x_size // 16), tensor(PART, F32)
    state, outputs, rtp = tensor(_STATE, F32), tensor(shape.group * shape.d, F32), tensor(PARAMETERS, I32)
    shares = tensor(shape.kv_heads * PART // 2, F32)
    gated = "store_gelu_mul" if shape.activation == "geglu" else "store_silu_mul"
    projection_kernels = [
        kernel("fused_dqp", "fused_dqp_take", tensor(BLOCK_COLUMNS), line, sums, I32),
        kernel("epilogue", "zero_f32", accumulator, I32),
        kernel("fused_dqp", "fused_dqp", block, line, sums, accumulator, I32),
        kernel("epilogue", "store_bf16", accumulator, product, I32),
        kernel("epilogue", gated, accumulator, accumulator, product, I32),
    ]
    attention_kernels = [
        kernel("flow_kv_split", "flow_kv_split_start", rtp, state, outputs, I32, I32),
        kernel("flow_kv_split", "flow_kv_split", block, line, rtp, state, outputs, I32, I32, I32),
        kernel("flow_kv_split", "flow_kv_split_store", state, outputs, product, I32, I32),
        kernel("flow_kv_split", "flow_kv_split_share", state, shares, I32),
        kernel("flow_kv_split", "flow_kv_split_give", shares, product, I32),
    ]
    workers = []
    for row in range(TILES):
        number = column * TILES + row
        name = f"tile_{column}_{row}"
        fifos = parts[row].cons(depth=_BLOCKS_AHEAD), x.cons(), y_parts[row].prod()
        kinds = {
            "x": line, "sums": sums, "accumulator": accumulator, "second": accumulator, "state": state,
            "outputs": outputs, "shares": shares,
        }  # fmt: skip
        buffers = [Buffer(kind, name=f"{name}_{what}") for what, kind in kinds.items()]
        words = projecting.buffers[number], attending.buffers[1 + number]
        arguments = [*fifos, buffers, *words, projecting.barrier, projection_kernels, attention_kernels, shape]
        workers.append(worker(_tile, arguments, tile=Tile(column, _FIRST_ROW + row)))
    return streams, y, workers


def _tile(
    w: ObjectFifoHandle, parts: ObjectFifoHandle, y: ObjectFifoHandle, buffers: list[Buffer], rtp: Buffer,
    share: Buffer, barrier: Any, projection: list[Kernel], attention: list[Kernel], shape: SplitShape,
) -> None:  # fmt: skip
    """A tile. Words: phases; for each its blocks in a row, its plain row groups, its gated ones (the first has none).

    Words of its share of the keys: those of attention (kernels/README.md), objects a KV head first; word 8, positions
    from one of its objects to the next; word 9, parts of the queries; word 10, KV heads: none, where a call has no
    attention. Attention comes after the first phase.
    """
    x, sums, accumulator, second, state, outputs, shares = buffers
    take, zero, dqp, store, store_gated = projection
    start, attend, store_output, store_share, give_share = attention
    rows, d, parts_of_line = shape.group, shape.d, shape.line // BLOCK_COLUMNS

    def take_parts(count: Any) -> None:
        for j in range_(count):
            take(parts.acquire(1), x, sums, j)
            parts.release(1)

    def multiply(y: Buffer, blocks: Any) -> None:
        zero(y, PART)
        for j in range_(blocks):
            dqp(w.acquire(1), x, sums, y, j)
            w.release(1)

    def project(phase: Any, *, may_be_gated: bool = True) -> None:
        blocks, plain, gated = (rtp[phase * 3 + place] for place in (1, 2, 3))
        take_parts((blocks + (parts_of_line - 1)) // parts_of_line * parts_of_line)
        for _ in range_(plain):
            multiply(accumulator, blocks)
            store(accumulator, y.acquire(1), PART)
            y.release(1)
        if not may_be_gated:
            return
        for _ in range_(gated):
            multiply(accumulator, blocks)
            multiply(second, blocks)
            store_gated(accumulator, second, y.acquire(1), PART)
            y.release(1)

    barrier.wait_for_value(1)
    barrier.release_with_value(1)
    project(0, may_be_gated=False)
    objects, queries, turns = share[0], share[9], share[10]
    take_parts(queries)
    for turn in range_(turns):
        start(share, state, outputs, rows, d)
        for _ in range_(objects):
            attend(w.acquire(1), x, share, state, outputs, turn, rows, d)
            w.release(1)
        for part in range_(rows * d // PART):
            store_output(state, outputs, y.acquire(1), part, d)
            y.release(1)
        store_share(state, shares, turn)
    for turn in range_(turns):
        give_share(shares, y.acquire(1), turn)
        y.release(1)
    for phase in range_(1, rtp[0]):
        project(phase)


# --- RoPE, and shares put together ------------------------------------------------------------------------------------


def _rope_tile(
    shape: SplitShape, parameters: RunTimeParameters
) -> tuple[ObjectFifo, ObjectFifo, ObjectFifo, ObjectFifo, Worker]:
    """The heads' stream, that of norms, angles and shares, the queries (then the context), the keys, and the tile.

    Words: epsilon's bits.
    """
    pairs, d, tiles = shape.pairs, shape.d, COLUMNS * TILES
    heads_of_object, head = tensor(pairs * d), tensor(d)
    heads, tables = ObjectFifo(heads_of_object, name="heads"), ObjectFifo(head, name="tables")
    queries, key = ObjectFifo(heads_of_object, name="queries"), ObjectFifo(heads_of_object, name="key")
    if shape.qk_norm:
        rope = kernel("norm_rope", "rms_norm_rope", heads_of_object, head, head, heads_of_object, *[I32] * 3)
    else:
        rope = kernel("rope", "rope", heads_of_object, head, heads_of_object, *[I32] * 2)
    shares = tensor(shape.kv_heads * PARTIAL_LINE)
    weights, total = tensor(shape.heads * _WEIGHTS_OF_HEAD, F32), tensor(d, F32)
    merge_kernels = [
        kernel("flow_kv_merge", "flow_kv_merge_take", head, shares, I32, I32),
        kernel("flow_kv_merge", "flow_kv_merge_weights", shares, weights, I32, I32, I32),
        kernel("flow_kv_merge", "flow_kv_merge", heads_of_object, weights, total, I32, I32, I32, I32),
        kernel("flow_kv_merge", "flow_kv_merge_store", total, heads_of_object, I32, I32),
    ]

    def core(
        heads: ObjectFifoHandle, tables: ObjectFifoHandle, queries: ObjectFifoHandle, key: ObjectFifoHandle,
        buffers: list[Buffer], rtp: Buffer, barrier: Any, rope: Kernel, merge_kernels: list[Kernel],
    ) -> None:  # fmt: skip
        shares, weights, total = buffers
        take, weigh, merge, store = merge_kernels
        barrier.wait_for_value(1)
        barrier.release_with_value(1)
        epsilon = rtp[0]
        held: Any = tables.acquire(3 if shape.qk_norm else 1)
        for place, (out, objects) in enumerate([(queries, shape.heads // pairs), (key, shape.kv_heads // pairs)]):
            for _ in range_(objects):
                if shape.qk_norm:
                    rope(heads.acquire(1), held[place], held[2], out.acquire(1), pairs, d, epsilon)
                else:
                    rope(heads.acquire(1), held, out.acquire(1), pairs, d)
                heads.release(1)
                out.release(1)
        tables.release(3 if shape.qk_norm else 1)
        for part in range_(shape.kv_heads * PARTIAL_LINE // d):
            take(tables.acquire(1), shares, part, d)
            tables.release(1)
        weigh(shares, weights, shape.kv_heads, shape.group, tiles)
        for batch in range_(shape.heads // pairs):
            out_heads = queries.acquire(1)
            for place in range(pairs):
                for objects_before in range_(tiles // pairs):
                    first = objects_before * pairs
                    merge(heads.acquire(1), weights, total, batch * pairs + place, first, pairs, d)
                    heads.release(1)
                store(total, out_heads, place, d)
            queries.release(1)

    buffers = [Buffer(kind, name=name) for kind, name in ((shares, "shares"), (weights, "weights"), (total, "total"))]
    fifos = heads.cons(), tables.cons(depth=3), queries.prod(), key.prod()
    arguments = [*fifos, buffers, parameters.buffers[0], parameters.barrier, rope, merge_kernels]
    return heads, tables, queries, key, worker(core, arguments, tile=Tile(ROPE_COLUMN, _FIRST_ROW))

# SPDX-License-Identifier: Apache-2.0
"""Attention in the array of a decode layer (designs/decode_layer.py): RoPE, and FlowKV on up to four pairs of tiles.

The RoPE tile takes the heads of a token as [pairs][d], one head for each pair: first the queries, which go on to the
pairs through a memory tile, then the keys, which leave for the KV cache. Each pair (flow_kv.py) takes its KV heads one
after the other, and all chunks of one before the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import (
    F32,
    I32,
    PARAMETERS,
    ceil_div,
    kernel,
    limits_of,
    tensor,
    tiled,
    worker,
)
from flownpu.aie.designs.decode_layer_shape import ARRAY_COLUMNS, PAIRS_OF_A_COLUMN
from flownpu.aie.iron_compat import Buffer, ObjectFifo, Tile, range_

if TYPE_CHECKING:
    from flownpu.aie.designs.common import RunTimeParameters
    from flownpu.aie.designs.decode_layer_shape import LayerShape
    from flownpu.aie.iron_compat import Kernel, ObjectFifoHandle, Worker

__all__ = ["ROPE_COLUMN", "attention_columns", "rope_tile"]

ROPE_COLUMN = ARRAY_COLUMNS - 1
_FIRST_ROW = limits_of("npu2").first_compute_row


def rope_tile(
    shape: LayerShape, parameters: RunTimeParameters
) -> tuple[ObjectFifo, ObjectFifo, list[ObjectFifo], ObjectFifo, Worker]:
    """The heads' stream, that of their norms and angles, the queries for each pair, the keys, and the tile.

    Words: epsilon's bits.
    """
    pairs, d = shape.pairs, shape.d
    heads_of_pairs, head = tensor(pairs * d), tensor(d)
    heads, tables = ObjectFifo(heads_of_pairs, name="heads"), ObjectFifo(head, name="tables")
    queries, key = ObjectFifo(heads_of_pairs, name="queries"), ObjectFifo(heads_of_pairs, name="key")
    # A pair's object is the query heads of a KV head: a part of as many objects as there are.
    query_parts = queries.cons().split(
        [pair * d for pair in range(pairs)], Tile(ROPE_COLUMN, 1), obj_types=[tensor(shape.group * d)] * pairs
    )
    if shape.qk_norm:
        rope = kernel("norm_rope", "rms_norm_rope", heads_of_pairs, head, head, heads_of_pairs, *[I32] * 3)
    else:
        rope = kernel("rope", "rope", heads_of_pairs, head, heads_of_pairs, *[I32] * 2)

    def core(
        heads: ObjectFifoHandle, tables: ObjectFifoHandle, queries: ObjectFifoHandle, key: ObjectFifoHandle,
        rtp: Buffer, barrier: Any, rope: Kernel,
    ) -> None:  # fmt: skip
        barrier.wait_for_value(1)
        barrier.release_with_value(1)
        epsilon = rtp[0]
        held: Any = tables.acquire(3 if shape.qk_norm else 1)
        for place, (out, objects) in enumerate([(queries, shape.heads // pairs), (key, shape.turns)]):
            for _ in range_(objects):
                if shape.qk_norm:
                    rope(heads.acquire(1), held[place], held[2], out.acquire(1), pairs, d, epsilon)
                else:
                    rope(heads.acquire(1), held, out.acquire(1), pairs, d)
                heads.release(1)
                out.release(1)
        tables.release(3 if shape.qk_norm else 1)

    fifos = heads.cons(), tables.cons(depth=3), queries.prod(), key.prod()
    arguments = [*fifos, parameters.buffers[0], parameters.barrier, rope]
    return heads, tables, query_parts, key, worker(core, arguments, tile=Tile(ROPE_COLUMN, _FIRST_ROW))


def attention_columns(
    shape: LayerShape, queries: list[ObjectFifo], parameters: RunTimeParameters
) -> tuple[list[ObjectFifo], list[ObjectFifo], list[ObjectFifo], list[Worker]]:
    """For each column its streams of keys, values and outputs; and the pairs' tiles.

    A column's stream has the chunks of its pairs side by side; its memory tile sends each pair's as sub-tiles.
    """
    count = min(PAIRS_OF_A_COLUMN, shape.pairs)
    chunk, line = shape.keys * shape.d, shape.group * shape.d
    keys, values, outputs, workers = list[ObjectFifo](), list[ObjectFifo](), list[ObjectFifo](), list["Worker"]()
    for place in range(shape.attention_columns):
        memory = Tile(shape.columns + place, 1)
        parts = []
        for streams, name in ((keys, "k"), (values, "v")):
            streams.append(ObjectFifo(tensor(count * chunk), name=f"{name}_{place}"))
            offsets, walks = [pair * chunk for pair in range(count)], [tiled(shape.keys, shape.d)] * count
            kinds = [tensor(chunk)] * count
            parts.append(streams[-1].cons().split(offsets, memory, obj_types=kinds, to_stream=walks))
        outputs.append(ObjectFifo(tensor(count * line), name=f"o_{place}"))
        offsets = [pair * line for pair in range(count)]
        o_parts = outputs[-1].prod().join(offsets, memory, obj_types=[tensor(line)] * count)
        for inside in range(count):
            number = place * count + inside
            ends = queries[number].cons(), parts[0][inside].cons(), parts[1][inside].cons(), o_parts[inside].prod()
            place_of_pair = shape.columns + place, _FIRST_ROW + 2 * inside
            workers += _pair(shape, number, place_of_pair, ends, parameters)
    return keys, values, outputs, workers


def _pair(
    shape: LayerShape,
    number: int,
    place: tuple[int, int],
    ends: tuple[ObjectFifoHandle, ...],
    parameters: RunTimeParameters,
) -> list[Worker]:
    """A pair: the K tile at `place`, the V tile above.

    Words: those of attention (kernels/README.md), of which the V tile has the first, its chunks.
    """
    column, row = place
    q_end, k_end, v_end, o_end = ends
    heads, keys, d, turns = shape.group, shape.keys, shape.d, shape.turns
    rows = ceil_div(heads, 4) * 4
    line, chunk, rtp = tensor(heads * d), tensor(keys * d), tensor(PARAMETERS, I32)
    q_tile, state, y = tensor(rows * d), tensor(2 * rows + 16, F32), tensor(rows * d + rows, F32)
    shared, scratch = tensor(rows * keys + 4 * rows), tensor(4 * keys, F32)
    handoff = ObjectFifo(shared, name=f"handoff_{number}")
    start = kernel("flow_kv", "flow_kv_start", line, rtp, q_tile, state, I32, I32, I32)
    scores = kernel("flow_kv", "flow_kv_scores", q_tile, chunk, rtp, state, shared, scratch, I32, I32, I32)
    start_values = kernel("flow_kv", "flow_kv_start_values", y, I32, I32)
    values = kernel("flow_kv", "flow_kv_values", shared, chunk, y, I32, I32, I32)
    finish = kernel("flow_kv", "flow_kv_finish", y, line, I32, I32, I32)

    def k_tile(
        q: ObjectFifoHandle, k: ObjectFifoHandle, out: ObjectFifoHandle, tile: Buffer, state: Buffer, scratch: Buffer,
        rtp: Buffer, barrier: Any, start: Kernel, scores: Kernel,
    ) -> None:  # fmt: skip
        barrier.wait_for_value(1)
        barrier.release_with_value(1)
        chunks = rtp[0]
        for _ in range_(turns):
            start(q.acquire(1), rtp, tile, state, heads, rows, d)
            q.release(1)
            for _ in range_(chunks):
                scores(tile, k.acquire(1), rtp, state, out.acquire(1), scratch, rows, keys, d)
                k.release(1)
                out.release(1)

    def v_tile(
        given: ObjectFifoHandle, v: ObjectFifoHandle, o: ObjectFifoHandle, y: Buffer, rtp: Buffer, barrier: Any,
        start: Kernel, values: Kernel, finish: Kernel,
    ) -> None:  # fmt: skip
        barrier.wait_for_value(1)
        barrier.release_with_value(1)
        chunks = rtp[0]
        for _ in range_(turns):
            start(y, rows, d)
            for _ in range_(chunks):
                values(given.acquire(1), v.acquire(1), y, rows, keys, d)
                given.release(1)
                v.release(1)
            finish(y, o.acquire(1), heads, rows, d)
            o.release(1)

    kinds = {"q_tile": q_tile, "attention_state": state, "scores": scratch}
    buffers = [Buffer(kind, name=f"{name}_{number}") for name, kind in kinds.items()]
    k_words, v_words = parameters.buffers[1 + 2 * number : 3 + 2 * number]
    k_arguments = [q_end, k_end, handoff.prod(), *buffers, k_words, parameters.barrier, start, scores]
    v_arguments = [handoff.cons(), v_end, o_end, Buffer(y, name=f"context_{number}"), v_words, parameters.barrier]
    return [
        worker(k_tile, k_arguments, tile=Tile(column, row)),
        worker(v_tile, [*v_arguments, start_values, values, finish], tile=Tile(column, row + 1)),
    ]

# SPDX-License-Identifier: Apache-2.0
"""Attention on the tiles that project: a KV head's keys are split among all of them.

    columns 0-5     24 tiles project and attend, on twelve streams

With pairs of tiles (pairs.py) eight streams carry weights and four carry keys and values, and either wait
while the others work; the cost model (docs/model.md) says that streams are what decoding waits for. Here twelve carry
whatever there is to carry. An object of a tile's stream is a Q4NX block, or as many bytes of keys and values: 1280 / d
keys of a head, then their values. So one fifo takes both, and no tile is for attention alone.

**Split keys.** The keys are dealt to the tiles object by object, in *rounds* of an object for each tile: one KV head
keeps all streams busy as well as eight. Each tile runs FlowKV over its share (kernels/flow_kv_split.cc) and gives
Y / l, m and l; the RoPE tile weighs them (kernels/flow_kv_merge.cc). They go there through main memory, H d + 32 G
elements a tile: 100 KB a layer for eight heads of 256, which is one wait more than with pairs, seven a layer. Queries
go through main memory, too, and come to all tiles as any x.

**A sweep takes whole rounds**, so that all tiles do the same at each position and only numbers change with it; keys
that the token does not see, in the last round beyond it, count nothing. They may be those of the next layer, or lie
behind the last one's cache: they must be finite there.

**What is early.** A task has up to 64 rounds. The last of a layer's first KV head has the new position, and waits until
that is in main memory; weights wait for nothing, nor do the keys of tasks before the last.

Rows of blocks are dealt to columns in groups of four; 24 tiles share 80 rows less evenly than 16 do: four groups where
3.3 would be even. That costs up to a tenth, and is in the model's predictions.

The cache is an argument twice: `cache`, to which bf16 are written, and `cache_bytes`, the same memory, since what the
weights' streams carry are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import (
    BLOCK_BYTES,
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    F32,
    I32,
    PARAMETERS,
    TILES,
    U8,
    kernel,
    limits_of,
    run,
    tensor,
)
from flownpu.aie.designs.decode_layer.attention import Attention, AttentionEnds
from flownpu.aie.designs.decode_layer.shape import RESIDUAL_COLUMN, ROPE_COLUMN
from flownpu.aie.designs.decode_layer.weights import STREAMS
from flownpu.aie.iron.compat import TensorAccessPattern, Tile, range_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flownpu.aie.designs.attention import Sweep
    from flownpu.aie.designs.common import RunTimeParameters
    from flownpu.aie.designs.decode_layer.call import Token
    from flownpu.aie.designs.decode_layer.sequence import LayerSequence
    from flownpu.aie.iron.compat import Buffer, Kernel, ObjectFifo, ObjectFifoHandle, Worker

__all__ = ["SplitKeys"]

_TILES = RESIDUAL_COLUMN * TILES
_PART = BLOCK_ROWS  # elements in which a tile gives its results
_CELL, _LINE = TILES * _PART, _TILES * _PART  # elements of a part from a column's tiles, and from all
_HALF = BLOCK_BYTES // 4  # elements of half an object: its keys, or its values
_MOST_KEYS, _MOST_ROWS = 32, 8  # kernels/flow_kv_split.cc, as the next one
_STATE = 16 + 2 * _MOST_ROWS * 16
_WEIGHTS_OF_HEAD = 32  # kernels/flow_kv_merge.cc
_WORDS = 11


@dataclass(frozen=True)
class SplitKeys(Attention):
    """All tiles that project take KV heads one after the other.

    d divides 1280, so that objects are whole keys and values, and 768, so that the shares of all tiles are whole lines
    of it; a KV head has eight query heads or fewer.
    """

    waits = 7

    def __post_init__(self) -> None:
        d, group = self.shape.d, self.shape.group
        if _HALF % d or self.keys_of_object > _MOST_KEYS or _LINE % d or group > _MOST_ROWS:
            raise ValueError(
                f"[decode_layer, split keys] expected a head size that divides {_HALF} and {_LINE}, "
                f"{_HALF // _MOST_KEYS} or more, and {_MOST_ROWS} query heads or fewer a KV head, got {d} and {group}"
            )

    @property
    def columns(self) -> int:
        """Columns that project, and attend."""
        return RESIDUAL_COLUMN

    @property
    def keys_of_object(self) -> int:
        """Keys of an object, before as many values."""
        return _HALF // self.shape.d

    @property
    def keys(self) -> int:
        """Positions of a round, an object for each tile."""
        return _TILES * self.keys_of_object

    @property
    def parts(self) -> int:
        """Parts that a tile gives: outputs of all heads, then its shares' maxima and sums, a part a KV head."""
        return self.shape.heads * self.shape.d // _PART + self.shape.kv_heads

    @property
    def regions(self) -> Mapping[str, int]:
        """Queries [H d], normalised and turned; and partial [part][tile][32], from all tiles."""
        return {"queries": self.shape.heads * self.shape.d, "partial": self.parts * _LINE}

    @property
    def context_lines(self) -> int:
        """Those of the queries before those of attention's output."""
        return 2 * super().context_lines

    def cache_bytes(self, layers: int, capacity: int) -> int:
        """Bytes of all layers' caches, and of the padding that the last layer's last round reads behind them."""
        return (layers * capacity + -capacity % self.keys) * self._line_bytes

    @property
    def _line_bytes(self) -> int:
        return 2 * self.shape.position_size

    # --- The array ----------------------------------------------------------------------------------------------------

    @property
    def cores(self) -> list[str]:
        """All that project."""
        return [f"share_tile_{column}_{row}" for column in range(self.columns) for row in range(TILES)]

    def place(self, queries: ObjectFifo, parameters: RunTimeParameters) -> tuple[AttentionEnds, list[Worker]]:  # noqa: ARG002
        """The queries leave for main memory, and what the RoPE tile puts together after them."""
        return AttentionEnds([], [], [queries.cons(tile=Tile(ROPE_COLUMN, 0))]), []

    def share(self) -> tuple[dict[str, Any], list[Kernel]]:
        """What a tile keeps of a KV head, its outputs, and all KV heads' maxima and sums."""
        shape, block, product = self.shape, tensor(BLOCK_BYTES, U8), tensor(_PART)
        state, outputs, rtp = tensor(_STATE, F32), tensor(shape.group * shape.d, F32), tensor(PARAMETERS, I32)
        shares, line = tensor(shape.kv_heads * _PART // 2, F32), tensor(shape.x_size)
        kernels = [
            kernel("flow_kv_split", "flow_kv_split_start", rtp, state, outputs, I32, I32),
            kernel("flow_kv_split", "flow_kv_split", block, line, rtp, state, outputs, I32, I32, I32),
            kernel("flow_kv_split", "flow_kv_split_store", state, outputs, product, I32, I32),
            kernel("flow_kv_split", "flow_kv_split_share", state, shares, I32),
            kernel("flow_kv_split", "flow_kv_split_give", shares, product, I32),
        ]
        return {"state": state, "outputs": outputs, "shares": shares}, kernels

    def attend_to_share(
        self, w: ObjectFifoHandle, y: ObjectFifoHandle, x: Buffer, take: Callable[[Any], None], rtp: Buffer,
        buffers: list[Buffer], kernels: list[Kernel],
    ) -> None:  # fmt: skip
        """The tile's share of each KV head's keys.

        Words: those of attention (kernels/README.md), objects a KV head first; word 8, positions from one of the tile's
        objects to the next; word 9, parts of the queries; word 10, KV heads: none, where a call has no attention.
        """
        state, outputs, shares = buffers
        start, attend, store_output, store_share, give_share = kernels
        rows, d = self.shape.group, self.shape.d
        objects, queries, turns = rtp[0], rtp[9], rtp[10]
        take(queries)
        for turn in range_(turns):
            start(rtp, state, outputs, rows, d)
            for _ in range_(objects):
                attend(w.acquire(1), x, rtp, state, outputs, turn, rows, d)
                w.release(1)
            for part in range_(rows * d // _PART):
                store_output(state, outputs, y.acquire(1), part, d)
                y.release(1)
            store_share(state, shares, turn)
        for turn in range_(turns):
            give_share(shares, y.acquire(1), turn)
            y.release(1)

    def merger(self) -> tuple[dict[str, Any], list[Kernel]]:
        """All tiles' maxima and sums, the weights that follow from them, and a head that is summed."""
        shape, d = self.shape, self.shape.d
        head, batch, shares = tensor(d), tensor(shape.batch * d), tensor(shape.kv_heads * _LINE)
        weights, total = tensor(shape.heads * _WEIGHTS_OF_HEAD, F32), tensor(d, F32)
        kernels = [
            kernel("flow_kv_merge", "flow_kv_merge_take", head, shares, I32, I32),
            kernel("flow_kv_merge", "flow_kv_merge_weights", shares, weights, I32, I32, I32),
            kernel("flow_kv_merge", "flow_kv_merge", batch, weights, total, I32, I32, I32, I32),
            kernel("flow_kv_merge", "flow_kv_merge_store", total, batch, I32, I32),
        ]
        return {"shares": shares, "weights": weights, "total": total}, kernels

    def merge(
        self, heads: ObjectFifoHandle, tables: ObjectFifoHandle, queries: ObjectFifoHandle, buffers: list[Buffer],
        kernels: list[Kernel],
    ) -> None:  # fmt: skip
        """Shares come on the stream of tables, outputs on that of heads, some tiles' of a head in an object."""
        shape, batch, d = self.shape, self.shape.batch, self.shape.d
        shares, weights, total = buffers
        take, weigh, add, store = kernels
        for part in range_(shape.kv_heads * _LINE // d):
            take(tables.acquire(1), shares, part, d)
            tables.release(1)
        weigh(shares, weights, shape.kv_heads, shape.group, _TILES)
        for number in range_(shape.heads // batch):
            out = queries.acquire(1)
            for place in range(batch):
                for before in range_(_TILES // batch):
                    add(heads.acquire(1), weights, total, number * batch + place, before * batch, batch, d)
                    heads.release(1)
                store(total, out, place, d)
            queries.release(1)

    # --- The sequence -------------------------------------------------------------------------------------------------

    def words(self, token: Token, part: Sweep | None) -> list[list[int]]:
        """See `attend_to_share`: tiles differ in their first key."""
        if part is None:
            return [[0] * _WORDS] * _TILES
        shape = self.shape
        chunks, position, first, *others = part.words(token.position, 1)
        queries = shape.lines(shape.heads * shape.d) * shape.line // BLOCK_COLUMNS
        return [
            [chunks, position, first + tile * self.keys_of_object, *others, self.keys, queries, shape.kv_heads]
            for tile in range(_TILES)
        ]

    def plan(self, steps: LayerSequence, index: int) -> None:
        """Keys and values for the streams: round x keys, values x positions of a stream's tiles x bytes of d."""
        token, part, most = steps.token, steps.sweep(index), limits_of("npu2").iteration_maximum
        line, run_bytes, positions = self._line_bytes, 2 * self.shape.d, self.keys // (STREAMS * self.columns)
        total = self.cache_bytes(len(steps.layers), token.capacity)
        first = index * token.capacity + part.first_key
        tasks = [
            (turn, start, min(most, part.chunks - start))
            for turn in range(self.shape.kv_heads)
            for start in range(0, part.chunks, most)
        ]
        for turn, start, rounds in tasks:
            early = turn > 0 or start + rounds < part.chunks
            for number, stream in enumerate(steps.weights.streams):
                tap = TensorAccessPattern(
                    [total],
                    (first + start * self.keys + number * positions) * line + turn * 2 * run_bytes,
                    [rounds, 2, positions, run_bytes],
                    [self.keys * line, run_bytes, line, 1],
                )
                stream.waiting.append((steps.planned, steps.buffers.cache_bytes, tap, early))
        steps.planned += 1

    def send_queries(self, steps: LayerSequence) -> list[Any]:
        """Queries and keys as they lie; the queries come back."""
        shape, first = self.shape, steps.regions["qkv"].offset
        queries, keys = shape.heads * shape.d, shape.kv_heads * shape.d
        steps.send(steps.ends.heads, steps.buffers.state, run(steps.state_size, first, queries + keys))
        return [self._drain_heads(steps, "queries")]

    def attend(self, steps: LayerSequence, index: int) -> list[Any]:  # noqa: ARG002 the taps are known from the start
        """All tiles attend to their shares, then one puts them together."""
        shape, first, state = self.shape, steps.regions["partial"].offset, steps.buffers.state
        steps.send_region(steps.ends.vectors, "queries")
        partial = [
            steps.drain(end, state, steps.in_state(first + column * _CELL, [self.parts, _CELL], [_LINE, 1]))
            for column, end in enumerate(steps.ends.products)
        ]
        steps.start_phase()
        steps.wait(partial)

        context, parts = self._drain_heads(steps, "context"), shape.d // _PART
        shares = run(steps.state_size, first + shape.heads * parts * _LINE, shape.kv_heads * _LINE)
        steps.send(steps.ends.tables, state, shares)
        sizes, strides = [shape.heads, _TILES, parts, _PART], [parts * _LINE, _PART, _LINE, 1]
        steps.send(steps.ends.heads, state, steps.in_state(first, sizes, strides))
        return [context]

    def _drain_heads(self, steps: LayerSequence, region: str) -> Any:
        """What comes from the RoPE tile."""
        (end,) = steps.ends.attention.contexts
        tap = run(steps.state_size, steps.regions[region].offset, self.shape.heads * self.shape.d)
        return steps.drain(end, steps.buffers.state, tap)

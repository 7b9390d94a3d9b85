# SPDX-License-Identifier: Apache-2.0
"""Attention on the tiles that project: a KV head's keys are split among them.

    columns 0-5     24 tiles project and attend, with four more in columns 6 and 7, on fourteen streams

With pairs of tiles (pairs.py) ten streams carry weights and four carry keys and values, and either wait
while the others work; the cost model (docs/model.md) says that streams are what decoding waits for. Here fourteen carry
whatever there is to carry, more than main memory gives. An object of a tile's stream is a Q4NX block, or as many bytes
of keys and values. So one fifo takes both, and no tile is for attention alone.

**An object** has a few positions of a *bundle* of KV heads: neighbours in the cache, so that main memory is read in
runs as long as may be, 512 bytes where a bundle has 256 elements of keys. A shim's walk has room for two halves of a
position, no more: of one KV head its key and its value, of more half of them each.

**Split keys.** The streams of a column are of two *classes*, with half of the KV heads each (an odd number of them: one
class with all). A bundle's keys are dealt to all tiles of its class object by object, in *rounds* of an object each.
Each tile runs FlowKV over its share (kernels/flow_kv_split.cc) and gives Y / l, m and l; the RoPE tile weighs them
(kernels/flow_kv_merge.cc). They go there through main memory, (H d + 32 G) / 2 elements a tile: 60 KB a layer for eight
heads of 256, which is one wait more than with pairs, seven a layer. That they come on one stream is why there are
classes: fewer shares of each head. Queries go through main memory, too, and come to all tiles as any x.

**A sweep takes whole rounds**, so that all tiles do the same at each position and only numbers change with it; keys
that the token does not see, in the last round beyond it, count nothing. They may be those of the next layer, or lie
behind the last one's cache: they must be finite there.

**What is early.** A task has up to 64 rounds. The last of a layer's first bundle has the new position, and waits until
that is in main memory; weights wait for nothing, nor do the keys of tasks before the last.

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
    ceil_div,
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

_COLUMNS = RESIDUAL_COLUMN + 1  # those before the residual tile's, and the one beside it
_PART = BLOCK_ROWS  # elements in which a tile gives its results
_HALF = BLOCK_BYTES // 4  # elements of half an object
_BUNDLE = 256  # elements of the keys of a bundle at a position, at most: 1280 are five, which the kernel takes at once
_MOST_LANES, _MOST_ROWS = 32, 8  # rows of a bundle and of a KV head: kernels/flow_kv_split.cc, as the next one
_STATE = 16 + 2 * _MOST_LANES
_WEIGHTS_OF_HEAD = 32  # kernels/flow_kv_merge.cc
_WORDS = 12


@dataclass(frozen=True)
class SplitKeys(Attention):
    """All tiles of a class take its KV heads one bundle after the other.

    d divides 256, so that objects are whole positions; a KV head has eight query heads or fewer.
    """

    waits = 7

    def __post_init__(self) -> None:
        d, group = self.shape.d, self.shape.group
        if _BUNDLE % d or group > _MOST_ROWS:
            raise ValueError(
                f"[decode_layer, split keys] expected a head size that divides {_BUNDLE} and {_MOST_ROWS} query heads "
                f"or fewer a KV head, got {d} and {group}"
            )

    @property
    def columns(self) -> int:
        """Columns that project, and attend."""
        return _COLUMNS

    @property
    def batch(self) -> int:
        """Two where they share the KV heads evenly: they share the tiles of a class, too."""
        return 2 if self.shape.kv_heads % 2 == 0 else 1

    @property
    def classes(self) -> int:
        """Classes of streams, which share the KV heads."""
        return STREAMS if self.shape.kv_heads % STREAMS == 0 else 1

    @property
    def sharers(self) -> int:
        """Tiles of a class, among which a KV head's keys are split."""
        return self.columns * TILES // self.classes

    @property
    def bundle(self) -> int:
        """KV heads that an object has: as many as share those of a class evenly, in what a position may have."""
        shape = self.shape
        most = min(_BUNDLE // shape.d, _MOST_LANES // shape.group, shape.kv_heads // self.classes)
        return next(heads for heads in (8, 4, 2, 1) if heads <= most and shape.kv_heads // self.classes % heads == 0)

    @property
    def turns(self) -> int:
        """Bundles of a class."""
        return self.shape.kv_heads // self.classes // self.bundle

    @property
    def positions(self) -> int:
        """Positions of an object."""
        return _HALF // (self.bundle * self.shape.d)

    @property
    def keys(self) -> int:
        """Positions of a round, an object for each tile of a class."""
        return self.sharers * self.positions

    @property
    def regions(self) -> Mapping[str, int]:
        """What passes through main memory.

        Queries [H d], normalised and turned; outputs [part of H d][tile of a class][32] from the tiles, and shares
        [KV head][tile of a class][32], their maxima and sums, of which whole batches are read.
        """
        heads, shares = self.shape.heads * self.shape.d, self.shape.kv_heads * self._line
        batch = self.batch * self.shape.d
        return {"queries": heads, "outputs": heads // _PART * self._line, "shares": ceil_div(shares, batch) * batch}

    @property
    def _line(self) -> int:
        """Elements of a part from all tiles of a class."""
        return self.sharers * _PART

    @property
    def context_lines(self) -> int:
        """Those of the queries before those of attention's output."""
        return 2 * super().context_lines

    def cache_bytes(self, layers: int, capacity: int) -> int:
        """Bytes of all layers' caches, and of the padding that the last layer's last round reads behind them."""
        return (layers * capacity + -capacity % self.keys) * 2 * self.shape.position_size

    # --- The array ----------------------------------------------------------------------------------------------------

    @property
    def cores(self) -> list[str]:
        """All that project."""
        return [f"share_tile_{column}_{row}" for column in range(self.columns) for row in range(TILES)]

    def place(self, queries: ObjectFifo, parameters: RunTimeParameters) -> tuple[AttentionEnds, list[Worker]]:  # noqa: ARG002
        """The queries leave for main memory, and what the RoPE tile puts together after them."""
        return AttentionEnds([], [], [queries.cons(tile=Tile(ROPE_COLUMN, 0))]), []

    def share(self) -> tuple[dict[str, Any], list[Kernel]]:
        """What a tile keeps of a bundle, its outputs, and all its KV heads' maxima and sums."""
        shape, block, product = self.shape, tensor(BLOCK_BYTES, U8), tensor(_PART)
        state, rtp, line = tensor(_STATE, F32), tensor(PARAMETERS, I32), tensor(shape.x_size)
        outputs = tensor(self.bundle * shape.group * shape.d, F32)
        shares = tensor(shape.kv_heads // self.classes * _PART // 2, F32)
        kernels = [
            kernel("flow_kv_split", "flow_kv_split_start", rtp, state, outputs, I32, I32),
            kernel("flow_kv_split", "flow_kv_split", block, line, rtp, state, outputs, *[I32] * 4),
            kernel("flow_kv_split", "flow_kv_split_store", state, outputs, product, I32, I32),
            kernel("flow_kv_split", "flow_kv_split_share", state, shares, *[I32] * 3),
            kernel("flow_kv_split", "flow_kv_split_give", shares, product, I32),
        ]
        return {"state": state, "outputs": outputs, "shares": shares}, kernels

    def attend_to_share(
        self, w: ObjectFifoHandle, y: ObjectFifoHandle, x: Buffer, take: Callable[[Any], None], rtp: Buffer,
        buffers: list[Buffer], kernels: list[Kernel],
    ) -> None:  # fmt: skip
        """The tile's share of each bundle's keys.

        Words: those of attention (kernels/README.md), objects a bundle first; word 8, positions from one of the tile's
        objects to the next; word 9, parts of the queries; word 10, bundles: none, where a call has no attention; word
        11, the first KV head of its class.
        """
        state, outputs, shares = buffers
        start, attend, store_output, store_share, give_share = kernels
        heads, rows, d = self.bundle, self.shape.group, self.shape.d
        objects, queries, turns = rtp[0], rtp[9], rtp[10]
        take(queries)
        for turn in range_(turns):
            start(rtp, state, outputs, heads * rows, d)
            for _ in range_(objects):
                attend(w.acquire(1), x, rtp, state, outputs, turn, heads, rows, d)
                w.release(1)
            for part in range_(heads * rows * d // _PART):
                store_output(state, outputs, y.acquire(1), part, d)
                y.release(1)
            store_share(state, shares, turn, heads, rows)
        for head in range_(turns * heads):
            give_share(shares, y.acquire(1), head)
            y.release(1)

    def merger(self) -> tuple[dict[str, Any], list[Kernel]]:
        """All tiles' maxima and sums, the weights that follow from them, and a head that is summed."""
        shape, d = self.shape, self.shape.d
        batch, shares = tensor(self.batch * d), tensor(self.regions["shares"])
        weights, total = tensor(shape.heads * _WEIGHTS_OF_HEAD, F32), tensor(d, F32)
        kernels = [
            kernel("flow_kv_merge", "flow_kv_merge_take", batch, shares, I32, I32),
            kernel("flow_kv_merge", "flow_kv_merge_weights", shares, weights, I32, I32, I32),
            kernel("flow_kv_merge", "flow_kv_merge", batch, weights, total, I32, I32, I32, I32),
            kernel("flow_kv_merge", "flow_kv_merge_store", total, batch, I32, I32),
        ]
        return {"shares": shares, "weights": weights, "total": total}, kernels

    def merge(
        self, heads: ObjectFifoHandle, queries: ObjectFifoHandle, buffers: list[Buffer], kernels: list[Kernel]
    ) -> None:
        """Shares come first on the stream of heads, then outputs, some tiles' of a head in an object."""
        shape, batch, d = self.shape, self.batch, self.shape.d
        shares, weights, total = buffers
        take, weigh, add, store = kernels
        for part in range_(self.regions["shares"] // (batch * d)):
            take(heads.acquire(1), shares, part, batch * d)
            heads.release(1)
        weigh(shares, weights, shape.kv_heads, shape.group, self.sharers)
        for number in range_(shape.heads // batch):
            out = queries.acquire(1)
            for place in range(batch):
                for before in range_(self.sharers // batch):
                    add(heads.acquire(1), weights, total, number * batch + place, before * batch, batch, d)
                    heads.release(1)
                store(total, out, place, d)
            queries.release(1)

    # --- The sequence -------------------------------------------------------------------------------------------------

    def words(self, token: Token, part: Sweep | None) -> list[list[int]]:
        """See `attend_to_share`: tiles differ in their first key, and classes in their first KV head."""
        tiles = self.columns * TILES
        if part is None:
            return [[0] * _WORDS] * tiles
        shape = self.shape
        chunks, position, first, *others = part.words(token.position, 1)
        queries = shape.lines(shape.heads * shape.d) * shape.line // BLOCK_COLUMNS
        words = []
        for tile in range(tiles):
            of_class, sharer = self._class_of(tile)
            head = of_class * shape.kv_heads // self.classes
            key = first + sharer * self.positions
            words.append([chunks, position, key, *others, self.keys, queries, self.turns, head])
        return words

    def _class_of(self, tile: int) -> tuple[int, int]:
        """The class of a tile, and which of its tiles it is."""
        column, row = divmod(tile, TILES)
        tiles = TILES // self.classes  # of a column
        return row // tiles, column * tiles + row % tiles

    def plan(self, steps: LayerSequence, index: int) -> None:
        """Keys and values for the streams: round x half x positions of a stream's tiles x bytes of half a bundle."""
        token, part, most = steps.token, steps.sweep(index), limits_of("npu2").iteration_maximum
        line, half = 2 * self.shape.position_size, 2 * self.bundle * self.shape.d
        total = self.cache_bytes(len(steps.layers), token.capacity)
        first = index * token.capacity + part.first_key
        tasks = [
            (turn, start, min(most, part.chunks - start))
            for turn in range(self.turns)
            for start in range(0, part.chunks, most)
        ]
        tiles = TILES // STREAMS
        for turn, start, rounds in tasks:
            early = turn > 0 or start + rounds < part.chunks
            for number, stream in enumerate(steps.weights.streams):
                of_class, sharer = self._class_of(number * tiles)
                position = first + start * self.keys + sharer * self.positions
                bundle = of_class * self.turns + turn
                tap = TensorAccessPattern(
                    [total],
                    position * line + bundle * 2 * half,
                    [rounds, 2, tiles * self.positions, half],
                    [self.keys * line, half, line, 1],
                )
                stream.waiting.append((steps.planned, steps.buffers.cache_bytes, tap, early))
        steps.planned += 1

    def send_heads(self, steps: LayerSequence) -> list[Any]:
        """Queries, keys and values as they lie; the queries come back."""
        tap = run(steps.state_size, steps.regions["qkv"].offset, self.shape.projections[0].rows)
        steps.send(steps.ends.heads, steps.buffers.state, tap)
        return [self._drain_heads(steps, "queries")]

    def attend(self, steps: LayerSequence, index: int) -> list[Any]:  # noqa: ARG002 the taps are known from the start
        """All tiles attend to their shares, then one puts them together.

        The tiles of a column give a part each at once, first those of outputs, then those of shares. A class has half
        of them, and half of the parts of a region.
        """
        shape, state = self.shape, steps.buffers.state
        steps.send_region(steps.ends.vectors, "queries")
        parts = {"outputs": shape.heads * shape.d // _PART // self.classes, "shares": shape.kv_heads // self.classes}
        cell = TILES // self.classes * _PART
        drains = [
            steps.drain(
                end,
                state,
                steps.in_state(
                    steps.regions[region].offset + column * cell,
                    [count, self.classes, cell],
                    [self._line, count * self._line, 1],
                ),
            )
            for column, end in enumerate(steps.ends.products)
            for region, count in parts.items()
        ]
        steps.start_phase()
        steps.wait(drains)

        context, parts_of_head = self._drain_heads(steps, "context"), shape.d // _PART
        offsets = {region: steps.regions[region].offset for region in parts}
        steps.send(steps.ends.heads, state, run(steps.state_size, offsets["shares"], self.regions["shares"]))
        sizes = [shape.heads, self.sharers, parts_of_head, _PART]
        strides = [parts_of_head * self._line, _PART, self._line, 1]
        steps.send(steps.ends.heads, state, steps.in_state(offsets["outputs"], sizes, strides))
        return [context]

    def _drain_heads(self, steps: LayerSequence, region: str) -> Any:
        """What comes from the RoPE tile."""
        (end,) = steps.ends.attention.contexts
        tap = run(steps.state_size, steps.regions[region].offset, self.shape.heads * self.shape.d)
        return steps.drain(end, steps.buffers.state, tap)

# SPDX-License-Identifier: Apache-2.0
"""Attention on the tiles that project: a KV head's keys are split among them.

    columns 0-5     24 tiles project and attend, with four more in columns 6 and 7, on fourteen streams

With pairs of tiles (pairs.py) ten streams carry weights and four carry keys and values, and each kind waits while the
other works; the cost model (docs/model.md) says that streams are what decoding waits for. Here all fourteen carry
whatever there is to carry, more than main memory gives. An object of a tile's stream is a Q4NX block, or as many bytes
of keys and values. So one fifo takes both, and no tile is for attention alone.

**An object** has a few positions of a *bundle* of KV heads: neighbours in the cache, so that main memory is read in
runs as long as may be, 1 KB where a bundle has 256 elements of keys.

**Split keys.** The two streams of a column belong to two *classes*, each with half of the KV heads, so that a head has
fewer shares (with an odd number of KV heads there is one class). A bundle's keys are dealt to all tiles of its class
object by object, in *rounds* of an object each. Each tile runs FlowKV over its share (kernels/flow_kv_split.cc): m, l
and Y of each head. Queries come to all tiles like any x.

**Shares meet** in the array, through memory that neighbours share (`meetings`). A column's tiles give their shares to
one of the two tiles in its middle, one for each class, which adds up and passes the result to the same tile of the
column before; the first column has attention's output. So no share goes through main memory. Shares go in parts of 32
elements: m of all rows, l, then Y; a tile passes a part on as soon as it has merged the other tiles' into it. So the
shares of a bundle take the time of its parts, and of two more for each column. Sums of shared rows meet on the same
ways, except that the third tile gives its own to the first.

    columns             0        1        2    ..    6
    last tile           .        .        .          .
                        v        v        v          v
    third     y <------ . <----- . <----- . <- .. -- .
    first     y <------ . <----- . <----- . <- .. -- .
                        ^        ^        ^          ^
    second              .        .        .          .

**A sweep takes whole rounds**, so that the steps are the same at every position and only numbers differ. Keys of the
last round that are beyond the token count nothing. They may be those of the next layer, or lie behind the last layer's
cache: they must be finite there.

**Nothing waits for the cache.** Queries, and the token's own keys and values with them, go from the RoPE tile to the
residual tile beside it, and as x to all tiles. What the cache has at the token's position, stale or new, is not used:
so keys come as early as weights, and the new position is on its way to main memory meanwhile. Sinks go the same way.
The tile of each class that has the result begins with them, the others without.

The cache is an argument twice: `cache`, to which bf16 are written, and `cache_bytes`, the same memory, since what the
weights' streams carry are bytes. **With an int8 cache** `cache_bytes` is another memory, with rows of int8, and so is
`int8_rows`, to which the new position's are written. A row takes 5/8 of the bytes in bf16. Without padding it would
take 0.51 to 0.53, but then rows begin where no vector can be loaded, and whole positions fill no object. The cache in
bf16 stays, since prompts read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flownpu.aie.designs.common import (
    BLOCK_BYTES,
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    F32,
    I32,
    PARAMETERS,
    TILES,
    U8,
    bits,
    ceil_div,
    kernel,
    run,
    tensor,
)
from flownpu.aie.designs.decode_layer.attention import Attention, AttentionEnds, Meeting
from flownpu.aie.designs.decode_layer.rows import STREAMS, TILES_OF_STREAM
from flownpu.aie.designs.decode_layer.shape import RESIDUAL_COLUMN
from flownpu.aie.iron.compat import ObjectFifo, TensorAccessPattern, range_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flownpu.aie.designs.attention import Sweep
    from flownpu.aie.designs.common import RunTimeParameters
    from flownpu.aie.designs.decode_layer.call import Token
    from flownpu.aie.designs.decode_layer.sequence import LayerSequence
    from flownpu.aie.iron.compat import Buffer, Kernel, ObjectFifoHandle, Worker

_COLUMNS = RESIDUAL_COLUMN + 1  # those before the residual tile's, and one of tiles in columns 6 and 7
_PART = BLOCK_ROWS  # elements in which a tile gives its results
# Elements of the keys of a bundle at a position, at most. An object has five such positions, or eight in int8, of which
# the kernel takes five, or four, at once.
_BUNDLE = 256
_MOST_LANES, _MOST_ROWS = 32, 8  # rows of a bundle and of a KV head (kernels/flow_kv_split.cc)
# Where m, l and Y begin in a tile's share (kernels/flow_kv_split.cc), behind position, powers of it and of up to three
# others.
_FIRST_MAXIMUM = 16 + 3 * 2 * _MOST_LANES
_FIRST_SUM, _FIRST_OUTPUT = _FIRST_MAXIMUM + _MOST_LANES, _FIRST_MAXIMUM + 2 * _MOST_LANES
_HEADS = 2  # parts of a share before those of Y: m and l
_HEADS_OF_X, _TURNS, _HEAD, _WORDS = 9, 10, 11, 14  # words of a tile: see `attend_to_share`


@dataclass(frozen=True)
class SplitKeys(Attention):
    """All tiles of a class take its KV heads one bundle after the other.

    d must divide 256, so that objects are whole positions; a KV head may have up to eight query heads.
    """

    waits: ClassVar[int] = 5
    deals_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        d, group = self.shape.d, self.shape.group
        if _BUNDLE % d or group > _MOST_ROWS:
            raise ValueError(
                f"[decode_layer, split keys] expected a head size that divides {_BUNDLE} and {_MOST_ROWS} query heads "
                f"or fewer a KV head, got {d} and {group}"
            )

    @property
    def columns(self) -> int:
        """Columns that project and attend."""
        return _COLUMNS

    @property
    def span(self) -> int:
        """All columns: they are neighbours."""
        return _COLUMNS

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
        """KV heads of an object: the most, up to 8, that divide those of a class evenly and that the kernel takes."""
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
        return BLOCK_BYTES // (self.bundle * 2 * self.shape.row_bytes)

    @property
    def keys(self) -> int:
        """Positions of a round, which has an object for each tile of a class."""
        return self.sharers * self.positions

    @property
    def regions(self) -> Mapping[str, int]:
        """Attention's output; with one class, also room for the objects without meaning of column 0's other stream."""
        return {**super().regions, **({"after": self.shape.heads * self.shape.d} if self.classes == 1 else {})}

    @property
    def x_size(self) -> int:
        """Elements of the longest x; a token's heads are one, too."""
        return max(super().x_size, self._parts_of_heads * BLOCK_COLUMNS)

    @property
    def _parts_of_heads(self) -> int:
        """Parts in which the queries, and the token's own keys and values, are dealt."""
        return ceil_div(self.shape.dealt_heads * self.shape.d, BLOCK_COLUMNS)

    def cache_bytes(self, layers: int, capacity: int) -> int:
        """Bytes of all layers' caches, and of the padding that the last layer's last round reads behind them."""
        return (layers * capacity + -capacity % self.keys) * self._line

    @property
    def _line(self) -> int:
        """Bytes of a position as a token reads it."""
        return self.shape.kv_heads * 2 * self.shape.row_bytes

    # --- The array ----------------------------------------------------------------------------------------------------

    @property
    def cores(self) -> list[str]:
        """All projecting tiles."""
        return [f"share_tile_{column}_{row}" for column in range(self.columns) for row in range(TILES)]

    def place(self, queries: ObjectFifo, parameters: RunTimeParameters) -> tuple[AttentionEnds, list[Worker]]:  # noqa: ARG002
        """No ends and no tiles: the residual tile deals the queries."""
        return AttentionEnds([], [], []), []

    def share(self) -> tuple[dict[str, Any], list[Kernel]]:
        """The state that a tile keeps of a bundle: its maxima and sums, and its outputs."""
        shape, block, product, part = self.shape, tensor(BLOCK_BYTES, U8), tensor(_PART), tensor(_PART, F32)
        share, rtp, line = (
            tensor(_FIRST_OUTPUT + self.bundle * shape.group * shape.d, F32), tensor(PARAMETERS, I32),
            tensor(self.x_size),
        )  # fmt: skip
        attend = "flow_kv_split_int8" if shape.int8_cache else "flow_kv_split"
        room = tensor(4 * shape.d)  # for the rows that the kernel for int8 takes at once
        kernels = [
            kernel("flow_kv_split", "flow_kv_split_start", rtp, share, I32, I32),
            kernel("flow_kv_split", attend, block, line, rtp, share, *[room] * shape.int8_cache, *[I32] * 5),
            kernel("flow_kv_split", "flow_kv_split_meet", part, share, *[I32] * 3),
            kernel("flow_kv_split", "flow_kv_split_give", share, part, I32),
            kernel("flow_kv_split", "flow_kv_split_store", share, product, I32, I32),
            *[kernel("sinks", "attention_sinks", line, share, *[I32] * 6)] * shape.has_sinks,
        ]
        return {"share": share} | dict.fromkeys(["dequantized"] * shape.int8_cache, room), kernels

    def meetings(self, sums: Sequence[Sequence[Meeting]]) -> Sequence[Sequence[Meeting]]:
        """One class meets as sums do; of two, the second in the third tiles, on fifos of its own between columns."""
        if self.classes == 1:
            return sums
        found = list[list[Meeting]]()
        behind: list[ObjectFifoHandle] = []
        for column, (first, second, third, last) in reversed(list(enumerate(sums))):
            across = [] if first.leaves else [ObjectFifo(tensor(_PART, F32), name=f"share_{column}")]
            below, _, *others = first.others
            here = first._replace(others=[below, *others])
            there = third._replace(others=[*third.others, *behind], onward=[fifo.prod() for fifo in across])
            found.insert(0, [here, second, there, last])
            behind = [fifo.cons() for fifo in across]
        return found

    def counts_of_share(self, rtp: Buffer) -> Sequence[Any]:
        """(objects of a bundle, parts of x that hold heads, bundles; with sinks, first head): see `attend_to_share`."""
        return [rtp[word] for word in (0, _HEADS_OF_X, _TURNS, *[_HEAD] * self.shape.has_sinks)]

    def attend_to_share(
        self, w: ObjectFifoHandle, y: ObjectFifoHandle | None, x: Buffer, take: Callable[[Any], None], rtp: Buffer,
        counts: Sequence[Any], buffers: list[Buffer], kernels: list[Kernel], meeting: Meeting,
    ) -> None:  # fmt: skip
        """Attend to the tile's share of each bundle's keys, and merge the shares that other tiles give it.

        Words: those of attention (kernels/README.md), with objects of a bundle for chunks; word 8, positions from one
        of the tile's objects to the next; word 9, parts of x that hold heads; word 10, bundles (0 where a call has no
        attention); word 11, the first KV head of its class; words 12 and 13, the elements of x where the token's own
        keys and values begin.
        """
        share, *dequantized = buffers
        start, attend, meet, give, store, *with_sinks = kernels
        heads, rows, d, cap = self.bundle, self.shape.group, self.shape.d, bits(self.shape.softcap)
        objects, parts_of_heads, turns, *first_head = counts
        has_result, before_sinks = meeting.leaves and not meeting.onward, self.shape.dealt_heads - self.shape.kv_heads

        def pass_on(part: Any) -> None:
            for number, other in enumerate(meeting.others):
                meet(other.acquire(1), share, part, number, d)
                other.release(1)
            for onward in meeting.onward:
                give(share, onward.acquire(1), part)
                onward.release(1)

        take(parts_of_heads)
        for turn in range_(turns):
            start(rtp, share, heads * rows, d)
            for begin, first in zip(with_sinks, first_head, strict=True):
                for head in range_(heads) if has_result else ():
                    element = (before_sinks + first + turn * heads + head) * d
                    begin(x, share, element, 4, _FIRST_MAXIMUM + head * rows, _FIRST_SUM + head * rows, rows, 1)
            for _ in range_(objects):
                attend(w.acquire(1), x, rtp, share, *dequantized, turn, heads, rows, d, cap)
                w.release(1)
            if meeting.leaves:
                for part in range_(_HEADS):
                    pass_on(part)
            for part in range_(_HEADS if meeting.leaves else 0, _HEADS + heads * rows * d // _PART):
                pass_on(part)
                if y is not None and meeting.leaves:
                    store(share, y.acquire(1), part, d)
                    y.release(1)

    # --- The sequence -------------------------------------------------------------------------------------------------

    def start_key(self, part: Sweep) -> Sweep | None:
        """All of the sweep."""
        return part

    def words(self, token: Token, part: Sweep | None) -> Sequence[Sequence[int | None]]:
        """See `attend_to_share`: tiles differ in their first key, and classes in their first KV head."""
        tiles = self.columns * TILES
        if part is None:
            nothing: list[int | None] = [None] * _WORDS
            nothing[_HEADS_OF_X] = nothing[_TURNS] = 0
            nothing[_HEAD] = 0 if self.shape.has_sinks else None
            return [nothing] * tiles
        shape = self.shape
        chunks, position, first, *others = part.words(token.position, 1)
        own_keys = shape.heads * shape.d
        own = own_keys, own_keys + shape.kv_heads * shape.d
        words = []
        for tile in range(tiles):
            of_class, sharer = self._class_of(tile)
            head = of_class * shape.kv_heads // self.classes
            key = first + sharer * self.positions
            words.append([chunks, position, key, *others, self.keys, self._parts_of_heads, self.turns, head, *own])
        return words

    def _class_of(self, tile: int) -> tuple[int, int]:
        """The class of a tile, and its number among the class's tiles."""
        column, row = divmod(tile, TILES)
        tiles = TILES // self.classes  # a class's in a column
        return row // tiles, column * tiles + row % tiles

    def plan(self, steps: LayerSequence, index: int) -> None:
        """Keys and values for the streams, a task for each bundle: round x positions of a stream's tiles x bytes."""
        token, part, line = steps.token, steps.sweep(index), self._line
        of_position = self.bundle * 2 * self.shape.row_bytes
        total = self.cache_bytes(steps.caches, token.capacity)
        sizes = [part.chunks, TILES_OF_STREAM * self.positions, of_position]
        for turn in range(self.turns):
            for number, stream in enumerate(steps.weights.streams):
                of_class, sharer = self._class_of(number * TILES_OF_STREAM)
                first = steps.cache_of(index) * token.capacity + part.first_key + sharer * self.positions
                offset = first * line + (of_class * self.turns + turn) * of_position
                tap = TensorAccessPattern([total], offset, sizes, [self.keys * line, line, 1])
                stream.waiting.append((steps.planned, steps.buffers.cache_bytes, tap))
        steps.planned += 1

    def send_heads(self, steps: LayerSequence, index: int) -> None:
        """Send queries, keys and values in the order in which they lie, and then the sinks."""
        shape, end = self.shape, steps.ends.heads
        if shape.norm_of_all_heads:
            super().send_heads(steps, index)
        else:
            first, count = steps.regions["qkv"].offset, shape.heads_size
            steps.send(end, steps.buffers.state, run(steps.state_size, first, count))
        if shape.sinks:
            of_heads = run(steps.vectors_size, steps.sinks_of(index), shape.kv_heads * shape.d)
            steps.send(end, steps.buffers.vectors, of_heads)

    def drain_contexts(self, steps: LayerSequence) -> list[Any]:
        """Start the drain of the first column, whose first and third tile have the output of a class each."""
        of_class, first = self.shape.heads * self.shape.d // self.classes, steps.regions["context"].offset
        second = steps.regions["after"].offset - first if self.classes == 1 else of_class
        tap = steps.in_state(first, [of_class // _PART, STREAMS, _PART], [_PART, second, 1])
        return [steps.drain(steps.ends.products[0], steps.buffers.state, tap)]

    def attend(self, steps: LayerSequence, index: int, appended: list[Any]) -> list[Any]:  # noqa: ARG002
        """Start the phase of keys and values: none of them was just made, so there is nothing to wait for."""
        steps.start_phase()
        return appended

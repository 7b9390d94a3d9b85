# SPDX-License-Identifier: Apache-2.0
"""The interface of a way of attention in a decode layer (design.py), and the RoPE tile, which each way has.

The RoPE tile takes the heads of a token in batches: first the queries, which go to the place that the way of attention
chooses; then the keys, and the unchanged values, which leave for the KV cache. Norms and angles come on the same stream
ahead of the heads, so that the shim tile's other stream is left for weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from flownpu.aie.designs.common import F32, I32, U8, kernel, limits_of, run, tensor, worker
from flownpu.aie.designs.decode_layer.shape import ROPE_COLUMN, LayerShape
from flownpu.aie.iron.compat import Buffer, ObjectFifo, Tile, range_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flownpu.aie.designs.attention import Sweep
    from flownpu.aie.designs.common import RunTimeParameters
    from flownpu.aie.designs.decode_layer.call import Token
    from flownpu.aie.designs.decode_layer.sequence import LayerSequence
    from flownpu.aie.iron.compat import Kernel, ObjectFifoHandle, TensorAccessPattern, Worker


_LANES = 16  # partial sums of squares (kernels/norm_rope.cc)


class AttentionEnds(NamedTuple):
    """The host's ends of the streams that only attention has, by column."""

    keys: list[ObjectFifoHandle]
    values: list[ObjectFifoHandle]
    contexts: list[ObjectFifoHandle]


class Meeting(NamedTuple):
    """The way on which a projecting tile's part of a result (a sum, or a share of attention) meets other tiles' parts.

    Attributes:
        others: fifos on which the other tiles' parts come.
        onward: the fifo, at most one, on which all of them together go on; none: this tile has the result.
        leaves: whether the column gives the host a result, for which the first tile of each stream sends an object.
    """

    others: list[ObjectFifoHandle]
    onward: list[ObjectFifoHandle]
    leaves: bool


@dataclass(frozen=True)
class Attention(ABC):
    """A way of attention in layers of a shape: pairs.py, split.py.

    What the projecting tiles do for attention is in `share` (buffers and kernels) and `attend_to_share` (a part of the
    core's program). Their defaults do nothing.

    Attributes:
        shape: the layers' sizes.
        waits: how often a layer waits for main memory.
        deals_heads: whether what the RoPE tile makes goes to the projecting tiles, as x.
    """

    shape: LayerShape
    waits: ClassVar[int] = 6
    deals_heads: ClassVar[bool] = False

    # --- Sizes --------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def columns(self) -> int:
        """Columns that project."""

    @property
    def span(self) -> int:
        """The number of neighbouring columns whose tiles share rows, and whose sums must be able to meet."""
        return 1

    @property
    @abstractmethod
    def keys(self) -> int:
        """Positions of a chunk; attention reads whole chunks."""

    @property
    def regions(self) -> Mapping[str, int]:
        """Elements of attention's own regions of `state`, by name: `context`, the output projection's x, and others."""
        return {"context": max(self.shape.projections[1].columns, self.shape.state_columns)}

    @property
    def x_size(self) -> int:
        """The most elements of x that a tile with a projection gets."""
        return self.shape.x_size

    def cache_bytes(self, _layers: int, _capacity: int) -> int | None:
        """Bytes of the argument `cache_bytes`, if attention reads bytes; None: it reads `cache`."""
        return None

    # --- The array ----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def cores(self) -> list[str]:
        """Names of the cores that have run-time parameters of attention, but for the RoPE tile."""

    @abstractmethod
    def place(self, queries: ObjectFifo, parameters: RunTimeParameters) -> tuple[AttentionEnds, list[Worker]]:
        """Make the tiles that only attend and get the RoPE tile's queries; return the host's ends and the tiles.

        The first of the parameters' buffers is the RoPE tile's, then come those of `cores`.
        """

    def share(self) -> tuple[dict[str, Any], list[Kernel]]:
        """The attention's share of a projecting tile: types of its buffers, by name, and kernels."""
        return {}, []

    def meetings(self, sums: Sequence[Sequence[Meeting]]) -> Sequence[Sequence[Meeting | None]]:
        """How each projecting tile's share of attention meets the others'; `sums`: how the sums of shared rows meet."""
        return [[None] * len(column) for column in sums]

    def counts_of_share(self, rtp: Buffer) -> Sequence[Any]:  # noqa: ARG002
        """In a projecting tile, before its first phase: read the words that `attend_to_share` takes as `counts`."""
        return ()

    def attend_to_share(  # noqa: B027 (not every way has a share here)
        self, w: ObjectFifoHandle, y: ObjectFifoHandle | None, x: Buffer, take: Callable[[Any], None], rtp: Buffer,
        counts: Sequence[Any], buffers: list[Buffer], kernels: list[Kernel], meeting: Meeting,
    ) -> None:  # fmt: skip
        """In a projecting tile, after its first phase; `take(n)`: take n parts of x; `counts`: `counts_of_share`."""

    # --- The sequence -------------------------------------------------------------------------------------------------

    @abstractmethod
    def words(self, token: Token, part: Sweep | None) -> Sequence[Sequence[int | None]]:
        """Run-time parameters of each of the cores; `part` None: those that make them skip attention.

        None in place of a word: its value does not matter.
        """

    def start_key(self, part: Sweep) -> Sweep | None:  # noqa: ARG002
        """The part of a layer's sweep on which the projecting tiles' words depend: equal neighbours start together."""
        return None

    def plan(self, steps: LayerSequence, index: int) -> None:  # noqa: B027 (the same)
        """Add what the weights' streams carry for attention, after a layer's first projection."""

    def queries_in(self, size: int, first: int) -> TensorAccessPattern:
        """The walk over [H, d] elements from `first` on, in the order in which the RoPE tile takes query heads."""
        return run(size, first, self.shape.heads * self.shape.d)

    def send_heads(self, steps: LayerSequence, index: int) -> None:  # noqa: ARG002
        """Send queries, keys and values to the RoPE tile; those that share a norm twice, first for its sum."""
        shape, size, first = self.shape, steps.state_size, steps.regions["qkv"].offset
        of_queries, of_keys = shape.heads * shape.d, shape.kv_heads * shape.d
        queries, keys_and_values = self.queries_in(size, first), run(size, first + of_queries, 2 * of_keys)
        taps = [queries, keys_and_values]
        if shape.norm_of_all_heads:
            taps = [queries, queries, run(size, first + of_queries, of_keys), keys_and_values]
        for tap in taps:
            steps.send(steps.ends.heads, steps.buffers.state, tap)

    @abstractmethod
    def drain_contexts(self, steps: LayerSequence) -> list[Any]:
        """Start the drains of attention's output."""

    @abstractmethod
    def attend(self, steps: LayerSequence, index: int, appended: list[Any]) -> list[Any]:
        """Start a layer's attention; return those of the drains `appended` that it did not await.

        `appended`: the drains of the token's keys and values into the cache.
        """


def rope_tile(way: Attention, parameters: RunTimeParameters) -> tuple[ObjectFifo, ObjectFifo, list[ObjectFifo], Worker]:
    """The fifo of batches of heads, those of queries and of keys and values, and the tile.

    Keys and values leave in bf16, and with an int8 cache on one more fifo in int8. If the way deals heads, sinks follow
    the values to the projecting tiles.

    The first batches are tables: the norms of queries and keys, if there are any, and the angles. If the way deals
    heads to the projecting tiles, keys and values follow the queries on their fifo, too. Words: word 0, epsilon's bits.

    The weights of a norm of all heads stay in the tile, and the heads of such a norm come twice: first for their mean.
    """
    shape, heads_of_batch = way.shape, tensor(way.shape.batch * way.shape.d)
    heads, queries, key_value = (ObjectFifo(heads_of_batch, name=name) for name in ("heads", "queries", "key_value"))
    rows = tensor(shape.batch * shape.row_bytes, U8)
    in_int8 = [ObjectFifo(rows, name="int8_key_value")] * shape.int8_cache
    quantize = [kernel("int8_rows", "int8_rows", heads_of_batch, rows, I32, I32)] * shape.int8_cache
    copy = kernel("copy_part", "copy_heads", heads_of_batch, heads_of_batch, I32, I32)
    kernels, kinds = _of_norm(shape, heads_of_batch)
    tables = [Buffer(kind, name=name) for name, kind in kinds.items()]
    fifos = heads.cons(), queries.prod(), key_value.prod(), [fifo.prod() for fifo in in_int8], quantize
    arguments = [way, *fifos, tables, parameters.buffers[0], parameters.barrier, [copy, *kernels]]
    tile = Tile(ROPE_COLUMN, limits_of("npu2").first_compute_row)
    return heads, queries, [key_value, *in_int8], worker(_turn_heads, arguments, tile=tile)


def _of_norm(shape: LayerShape, heads_of_batch: Any) -> tuple[list[Kernel], dict[str, Any]]:
    """The kernels that turn heads, by the norm of the heads; and the types of their tables, by name."""
    if shape.norm_of_all_heads:
        sums, weights = tensor(_LANES, F32), tensor(sum(shape.qk_norm_sizes))
        turned = [heads_of_batch, weights, heads_of_batch, sums, heads_of_batch]
        kernels = [
            kernel("norm_rope", "all_norm_rope", *turned, *[I32] * 5),
            kernel("norm_rope", "square_sums", heads_of_batch, sums, *[I32] * 2),
            kernel("copy_part", "copy_norms", heads_of_batch, weights, *[I32] * 3),
        ]
        return kernels, {"norms": weights, "squares": sums, "angles": heads_of_batch}
    if shape.qk_norm:
        rope = kernel("norm_rope", "rms_norm_rope", *[heads_of_batch] * 4, *[I32] * 3)
    else:
        rope = kernel("rope", "rope", *[heads_of_batch] * 3, *[I32] * 2)
    names = [*["query_norm", "key_norm"] * shape.qk_norm, "angles"]
    return [rope], dict.fromkeys(names, heads_of_batch)


def _turn_heads(
    way: Attention, heads: ObjectFifoHandle, queries: ObjectFifoHandle, key_value: ObjectFifoHandle,
    in_int8: list[ObjectFifoHandle], quantize: list[Kernel], tables: list[Buffer], rtp: Buffer, barrier: Any,
    kernels: list[Kernel],
) -> None:  # fmt: skip
    """The program of the RoPE tile."""
    shape, batch, d = way.shape, way.shape.batch, way.shape.d
    barrier.wait_for_value(1)
    barrier.release_with_value(1)
    copy, rope, *of_all_heads = kernels
    *norms, angles = tables
    epsilon = rtp[0]
    if of_all_heads:
        total, place_in = of_all_heads
        all_norms, squares = norms
        for part in range_((shape.heads + shape.kv_heads) // batch):
            place_in(heads.acquire(1), all_norms, 0, part, batch * d)
            heads.release(1)
    for table in [angles] if of_all_heads else tables:
        copy(heads.acquire(1), table, 0, d)
        heads.release(1)

    def passed_on(made: Any) -> None:
        for rows, to_int8 in zip(in_int8, quantize, strict=True):
            to_int8(made, rows.acquire(1), batch, d)
            rows.release(1)
        if way.deals_heads:
            copy(made, queries.acquire(1), 0, batch * d)
            queries.release(1)

    def turn(given: Any, made: Any, place: int, part: Any) -> None:
        if of_all_heads:
            first = part * batch + place * shape.heads
            rope(given, all_norms, angles, squares, made, batch, d, first, shape.qk_norm_sizes[place], epsilon)
        elif norms:
            rope(given, norms[place], angles, made, batch, d, epsilon)
        else:
            rope(given, angles, made, batch, d)

    for place, (out, count) in enumerate([(queries, shape.heads), (key_value, shape.kv_heads)]):
        if of_all_heads:
            for part in range_(count // batch):
                total(heads.acquire(1), squares, batch * d, part)
                heads.release(1)
        for part in range_(count // batch):
            made = out.acquire(1)
            turn(heads.acquire(1), made, place, part)
            heads.release(1)
            if place:
                passed_on(made)
            out.release(1)
    for _ in range_(shape.kv_heads // batch):
        values, made = heads.acquire(1), key_value.acquire(1)
        copy(values, made, 0, batch * d)
        passed_on(values)
        heads.release(1)
        key_value.release(1)
    for _ in range_(shape.kv_heads // batch) if way.deals_heads and shape.sinks else ():
        copy(heads.acquire(1), queries.acquire(1), 0, batch * d)
        heads.release(1)
        queries.release(1)

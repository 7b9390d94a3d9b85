# SPDX-License-Identifier: Apache-2.0
"""What a way of attention brings into a decode layer (design.py), and the RoPE tile, which each way has.

The RoPE tile takes the heads of a token in batches: first the queries, which go where the way wants them, then the keys
and, as they are, the values, which leave for the KV cache. Norms and angles come on the same stream ahead of them: it
is the only one, so that another of the shim's is left for weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from flownpu.aie.designs.common import I32, kernel, limits_of, tensor, worker
from flownpu.aie.designs.decode_layer.shape import ROPE_COLUMN, LayerShape
from flownpu.aie.iron.compat import Buffer, ObjectFifo, Tile, range_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flownpu.aie.designs.attention import Sweep
    from flownpu.aie.designs.common import RunTimeParameters
    from flownpu.aie.designs.decode_layer.call import Token
    from flownpu.aie.designs.decode_layer.sequence import LayerSequence
    from flownpu.aie.iron.compat import Kernel, ObjectFifoHandle, Worker

__all__ = ["Attention", "AttentionEnds", "Meeting", "rope_tile"]


class AttentionEnds(NamedTuple):
    """The host's ends of streams that are attention's, by column."""

    keys: list[ObjectFifoHandle]
    values: list[ObjectFifoHandle]
    contexts: list[ObjectFifoHandle]


class Meeting(NamedTuple):
    """How what a projecting tile has of something, a sum or a share of attention, meets what other tiles have of it.

    Attributes:
        others: fifos on which theirs comes.
        onward: the fifo on which all of it goes on; none: it has met.
        leaves: a result goes to the host, with what else the tiles of the column give.
    """

    others: list[ObjectFifoHandle]
    onward: list[ObjectFifoHandle]
    leaves: bool


@dataclass(frozen=True)
class Attention(ABC):
    """A way of attention in layers of a shape: pairs.py, split.py.

    What the projecting tiles do for it besides their own work is a pair of functions: one makes buffers of the tile,
    the other is the part of its core's program. Their defaults do nothing.

    Attributes:
        shape: of the layers.
    """

    shape: LayerShape
    waits: ClassVar[int] = 6  # of a layer, for main memory and the sequence
    deals_heads: ClassVar[bool] = False  # what the RoPE tile makes goes to the projecting tiles, as x

    # --- Sizes --------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def columns(self) -> int:
        """Columns that project."""

    @property
    def span(self) -> int:
        """Neighbouring columns whose tiles share rows: what their tiles make can meet."""
        return 1

    @property
    @abstractmethod
    def keys(self) -> int:
        """Positions of a chunk, of which attention reads whole ones."""

    @property
    def regions(self) -> Mapping[str, int]:
        """Elements of the regions of `state` that are attention's: `context`, its output [H d], and others."""
        return {"context": self.shape.heads * self.shape.d}

    @property
    def x_size(self) -> int:
        """Elements of the longest x that projecting tiles are dealt."""
        return self.shape.x_size

    def cache_bytes(self, _layers: int, _capacity: int) -> int | None:
        """Bytes of the cache that attention reads as bytes, an argument of its own; None: it reads `cache`."""
        return None

    # --- The array ----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def cores(self) -> list[str]:
        """Names of the cores that have run-time parameters of attention, but for the RoPE tile."""

    @abstractmethod
    def place(self, queries: ObjectFifo, parameters: RunTimeParameters) -> tuple[AttentionEnds, list[Worker]]:
        """Attention's ends, and the tiles that only attend, to which the queries go on from the RoPE tile.

        The first of the parameters are the RoPE tile's, then come those of `cores`.
        """

    def share(self) -> tuple[dict[str, Any], list[Kernel]]:
        """Types of the buffers, by name, and kernels that a projecting tile has for attention."""
        return {}, []

    def meetings(self, sums: Sequence[Sequence[Meeting]]) -> Sequence[Sequence[Meeting | None]]:
        """What the projecting tiles of each column do with their shares; `sums`: with those of shared rows."""
        return [[None] * len(column) for column in sums]

    def counts_of_share(self, rtp: Buffer) -> Sequence[Any]:  # noqa: ARG002
        """In a projecting tile, before its first phase: words that decide what it does after it."""
        return ()

    def attend_to_share(  # noqa: B027 (not every way has a share here)
        self, w: ObjectFifoHandle, y: ObjectFifoHandle | None, x: Buffer, take: Callable[[Any], None], rtp: Buffer,
        counts: Sequence[Any], buffers: list[Buffer], kernels: list[Kernel], meeting: Meeting,
    ) -> None:  # fmt: skip
        """In a projecting tile, after its first phase; `take`: takes parts of x; `counts`: `counts_of_share`."""

    # --- The sequence -------------------------------------------------------------------------------------------------

    @abstractmethod
    def words(self, token: Token, part: Sweep | None) -> Sequence[Sequence[int | None]]:
        """Run-time parameters of each of the cores; of a phase without attention (None) what keeps them from it.

        None in place of a word: what it holds is of no matter.
        """

    def told(self, part: Sweep) -> Sweep | None:  # noqa: ARG002
        """What of a layer's sweep the projecting tiles are told: they start on neighbours alike at once."""
        return None

    def plan(self, steps: LayerSequence, index: int) -> None:  # noqa: B027 (the same)
        """What the weights' streams carry for a layer after its first projection."""

    @abstractmethod
    def send_heads(self, steps: LayerSequence) -> None:
        """Send queries, keys and values to the RoPE tile."""

    @abstractmethod
    def drain_contexts(self, steps: LayerSequence) -> list[Any]:
        """Start the drains of attention's output."""

    @abstractmethod
    def attend(self, steps: LayerSequence, index: int, appended: list[Any]) -> list[Any]:
        """Start a layer's attention. `appended`: the drains of the token's keys and values into the cache.

        Returns those that it did not wait for.
        """


def rope_tile(way: Attention, parameters: RunTimeParameters) -> tuple[ObjectFifo, ObjectFifo, ObjectFifo, Worker]:
    """The stream of batches of heads, the queries, the keys and values, and the tile.

    The first batches begin with a table each: the norms of queries and keys, if there are any, and the angles. Where
    heads are dealt, the keys and values follow the queries there, too. Words: epsilon's bits.
    """
    shape, batch, d = way.shape, way.shape.batch, way.shape.d
    heads_of_batch = tensor(batch * d)
    heads, queries, key_value = (ObjectFifo(heads_of_batch, name=name) for name in ("heads", "queries", "key_value"))
    copy = kernel("copy_part", "copy_heads", heads_of_batch, heads_of_batch, I32, I32)
    if shape.qk_norm:
        rope = kernel("norm_rope", "rms_norm_rope", *[heads_of_batch] * 4, *[I32] * 3)
    else:
        rope = kernel("rope", "rope", *[heads_of_batch] * 3, *[I32] * 2)

    def core(
        heads: ObjectFifoHandle, queries: ObjectFifoHandle, key_value: ObjectFifoHandle, tables: list[Buffer],
        rtp: Buffer, barrier: Any, kernels: list[Kernel],
    ) -> None:  # fmt: skip
        barrier.wait_for_value(1)
        barrier.release_with_value(1)
        copy, rope = kernels
        epsilon = rtp[0]
        for table in tables:
            copy(heads.acquire(1), table, 0, d)
            heads.release(1)

        def dealt(made: Any) -> None:
            if way.deals_heads:
                copy(made, queries.acquire(1), 0, batch * d)
                queries.release(1)

        for place, (out, count) in enumerate([(queries, shape.heads), (key_value, shape.kv_heads)]):
            for _ in range_(count // batch):
                made = out.acquire(1)
                if shape.qk_norm:
                    rope(heads.acquire(1), tables[place], tables[2], made, batch, d, epsilon)
                else:
                    rope(heads.acquire(1), tables[0], made, batch, d)
                heads.release(1)
                if place:
                    dealt(made)
                out.release(1)
        for _ in range_(shape.kv_heads // batch):
            values, made = heads.acquire(1), key_value.acquire(1)
            copy(values, made, 0, batch * d)
            dealt(values)
            heads.release(1)
            key_value.release(1)

    names = ["query_norm", "key_norm", "angles"] if shape.qk_norm else ["angles"]
    tables = [Buffer(heads_of_batch, name=name) for name in names]
    fifos = heads.cons(), queries.prod(), key_value.prod()
    arguments = [*fifos, tables, parameters.buffers[0], parameters.barrier, [copy, rope]]
    tile = Tile(ROPE_COLUMN, limits_of("npu2").first_compute_row)
    return heads, queries, key_value, worker(core, arguments, tile=tile)

# SPDX-License-Identifier: Apache-2.0
"""Attention on columns of its own: up to four pairs of tiles, as in FlowKV (designs/flow_kv.py).

    columns 0-3     16 tiles project, with four more in columns 6 and 7
    columns 4, 5    up to four pairs attend; eight KV heads take two turns. With one or two KV heads, only
                    column 5 attends, and column 4 projects

A column's two pairs share its streams, keys on one, values on the other. Queries go from the RoPE tile to the pairs
inside the array: a batch has one head for each pair, and a pair's object, all query heads of a KV head, is filled from
as many batches. A layer waits six times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.attention import Cache
from flownpu.aie.designs.common import TILES, ceil_div, limits_of, tensor
from flownpu.aie.designs.decode_layer.attention import Attention, AttentionEnds
from flownpu.aie.designs.decode_layer.shape import RESIDUAL_COLUMN, ROPE_COLUMN
from flownpu.aie.designs.flow_kv import Pairs
from flownpu.aie.iron.compat import TensorAccessPattern, Tile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.designs.attention import Sweep
    from flownpu.aie.designs.common import RunTimeParameters
    from flownpu.aie.designs.decode_layer.call import Token
    from flownpu.aie.designs.decode_layer.sequence import LayerSequence
    from flownpu.aie.iron.compat import ObjectFifo, Worker

_PAIRS_OF_A_COLUMN = TILES // 2


@dataclass(frozen=True)
class PairsOfTiles(Attention):
    """The pairs take KV heads one after the other: pair p the heads turn x pairs + p."""

    def __post_init__(self) -> None:
        if self.shape.int8_cache:
            raise ValueError("[decode_layer, pairs] expected a KV cache in bf16, got one in int8")

    @property
    def pairs(self) -> int:
        """Pairs of tiles: a batch has a head for each."""
        return self.shape.batch

    @property
    def attention_columns(self) -> int:
        """Columns of the pairs."""
        return ceil_div(self.pairs, _PAIRS_OF_A_COLUMN)

    @property
    def columns(self) -> int:
        """The columns that the pairs leave before the residual tile's, and one more of tiles in columns 6 and 7."""
        return RESIDUAL_COLUMN - self.attention_columns + 1

    @property
    def turns(self) -> int:
        """KV heads of a pair."""
        return self.shape.kv_heads // self.pairs

    @property
    def keys(self) -> int:
        """Positions of a chunk: 16 KB of keys or fewer, two of which fit L1 with the rest (as in flow_kv.py)."""
        return min(64, 8192 // self.shape.d // 16 * 16)

    # --- The array ----------------------------------------------------------------------------------------------------

    @property
    def cores(self) -> list[str]:
        """The K tile and the V tile of each pair."""
        return [f"{kind}_tile_{pair}" for pair in range(self.pairs) for kind in "kv"]

    def place(self, queries: ObjectFifo, parameters: RunTimeParameters) -> tuple[AttentionEnds, list[Worker]]:
        """The queries are dealt to the pairs in the RoPE tile's memory tile."""
        shape, columns = self.shape, range(RESIDUAL_COLUMN - self.attention_columns, RESIDUAL_COLUMN)
        offsets, line = [pair * shape.d for pair in range(self.pairs)], tensor(shape.group * shape.d)
        parts = queries.cons().split(offsets, Tile(ROPE_COLUMN, 1), obj_types=[line] * self.pairs)
        pairs = Pairs(
            shape.group, self.keys, shape.d, min(_PAIRS_OF_A_COLUMN, self.pairs), columns, self.turns, shape.softcap,
            shape.sinks,
        )  # fmt: skip
        keys, values, outputs, workers = pairs.columns_of(parts, parameters.buffers[1:], parameters)
        ends = AttentionEnds(
            [fifo.prod(tile=Tile(column, 0)) for column, fifo in zip(columns, keys, strict=True)],
            [fifo.prod(tile=Tile(column, 0)) for column, fifo in zip(columns, values, strict=True)],
            [fifo.cons(tile=Tile(column, 0)) for column, fifo in zip(columns, outputs, strict=True)],
        )
        return ends, workers

    # --- The sequence -------------------------------------------------------------------------------------------------

    def words(self, token: Token, part: Sweep | None) -> Sequence[Sequence[int | None]]:
        """The parameters of attention (kernels/README.md) for K tiles. V tiles get the first of them, the chunks."""
        if part is None:
            return []
        words = part.words(token.position, 1)
        return [words, words[:1]] * self.pairs

    def queries_in(self, size: int, first: int) -> TensorAccessPattern:
        """In the order turn x query head of the group x pair x d."""
        group, d, pairs = self.shape.group, self.shape.d, self.pairs
        sizes, strides = [self.turns, group, pairs, d], [pairs * group * d, d, group * d, 1]
        return TensorAccessPattern([size], first, sizes, strides)

    def drain_contexts(self, steps: LayerSequence) -> list[Any]:
        """Start each column's drain: a line of each pair, turn by turn."""
        line, pairs = self.shape.group * self.shape.d, self.pairs // self.attention_columns
        sizes, strides = [self.turns, pairs * line], [self.pairs * line, 1]
        first = steps.regions["context"].offset
        return [
            steps.drain(end, steps.buffers.state, steps.in_state(first + column * pairs * line, sizes, strides))
            for column, end in enumerate(steps.ends.attention.contexts)
        ]

    def attend(self, steps: LayerSequence, index: int, appended: list[Any]) -> list[Any]:
        """Each pair sweeps over the cache once for each of its KV heads."""
        steps.wait(appended)
        shape, part, ends = self.shape, steps.sweep(index), steps.ends.attention
        pairs, most = self.pairs // self.attention_columns, limits_of("npu2").iteration_maximum
        capacity = steps.token.capacity
        cache = Cache(steps.caches * capacity, shape.kv_heads, shape.d, self.keys)
        here = replace(part, first_key=steps.cache_of(index) * capacity + part.first_key)
        for turn in range(self.turns):
            if sinks := shape.sinks:
                for column, end in enumerate(ends.keys):
                    first = steps.sinks_of(index) + (turn * self.pairs + column * pairs) * shape.d
                    steps.send(end, steps.buffers.vectors, sinks.chunk(steps.vectors_size, first, pairs, self.keys))
            taps = [
                (end, cache.chunks(here, 2 * (turn * self.pairs + column * pairs) + value, pairs, 2, most))
                for value, ends_of_columns in enumerate((ends.keys, ends.values))
                for column, end in enumerate(ends_of_columns)
            ]
            # Keys and values in turn: the values of a task of keys must have started before the task is awaited.
            for place in range(ceil_div(part.chunks, most)):
                for end, of_end in taps:
                    steps.send(end, steps.buffers.cache, of_end[place])
        return []

# SPDX-License-Identifier: Apache-2.0
"""Parts of the two attention designs: the KV cache as the array reads it, and the words of a sweep.

**The KV cache** is [capacity][KV heads][2][d]: for each position, for each head, its key, then its value. So the
strides of a chunk do not grow with the context (a shim's stride reaches 2^20 words, and one head's cache in the usual
layout may be longer), and a new position is one contiguous line. The capacity is a multiple of a chunk. Beyond the last
key there must be finite numbers, which the kernels mask.

An encoder has no cache: its keys and values are read where the packed projection left them (`PackedQKV`).

**Sinks**, one number a head that joins its softmax as a key's score and has no value, are [KV heads][d] and
`SINK_PADDING` elements, bf16: for each KV head, m f32[group] and l f32[group], the maximum and the denominator with
which its query heads begin (kernels/sinks.cc). They come as a chunk ahead of the keys, whose first row they are.

A **sweep** takes the chunks of `keys` positions from the one with the first visible key to the one with the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import F32, I32, bits, ceil_div, kernel, tensor
from flownpu.aie.iron.compat import TensorAccessPattern

if TYPE_CHECKING:
    from flownpu.aie.iron.compat import Kernel

ALL_KEYS = 2147483647  # the window that hides no key (kernels/README.md)
# Elements behind sinks. A walk cannot stay where it is, so the other rows of a chunk begin 2 elements (a shim's
# granule) later each; a chunk has up to 64.
SINK_PADDING = 2 * 64
MOVING = 4  # words of `Sweep.words` that change with the position: chunks, first query, first key, key end


@dataclass(frozen=True)
class Sweep:
    """The chunks of keys that a call reads, and how its queries see them.

    Attributes:
        chunks: how many.
        first_key: the first chunk's first position.
        key_end: positions that hold keys; those from there on are masked.
        window: keys that a query sees, its own included; ALL_KEYS: all.
        causal: whether a query sees no key behind its own position.
        scale: the scores' factor.
    """

    chunks: int
    first_key: int
    key_end: int
    window: int
    causal: bool
    scale: float

    def words(self, first_query: int, queries: int) -> list[int]:
        """The run-time parameters of attention (kernels/README.md) for a core whose first query is `first_query`."""
        scale = bits(self.scale * math.log2(math.e))
        return [
            self.chunks, first_query, self.first_key, self.key_end, self.window, int(self.causal), scale, queries,
        ]  # fmt: skip


def sweep(
    first_query: int, queries: int, total: int, keys: int, *, window: int | None, causal: bool, scale: float
) -> Sweep:
    """The part of `total` keys that queries at first_query .. first_query + queries see, in chunks of `keys` positions.

    `window`: keys that a query sees, its own included; None: all.
    """
    last = min(total, first_query + queries) if causal else total
    first = max(0, first_query - window + 1) if window else 0
    first = min(first, last - 1) // keys * keys
    return Sweep(ceil_div(last - first, keys), first, total, window or ALL_KEYS, causal, scale)


@dataclass(frozen=True)
class Cache:
    """The KV cache of a call, read in chunks.

    Attributes:
        capacity: positions, a multiple of a chunk.
        kv_heads: KV heads.
        d: head size.
        keys: positions of a chunk.
    """

    capacity: int
    kv_heads: int
    d: int
    keys: int

    @property
    def line(self) -> int:
        """Elements of a position."""
        return self.kv_heads * 2 * self.d

    @property
    def size(self) -> int:
        """Elements in all."""
        return self.capacity * self.line

    def chunks(self, part: Sweep, first: int, count: int, step: int, most: int) -> list[TensorAccessPattern]:
        """A sweep's chunks of `count` vectors of each position, with up to `most` chunks in a tap.

        Each chunk is vector x position x d. `first`, `step`: the vectors' places among those of a position. `most`: how
        often a task may repeat (`Limits.iteration_maximum`).
        """
        return [
            TensorAccessPattern(
                [self.size],
                (part.first_key + start * self.keys) * self.line + first * self.d,
                [min(most, part.chunks - start), count, self.keys, self.d],
                [self.keys * self.line, step * self.d, self.line, 1],
            )
            for start in range(0, part.chunks, most)
        ]

    def of_head(self, part: Sweep, head: int, most: int) -> list[TensorAccessPattern]:
        """A sweep's chunks of one KV head: its keys, then its values."""
        return self.chunks(part, 2 * head, 2, 1, most)


@dataclass(frozen=True)
class PackedQKV(Cache):
    """Queries, keys and values [capacity, H + 2 G, d] as the packed projection makes them, read as a cache is.

    Attributes:
        heads: query heads H, before the keys.
        pitch: elements from one position to the next; the last of them may be padding.
    """

    heads: int
    pitch: int

    @property
    def line(self) -> int:
        """Elements of a position."""
        return self.pitch

    def of_head(self, part: Sweep, head: int, most: int) -> list[TensorAccessPattern]:
        """A sweep's chunks of one KV head: its keys, then its values."""
        return self.chunks(part, self.heads + head, 2, self.kv_heads, most)


@dataclass(frozen=True)
class Sinks:
    """The sinks of a call or layer, as the array reads them.

    Attributes:
        kv_heads: KV heads.
        group: query heads of a KV head, at most d / 4: each has two numbers in f32.
        d: head size.

    Raises:
        ValueError: a group is larger.
    """

    kv_heads: int
    group: int
    d: int

    def __post_init__(self) -> None:
        if 4 * self.group > self.d:
            raise ValueError(
                f"[attention] expected {self.d // 4} query heads or fewer to a KV head with sinks, got {self.group}"
            )

    @property
    def size(self) -> int:
        """Elements in all."""
        return self.kv_heads * self.d + SINK_PADDING

    def chunk(self, total: int, first: int, count: int, keys: int) -> TensorAccessPattern:
        """The walk over a chunk of `keys` rows for each of `count` neighbouring KV heads.

        `total`: elements of the buffer; `first`: where the first KV head's sinks begin in it.
        """
        return TensorAccessPattern([total], first, [count, keys, self.d], [self.d, 2, 1])

    def kernel_of_chunk(self, chunk: Any, rows: int) -> tuple[Kernel, tuple[int, ...]]:
        """The kernel that begins a state of `rows` rows with a chunk's sinks, and its arguments after both.

        `chunk`: its type.
        """
        made = kernel("sinks", "attention_sinks", chunk, tensor(2 * rows + 16, F32), *[I32] * 6)
        return made, (0, 32, 16, 16 + rows, self.group)

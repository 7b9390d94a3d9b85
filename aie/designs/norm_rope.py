# SPDX-License-Identifier: Apache-2.0
"""QK-norm and RoPE of a chunk of tokens, on the way from the packed QKV projection to FlowQKV and the KV cache.

A `stream` of tokens through a compute tile in each of a few columns. A token's row is cut into objects of G heads, so
that queries, keys and values are objects of one size:

    row [H / G + 2][G d]:  H / G objects of queries  -> normalised, turned -> q
                           one of keys               -> normalised, turned -> the cache
                           one of values             -> copied             -> the cache, beside their keys

The angles come on the core's second stream. The norms' weights come ahead of the rows, G times each, since an object
has G heads; the core copies them. Only the offsets of the angles' and the cache's taps depend on a chunk's position;
the number of steps and the run-time parameters do not.

Run-time parameters of a core: word 0, its number of tokens; with QK-norm word 1, epsilon's bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import BF16, I32, bits, kernel, limits_of, tensor
from flownpu.aie.designs.stream import Operand, each, stream
from flownpu.aie.iron.compat import Buffer, TensorAccessPattern, range_

if TYPE_CHECKING:
    from flownpu.aie.iron.compat import ObjectFifoHandle, Program


@dataclass(frozen=True)
class NormRope:
    """The array for heads of one shape.

    Attributes:
        target: npu1 or npu2.
        heads: query heads H.
        kv_heads: KV heads G, a divisor of H.
        d: head size, a multiple of 32; G d at most 4096.
        qk_norm: queries and keys are normalised before RoPE.
        cores: compute tiles, at most the target's columns.
    """

    target: str
    heads: int
    kv_heads: int
    d: int
    qk_norm: bool = False
    cores: int = 1

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.d % 32 or self.kv_heads * self.d > 4096:
            raise ValueError(
                f"[norm_rope] expected heads in multiples of the KV heads, d in multiples of 32 and KV heads x d of "
                f"4096 or less, got {self.heads}, {self.kv_heads} and {self.d}"
            )

    def program(
        self, tokens: int, position: int, capacity: int, *, tables: int = 1, table: int = 0, epsilon: float = 1e-6
    ) -> Program:
        """A chunk of `tokens` of which the first is at `position`.

        Host buffers, bf16: qkv [tokens, (H + 2 G) d]; rotary [tables, capacity, d], cos[d/2] and sin[d/2] of each
        position; with qk_norm norms [2, d], of queries and of keys; q [tokens, H, d]; cache [capacity, G, 2, d]
        (designs/attention.py), of which the positions of the chunk are written.

        Raises:
            ValueError: no token, or a position or table that does not fit.
        """
        if not 0 <= position < position + tokens <= capacity or not 0 <= table < tables:
            raise ValueError(
                f"[norm_rope] expected tokens up to a capacity of {capacity} and a table in 0..{tables - 1}, got "
                f"{tokens} at {position} and table {table}"
            )
        group, kv_heads, d = self.heads // self.kv_heads, self.kv_heads, self.d
        heads, head = tensor(kv_heads * d), tensor(d)
        copy = kernel("copy_part", "copy_part", heads, heads, I32, I32)
        turn = kernel("rope", "rope", heads, head, heads, I32, I32)
        if self.qk_norm:  # a weight's first d elements count
            turn = kernel("norm_rope", "rms_norm_rope", heads, heads, head, heads, *[I32] * 3)

        def body(
            qkv: ObjectFifoHandle, rotary: ObjectFifoHandle, q: ObjectFifoHandle, cache: ObjectFifoHandle, *rest: Any
        ) -> None:
            turn, copy, *weights, rtp = rest
            count = rtp[0]
            epsilon_bits = rtp[1] if weights else 0
            for weight in weights:
                copy(qkv.acquire(1), weight, 0, d)
                qkv.release(1)
            for _ in range_(count):
                angles = rotary.acquire(1)

                def turned(target: ObjectFifoHandle, place: int, angles: Any = angles) -> None:
                    if weights:
                        turn(qkv.acquire(1), weights[place], angles, target.acquire(1), kv_heads, d, epsilon_bits)
                    else:
                        turn(qkv.acquire(1), angles, target.acquire(1), kv_heads, d)
                    qkv.release(1)
                    target.release(1)

                for _ in range_(group):
                    turned(q, 0)
                turned(cache, 1)
                rotary.release(1)
                copy(qkv.acquire(1), cache.acquire(1), 0, kv_heads * d)
                qkv.release(1)
                cache.release(1)

        inputs = [
            each("qkv", tokens, kv_heads * d, objects=group + 2),
            self._angles(table * capacity + position, tables * capacity),
        ]
        if self.qk_norm:
            weights = [TensorAccessPattern([2 * d], place * d, [kv_heads, d], [0, 1]) for place in range(2)]
            inputs.append(Operand("norms", kv_heads * d, BF16, 2 * d, lambda _: weights, ahead_of="qkv"))
        outputs = [each("q", tokens, kv_heads * d, objects=group), self._lines(position, capacity)]

        def state(core: int) -> list[Buffer]:
            return [Buffer(heads, name=f"{name}_weight_{core}") for name in "qk"] if self.qk_norm else []

        words = [bits(epsilon)] if self.qk_norm else []
        return stream(self.target, self.cores, tokens, inputs, outputs, body, [turn, copy], words, state)

    # --- What depends on the position ---------------------------------------------------------------------------------

    def _angles(self, first: int, lines: int) -> Operand:
        """A line of the tables for each token."""
        d = self.d

        def taps(tokens: range) -> list[TensorAccessPattern]:
            sizes, strides = [len(tokens), d], [tokens.step * d, 1]
            return [TensorAccessPattern([lines * d], (first + tokens.start) * d, sizes, strides)]

        return Operand("rotary", d, BF16, lines * d, taps)

    def _lines(self, position: int, capacity: int) -> Operand:
        """A position of the cache for each token: its keys, then its values, each head's in its place."""
        d, kv_heads = self.d, self.kv_heads
        line, most = 2 * kv_heads * d, limits_of(self.target).iteration_maximum

        def taps(tokens: range) -> list[TensorAccessPattern]:
            parts = [tokens[start : start + most] for start in range(0, len(tokens), most)]
            return [
                TensorAccessPattern(
                    [capacity * line],
                    (position + part.start) * line,
                    [len(part), 2, kv_heads, d],
                    [part.step * line, d, 2 * d, 1],
                )
                for part in parts
            ]

        return Operand("cache", kv_heads * d, BF16, capacity * line, taps)

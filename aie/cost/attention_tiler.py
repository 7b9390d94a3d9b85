# SPDX-License-Identifier: Apache-2.0
"""Tiles of attention: how much of it is folded into one call, how many rows and keys a tile takes, and what that costs.

*Folding* (Zen-Attention, section III): level 3 is Q K^T, softmax and the product with V in one call, which needs a
tile's queries, sums and two chunks in L1 (FlowQKV, FlowKV); level 2 is Q K^T with the softmax, which needs whole rows
of scores in L1; level 1 is neither. The tiler tries all rows and chunks that the kernels take and L1 holds; of those
that are as fast as the fastest but for 5 % it keeps the one that reads least.

*Rows* of a tile are tokens times the query heads of a KV head (MHA: one, MQA: all, GQA: heads / KV heads), so a group
is never split between tiles, and a sweep over the keys serves all of it. *L_c*, the positions of a chunk, is as long as
L1 allows: fewer calls, and as many bytes.

*Two tiles* (arXiv 2602.06063, figures 10 and 11): a K tile computes scores of a chunk while its V tile multiplies the
one before; both streams are busy if no kernel takes longer than a chunk's transfer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu.aie.cost.kernels import published_cycles
from flownpu.aie.cost.memory import read_rate
from flownpu.aie.cost.parameters import VALUES
from flownpu.aie.designs.common import TILES, ceil_div
from flownpu.aie.designs.flow_qkv import tile_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flownpu.aie.cost.device import Device
    from flownpu.aie.cost.parameters import Values

__all__ = ["AttentionShape", "AttentionTiling", "PairTiming", "l1_bytes", "read_bandwidth", "tile_attention"]

_BF16, _F32 = 2, 4
_SUB_TILE = 8  # sides of the matrix unit's operands: of rows (FlowQKV), keys and d
_LANES = 16  # scores that the softmax takes at a time
_HEAD_ROWS = 4  # rows of FlowKV come in fours
_CORE_BYTES = 64 + 12  # of a core's run-time parameters, and the words that count its three fifos' objects
_ALIKE = 1.05  # what is within 5 % is alike, less than the model's error: then the one that reads least is taken
_MOST_KEYS = 64  # of a chunk: a longer one makes nothing faster that was in a published list


@dataclass(frozen=True)
class AttentionShape:
    """One attention: any sizes; the tiler pads.

    Attributes:
        heads: query heads.
        kv_heads: KV heads, a divisor of the heads: as many (MHA), one (MQA) or between (GQA).
        d: head size.
        queries: tokens of the call.
        keys: positions, those of the call with them.
        window: positions a query sees, itself the last; None: all.
        causal: a query sees no later position.
        bias: a mask or bias is added to the scores.
    """

    heads: int
    kv_heads: int
    d: int
    queries: int
    keys: int
    window: int | None = None
    causal: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.d, self.queries, self.keys) < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"[attention tiler] expected positive sizes, and KV heads that divide the heads, got {self}"
            )
        if self.causal and self.queries > self.keys:
            raise ValueError(
                f"[attention tiler] expected as many keys as queries or more, got {self.queries} and {self.keys}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"[attention tiler] expected a window of 1 or more, got {self.window}")

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def padded_d(self) -> int:
        """The head size as the kernels take it."""
        return _up(self.d, _SUB_TILE)

    def chunks(self, top: int, queries: int, length: int) -> int:
        """Chunks that a block of queries from `top` sweeps."""
        first_query = self.keys - self.queries + top if self.causal else top
        end = min(self.keys, first_query + queries) if self.causal else self.keys
        start = max(0, first_query - self.window + 1) if self.window else 0
        return ceil_div(end, length) - start // length


@dataclass(frozen=True)
class PairTiming:
    """A K tile and a V tile, chunk after chunk (figure 11). Seconds of one chunk.

    Attributes:
        transfer: of the keys, and on the other stream of the values.
        scores: the K tile's kernel.
        values: the V tile's.
    """

    transfer: float
    scores: float
    values: float

    @property
    def step(self) -> float:
        """From one chunk to the next."""
        return max(self.transfer, self.scores, self.values)

    @property
    def streaming(self) -> bool:
        """Whether transfers hide the kernels: both streams are busy all the time."""
        return self.step == self.transfer

    def seconds(self, chunks: int) -> float:
        """Seconds of so many chunks: the first one's way through all stages, then a step for each of the others."""
        return self.transfer + self.scores + self.values + (chunks - 1) * self.step


@dataclass(frozen=True)
class AttentionTiling:
    """What the tiler chose.

    Attributes:
        level: of folding, 3, 2 or 1.
        reason: why not more; of level 3: what bounds it.
        rows: of a tile, tokens times heads of a group.
        chunk: L_c, positions of a chunk.
        heads_of_tile: query heads that a tile serves.
        columns: of the array that are used.
        padded: queries, keys and d as computed.
        l1_bytes: of a tile.
        seconds: predicted, of the call without its dispatch.
        read_bytes: of keys and values.
        pair: of a single token, a KV head's two tiles.
    """

    level: int
    reason: str
    rows: int
    chunk: int
    heads_of_tile: int
    columns: int
    padded: tuple[int, int, int]
    l1_bytes: int
    seconds: float
    read_bytes: float
    pair: PairTiming | None = None


def tile_attention(shape: AttentionShape, device: Device, values: Values = VALUES) -> AttentionTiling:
    """The fastest tiling that L1 holds, as much folded as can be."""
    limits = device.limits
    room = limits.compute.memory_bytes - limits.stack_bytes - limits.constant_bytes - _CORE_BYTES
    find = _decode if shape.queries == 1 and shape.causal and not shape.bias else _prefill
    found = list(find(shape, device, values, room))
    if not found:
        return _unfolded(shape, device, values, room)
    fastest = min(tiling.seconds for tiling in found)
    near = [tiling for tiling in found if tiling.seconds <= _ALIKE * fastest]
    return min(near, key=lambda tiling: (tiling.read_bytes, -tiling.chunk, tiling.seconds))


def l1_bytes(rows: int, chunk: int, d: int, *, bias: bool = False) -> int:
    """A FlowQKV tile's, and two chunks of a bias."""
    return tile_bytes(rows, chunk, d) + (2 * rows * chunk * _BF16 if bias else 0)


def read_bandwidth(tokens: int, chunk: int, tiles: int, heads: int, seconds: float) -> float:
    """U_mem of arXiv 2602.06063, equation 13: 2 B (1 + L / L_c) L CT_count H / T_d, in bytes a second.

    B is printed as the unit: two bytes for each key's or value's element that a tile's sweeps take, by its dimensions.
    """
    return 2.0 * (1 + tokens / chunk) * tokens * tiles * heads / seconds


def _chunks(shape: AttentionShape) -> list[int]:
    """Lengths of a chunk to try: vectors of 16 scores, or one chunk of 8 for as few keys."""
    if shape.keys <= _SUB_TILE:
        return [_SUB_TILE]
    return list(range(_LANES, min(_MOST_KEYS, _up(shape.keys, _LANES)) + 1, _LANES))


# --- Many tokens: FlowQKV ---------------------------------------------------------------------------------------------


def _prefill(shape: AttentionShape, device: Device, values: Values, room: int) -> Iterator[AttentionTiling]:
    """Level 3: a column takes a KV head and four tiles' tokens, every one of them sweeps the keys once."""
    d, step = shape.padded_d, math.lcm(_SUB_TILE, shape.group)
    whole = _up(shape.queries * shape.group, step)
    for rows in range(step, min(whole, room // (6 * d)) + 1, step):
        for chunk in sorted({_SUB_TILE, *_chunks(shape)}):
            used = l1_bytes(rows, chunk, d, bias=shape.bias)
            if used <= room:
                yield _sweeps(shape, device, values, rows, chunk, used)


def _sweeps(shape: AttentionShape, device: Device, values: Values, rows: int, chunk: int, used: int) -> AttentionTiling:
    d, queries = shape.padded_d, rows // shape.group
    block = TILES * queries
    tops = range(0, shape.queries, block)
    swept = sum(shape.chunks(top, min(block, shape.queries - top), chunk) for top in tops) * shape.kv_heads
    columns = min(device.limits.columns, len(tops) * shape.kv_heads)
    # Columns take items in turn; how many chunks each sweeps evens out, but no column has less than a whole item.
    rounds = ceil_div(len(tops) * shape.kv_heads, columns) / (len(tops) * shape.kv_heads / columns)
    kernels = sum(
        published_cycles(device, values, f"flow_qkv_{kernel}", [rows, chunk, d], 0) for kernel in ("scores", "values")
    )
    compute = swept / columns * rounds * kernels / device.clock
    run = d * _BF16
    read_bytes = swept * 2.0 * chunk * run
    reading = read_bytes * rounds / read_rate(columns, run, values)
    bound = "its kernels" if compute >= reading else "the streams of keys and values"
    padded = len(tops) * block, _up(shape.keys, chunk), d
    reason = f"all of it is folded; {bound} take longest"
    return AttentionTiling(
        3, reason, rows, chunk, shape.group, columns, padded, used, max(compute, reading), read_bytes
    )  # fmt: skip


# --- One token: FlowKV ------------------------------------------------------------------------------------------------


def _decode(shape: AttentionShape, device: Device, values: Values, room: int) -> Iterator[AttentionTiling]:
    """Level 3: a KV head is a pair of tiles, two pairs a column, which share its two streams."""
    d, rows = shape.padded_d, _up(shape.group, _HEAD_ROWS)
    pairs_of_column = min(2, shape.kv_heads)
    columns = min(ceil_div(shape.kv_heads, pairs_of_column), device.limits.columns - 1)  # one has the queries' stream
    turns = ceil_div(shape.kv_heads, columns * pairs_of_column)
    rate = read_rate(2 * columns, d * _BF16, values) / (2 * columns)  # of a stream
    for chunk in _chunks(shape):
        handoff, scratch = 2 * (rows * chunk + 4 * rows) * _BF16, _HEAD_ROWS * chunk * _F32
        used = rows * d * (_F32 + _BF16) + 2 * chunk * d * _BF16 + handoff + scratch + (3 * rows + 16) * _F32
        if used > room:
            continue
        cycles = [
            published_cycles(device, values, f"flow_kv_{kernel}", [rows, chunk, d], 0)
            for kernel in ("scores", "values")
        ]
        transfer = pairs_of_column * chunk * d * _BF16 / rate
        pair = PairTiming(transfer, cycles[0] / device.clock, cycles[1] / device.clock)
        chunks = shape.chunks(0, 1, chunk)
        bound = "the streams of keys and values" if pair.streaming else "a tile's kernel"
        yield AttentionTiling(
            3, f"all of it is folded; {bound} take longest", rows, chunk, shape.group, columns,
            (1, chunks * chunk, d), used, turns * pair.seconds(chunks),
            2.0 * chunks * chunk * d * _BF16 * shape.kv_heads, pair,
        )  # fmt: skip


# --- Not folded -------------------------------------------------------------------------------------------------------


def _unfolded(shape: AttentionShape, device: Device, values: Values, room: int) -> AttentionTiling:
    """Level 2 where whole rows of scores fit, level 1 where they do not: the rest goes through main memory."""
    d, keys = shape.padded_d, _up(shape.keys, _SUB_TILE)
    rows = chunk = _SUB_TILE
    need = l1_bytes(math.lcm(_SUB_TILE, shape.group), chunk, d, bias=shape.bias)
    scores = (rows + 2 * chunk) * d * _BF16 + rows * keys * (_F32 + _BF16 + _BF16 * shape.bias)
    macs = 2.0 * shape.heads * _up(shape.queries, rows) * keys * d
    compute = macs * values["product"] / _SUB_TILE**3 / (TILES * device.limits.columns * device.clock)
    passes = float(shape.heads * shape.queries * keys * _BF16)  # a matrix of scores or probabilities, once
    inputs = shape.kv_heads * keys * d * _BF16 * 2 * ceil_div(shape.queries, rows * TILES)
    why = f"a tile's queries, sums and chunks need {need} bytes of L1, which has {room}"
    if scores <= room:
        moved = inputs + 2 * passes  # probabilities are written and read again
        level, reason, used = 2, f"{why}; whole rows of scores fit", scores
    else:
        moved = inputs + (6 if shape.bias else 4) * passes  # so are scores
        level, reason, used = 1, f"{why}; whole rows of {keys} scores need {scores}", _rows_of_products(d)
    seconds = max(compute, moved / values["memory_read"])
    padded = _up(shape.queries, rows), keys, d
    return AttentionTiling(
        level, reason, rows, chunk, 1, device.limits.columns, padded, used, seconds, moved
    )  # fmt: skip


def _rows_of_products(d: int) -> int:
    """L1 of a plain matrix product of 8 rows: its operands twice, its sums."""
    depth = min(d, 256)
    return 2 * 2 * _SUB_TILE * depth * _BF16 + _SUB_TILE * _SUB_TILE * _F32


def _up(value: int, unit: int) -> int:
    return ceil_div(value, unit) * unit

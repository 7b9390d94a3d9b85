# SPDX-License-Identifier: Apache-2.0
"""FlowQKV: chunked attention of many tokens (arXiv 2602.06063, section 3.1.3, figure 8), and its variants.

A column of four compute tiles takes one KV head and 4 x `queries` consecutive tokens, `queries` a tile; a tile's rows
are its tokens for each query head of the group. The keys and values of the head are broadcast to the four tiles, chunk
by chunk, keys and values in turn on one stream: with the queries, these are the two inputs that a tile has.

    tile:  start; for every chunk: scores of the keys, values; for every part of the columns: finish

Each tile reads all keys and values of its sweep, so what bounds long prompts is their stream unless a tile holds many
rows. Each element of a row takes bytes of L1: 2 for q, 4 for y, 2 for o. Where this makes room for more rows, outputs
leave in parts of their columns: with two parts o takes 1 byte, and 48 rows of d = 128 fit; with sixteen it takes 1/8,
and 32 rows of d = 256 fit instead of 16, with chunks of 8 keys. Each part is a task and a call more, so there are no
more than the rows ask for.

One *round* gives every column an item (KV head, block of tokens); its run-time parameters say which chunks it sweeps,
so they may only change when the round's outputs are there.

FlowQKV-SWA (a sliding window) and FlowQKV-NCA (not causal) are the same array: the sequence's chunks and the run-time
parameters differ. An encoder's NCA (`packed_program`) reads queries, keys and values where the packed projection left
them.

Run-time parameters of a tile: those of attention (kernels/README.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from flownpu.aie.designs.attention import MOVING, Cache, PackedQKV, Sinks, sweep
from flownpu.aie.designs.common import (
    F32,
    I32,
    PARAMETERS,
    TILES,
    RunTimeParameters,
    Window,
    bits,
    ceil_div,
    device,
    kernel,
    limits_of,
    named,
    tensor,
    tiled,
    untiled,
    worker,
)
from flownpu.aie.iron.compat import Buffer, ObjectFifo, Program, Runtime, TensorAccessPattern, Tile, range_, shared
from flownpu.aie.plan.kernel_memory import stack_for

if TYPE_CHECKING:
    from flownpu.aie.iron.compat import Kernel, ObjectFifoHandle, Worker

# Bounds of the default sizes. Tokens are padded to whole tiles, and longer chunks make no kernel much faster.
_MOST_ROWS, _MOST_KEYS = 64, 32
# The allowed numbers of parts of a head's columns: 32 rows of d = 256 need sixteen, and no default tile needs more.
_PARTS = 1, 2, 4, 8, 16
_CORE_BYTES = 64 + 12  # a core's run-time parameters, and the words that count its three fifos' objects


def _tile_bytes(rows: int, keys: int, d: int, parts: int) -> int:
    """L1 of a tile: q, y in f32, a part of o, two chunks of keys or values; F, state, correction, scratch of scores."""
    held = rows * d * (2 + 4) + 2 * rows * d // parts + 2 * 2 * keys * d
    return held + 2 * rows * keys + 4 * (2 * rows + 16 + rows) + 4 * 16 * keys


def _add_in_turns(windows: list[Window], starts: list[Any], buffer: Any, taps: list[list[TensorAccessPattern]]) -> None:
    """Start the columns' tasks, one of each column in turn."""
    for turn in range(max(map(len, taps))):
        for window, start, taps_of_column in zip(windows, starts, taps, strict=False):
            if turn < len(taps_of_column):
                window.add(start, buffer, taps_of_column[turn])


class _Array(NamedTuple):
    """The parts of the array for a sequence; ends: of queries, keys and values, and outputs; parameters: by column."""

    workers: list[Worker]
    ends: list[list[ObjectFifoHandle]]
    parameters: list[RunTimeParameters]


@dataclass(frozen=True)
class FlowQKV:
    """The array of FlowQKV.

    Attributes:
        target: npu1 or npu2.
        heads: query heads H.
        kv_heads: KV heads G, which divide H.
        d: head size, a multiple of 8.
        rows: rows of a tile: tokens x query heads of a group. The default is as many as L1 holds, up to 64, in
            multiples of 16 (the kernels take two sub-tiles of 8 at a time) unless those do not fit.
        keys: positions of a chunk; the default is the power of two nearest to 2048 / d, from 8 to 32.
        softcap: c of c tanh(score / c), by which scores are bounded; 0: none.
        has_sinks: each head has a sink.
    """

    target: str
    heads: int
    kv_heads: int
    d: int
    rows: int = 0
    keys: int = 0
    softcap: float = 0
    has_sinks: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.d % 8:
            raise ValueError(
                f"[flow_qkv] expected KV heads that divide the heads and d in multiples of 8, "
                f"got {self.kv_heads} of {self.heads}, {self.d}"
            )
        step = math.lcm(8, self.group)
        if self.keys == 0:
            object.__setattr__(self, "keys", min(_MOST_KEYS, max(8, 2 ** round(math.log2(2048 / self.d)))))
        if self.rows == 0:
            object.__setattr__(self, "rows", self._most_rows(math.lcm(16, self.group)) or self._most_rows(step) or step)
        if self.rows % step or self.keys % 8:
            raise ValueError(
                f"[flow_qkv] expected rows in multiples of {step} and keys of 8, got {self.rows} and {self.keys}"
            )
        _ = self.sinks  # raises for groups that are too large

    @property
    def sinks(self) -> Sinks | None:
        """The sinks, if there are any."""
        return Sinks(self.kv_heads, self.group, self.d) if self.has_sinks else None

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    def _fits(self, rows: int, parts: int) -> bool:
        limits = limits_of(self.target)
        room = limits.compute.memory_bytes - stack_for(("flow_qkv",)) - limits.constant_bytes - _CORE_BYTES
        return _tile_bytes(rows, self.keys, self.d, parts) <= room

    def _possible_parts(self) -> list[int]:
        """The possible numbers of parts of whole sub-tiles of a head's columns, the fewest first."""
        return [parts for parts in _PARTS if self.d % (8 * parts) == 0]

    def _most_rows(self, step: int) -> int:
        """The rows that L1 holds, in multiples of a step, up to _MOST_ROWS; 0: not even one step fits."""
        most_parts = self._possible_parts()[-1]
        return max((n for n in range(step, _MOST_ROWS + 1, step) if self._fits(n, most_parts)), default=0)

    @property
    def output_parts(self) -> int:
        """How many parts a tile's outputs are sent in, each a share of their columns: the fewest that fit L1."""
        parts = self._possible_parts()
        return next((few for few in parts if self._fits(self.rows, few)), parts[-1])

    @property
    def queries(self) -> int:
        """Tokens of a tile."""
        return self.rows // self.group

    @property
    def columns(self) -> int:
        """Columns of the array."""
        return limits_of(self.target).columns

    def padded(self, tokens: int) -> int:
        """Tokens as the buffers of a call hold them."""
        return ceil_div(tokens, TILES * self.queries) * TILES * self.queries

    def program(
        self,
        tokens: int,
        past: int,
        capacity: int,
        *,
        window: int | None = None,
        causal: bool = True,
        scale: float | None = None,
        total: int | None = None,
        o_line: int = 0,
    ) -> Program:
        """Host buffers q [tokens, H, d] (padded), kv [capacity, G, 2, d], o as q, bf16; the first token is at `past`.

        With sinks there is one more, `sinks` (designs/attention.py).

        `window`: keys that a token sees, its own included; None: all. `scale`: of the scores; None: 1 / sqrt(d).
        `total`: keys in the cache; None: past + tokens. With a causal mask there may not be fewer. `o_line`: elements
        from one token's outputs to the next's, where they are more than H d.

        Raises:
            ValueError: the total is less than it may be or more than the capacity, or the capacity is no multiple of a
                chunk.
        """
        least = past + tokens
        total = least if total is None else total
        if tokens < 1 or past < 0 or not (least if causal else 1) <= total <= capacity or capacity % self.keys:
            raise ValueError(
                f"[flow_qkv] expected keys up to a capacity in multiples of {self.keys}, got {total} of {capacity}"
            )
        cache = Cache(capacity, self.kv_heads, self.d, self.keys)
        line, rows = self.heads * self.d, self.padded(tokens)
        return self._program(
            tokens, past, total, cache, rows, line, o_line or line, window=window, causal=causal, scale=scale
        )

    def packed_program(
        self, tokens: int, rows: int, *, line: int = 0, o_line: int = 0, scale: float | None = None
    ) -> Program:
        """FlowQKV-NCA over packed queries, keys and values.

        Host buffers q and kv, which are one and the same: [rows, line] of [H + 2 G, d] for each token; o [rows, o_line]
        of [H, d]; bf16. `line`, `o_line`: elements from one token to the next, where they are more than a token's.

        Raises:
            ValueError: the rows are fewer than the tokens' as padded, or no multiple of a chunk; a line is too short.
        """
        packed, attended = (self.heads + 2 * self.kv_heads) * self.d, self.heads * self.d
        line, o_line = line or packed, o_line or attended
        if not 0 < tokens <= self.padded(tokens) <= rows or rows % self.keys or line < packed or o_line < attended:
            raise ValueError(
                f"[flow_qkv] expected {self.padded(tokens)} rows or more in multiples of {self.keys}, of lines of "
                f"{packed} and {attended} or more, got {rows}, {line} and {o_line}"
            )
        keys = PackedQKV(rows, self.kv_heads, self.d, self.keys, self.heads, line)
        return self._program(tokens, 0, tokens, keys, rows, line, o_line, window=None, causal=False, scale=scale)

    def _program(
        self, tokens: int, past: int, total: int, cache: Cache, rows: int, q_line: int, o_line: int, *,
        window: int | None, causal: bool, scale: float | None,
    ) -> Program:  # fmt: skip
        """A call whose queries and outputs are [rows, q_line] and [rows, o_line]."""
        workers, ends, shared = _build(self)
        parameters = [of_column.of_a_sequence() for of_column in shared]
        block, parts, queue = TILES * self.queries, self.output_parts, limits_of(self.target).task_queue
        sinks = self.sinks
        items = [(head, top) for top in range(0, self.padded(tokens), block) for head in range(self.kv_heads)]

        def sequence(ends: Any, q: Any, kv: Any, o: Any, *of_sinks: Any) -> None:
            q_ends, kv_ends, o_ends = ends
            for place in range(0, len(items), self.columns):
                tasks, windows, chunks, drains, parts_of_outputs = [], [], [], [], []
                for column, (head, top) in enumerate(items[place : place + self.columns]):
                    part = sweep(
                        past + top, block, total, self.keys, window=window, causal=causal, scale=scale or self.d**-0.5
                    )
                    for row in range(TILES):
                        words = part.words(past + top + row * self.queries, self.queries)
                        parameters[column].write(row, words, moving=MOVING)
                    parameters[column].start()
                    (q_tap,), o_taps = (self._tokens(head, top, rows, *ends) for ends in ((q_line, 1), (o_line, parts)))
                    tasks.append(q_ends[column].fill(q, tap=q_tap, wait=True, managed=False))
                    drains.append(Window())
                    for tap in o_taps[:queue]:
                        drains[column].add(o_ends[column].drain, o, tap)
                    parts_of_outputs.append(o_taps[queue:])
                    windows.append(Window())
                    if sinks:
                        of_head = sinks.chunk(sinks.size, head * self.d, 1, self.keys)
                        windows[column].add(kv_ends[column].fill, of_sinks[0], of_head)
                    chunks.append(cache.of_head(part, head, limits_of(self.target).iteration_maximum))
                _add_in_turns(windows, [end.fill for end in kv_ends], kv, chunks)
                for window_of_column in windows:
                    window_of_column.finish()
                _add_in_turns(drains, [end.drain for end in o_ends], o, parts_of_outputs)
                for task in tasks:
                    task.await_()
                for drains_of_column in drains:
                    drains_of_column.finish()

        buffers = {"q": tensor(rows * q_line), "kv": tensor(cache.size), "o": tensor(rows * o_line)}
        buffers |= {"sinks": tensor(sinks.size)} if sinks else {}
        runtime = Runtime(named(sequence, ["ends", *buffers]), [ends, *buffers.values()])
        return Program(device(self.target), runtime, workers)

    def _tokens(self, head: int, top: int, rows: int, line: int, parts: int) -> list[TensorAccessPattern]:
        """An item's queries or outputs, part after part of the columns: tile x query head of the group x token x d."""
        first, columns = top * line + head * self.group * self.d, self.d // parts
        sizes = [TILES, self.group, self.queries, columns]
        strides = [self.queries * line, self.d, line, 1]
        return [TensorAccessPattern([rows * line], first + part * columns, sizes, strides) for part in range(parts)]

    # --- The array ----------------------------------------------------------------------------------------------------

    def _build(self) -> _Array:
        """Make the array; the module's `_build` keeps it for later programs of the design."""
        parameters = [
            RunTimeParameters([f"tile_{column}_{row}" for row in range(TILES)]) for column in range(self.columns)
        ]
        queries, chunks, outputs, workers = self._array(parameters)
        ends = [
            *[[fifo.prod(tile=Tile(column, 0)) for column, fifo in enumerate(fifos)] for fifos in (queries, chunks)],
            [fifo.cons(tile=Tile(column, 0)) for column, fifo in enumerate(outputs)],
        ]
        return _Array(workers, ends, parameters)

    def _array(
        self, parameters: list[RunTimeParameters]
    ) -> tuple[list[ObjectFifo], list[ObjectFifo], list[ObjectFifo], list[Worker]]:
        size, chunk = self.rows * self.d, self.keys * self.d
        columns = self.d // self.output_parts
        part = self.rows * columns
        offsets, part_offsets = ([row * n for row in range(TILES)] for n in (size, part))
        queries, chunks, outputs = list[ObjectFifo](), list[ObjectFifo](), list[ObjectFifo]()
        workers: list[Worker] = []
        for column in range(self.columns):
            memory = Tile(column, 1)
            q = ObjectFifo(tensor(TILES * size), name=f"q_{column}", depth=1)
            walks = [tiled(self.rows, self.d)] * TILES
            once = [1] * TILES
            q_parts = q.cons().split(offsets, memory, depths=once, obj_types=[tensor(size)] * TILES, to_stream=walks)
            kv = ObjectFifo(tensor(chunk), name=f"kv_{column}")
            kv_tiles = kv.cons().forward(memory, name=f"kv_tiles_{column}", to_stream=tiled(self.keys, self.d))
            o = ObjectFifo(tensor(TILES * part), name=f"o_{column}", depth=1, to_stream=untiled(self.rows, columns))
            o_parts = o.prod().join(part_offsets, memory, depths=once, obj_types=[tensor(part)] * TILES)
            for row in range(TILES):
                ends = q_parts[row].cons(), kv_tiles.cons(), o_parts[row].prod()
                workers.append(self._worker(column, row, ends, parameters[column]))
            for fifos, fifo in ((queries, q), (chunks, kv), (outputs, o)):
                fifos.append(fifo)
        return queries, chunks, outputs, workers

    def _worker(
        self, column: int, row: int, ends: tuple[ObjectFifoHandle, ...], parameters: RunTimeParameters
    ) -> Worker:
        rows, keys, d, parts, cap = self.rows, self.keys, self.d, self.output_parts, bits(self.softcap)
        columns = d // parts
        q_kind, chunk, rtp = tensor(rows * d), tensor(keys * d), tensor(PARAMETERS, I32)
        kinds = {
            "y": tensor(rows * d, F32),
            "state": tensor(2 * rows + 16, F32),
            "correction": tensor(rows, F32),
            "f": tensor(rows * keys),
            "scores": tensor(16 * keys, F32),
        }
        y, state, correction, f, scratch = kinds.values()
        sizes = I32, I32, I32
        kernels = [
            kernel("flow_qkv", "flow_qkv_start", rtp, state, y, I32, I32),
            kernel("flow_qkv", "flow_qkv_scores", q_kind, chunk, rtp, state, correction, f, scratch, *sizes, I32),
            kernel("flow_qkv", "flow_qkv_values", f, chunk, correction, y, *sizes),
            kernel("flow_qkv", "flow_qkv_finish", state, y, tensor(rows * columns), I32, *sizes),
        ]
        begin = [self.sinks.kernel_of_chunk(chunk, rows)] if self.sinks else []

        def tile(
            q: ObjectFifoHandle, kv: ObjectFifoHandle, o: ObjectFifoHandle, buffers: list[Buffer], rtp: Buffer,
            barrier: Any, begin: list[tuple[Kernel, tuple[int, ...]]], start: Kernel, scores: Kernel, values: Kernel,
            finish: Kernel,
        ) -> None:  # fmt: skip
            y, state, correction, f, scratch = buffers
            barrier.wait_for_value(1)
            barrier.release_with_value(1)
            chunks = rtp[0]
            start(rtp, state, y, rows, d)
            for with_sinks, places in begin:
                with_sinks(kv.acquire(1), state, *places, rows // self.group)
                kv.release(1)
            held = q.acquire(1)
            for _ in range_(chunks):
                scores(held, kv.acquire(1), rtp, state, correction, f, scratch, rows, keys, d, cap)
                kv.release(1)
                values(f, kv.acquire(1), correction, y, rows, keys, d)
                kv.release(1)
            q.release(1)
            for part in range_(parts):
                finish(state, y, o.acquire(1), part, columns, rows, d)
                o.release(1)

        buffers = [Buffer(kind, name=f"{name}_{column}_{row}") for name, kind in kinds.items()]
        arguments = [*ends, buffers, parameters.buffers[row], parameters.barrier, begin, *kernels]
        return worker(tile, arguments, tile=Tile(column, limits_of(self.target).first_compute_row + row))


@shared
def _build(design: FlowQKV) -> _Array:
    return design._build()

# SPDX-License-Identifier: Apache-2.0
"""FlowKV: attention of one token, KV heads on pairs of compute tiles (arXiv 2602.06063, section 3.2.2, figure 10).

    K tile   scores of a chunk of keys, online softmax: F, correction C, denominator l
      |      handoff (F, C, l), in shared memory
    V tile   C y + F V; at the end y / l

The pairs stand one above the other, two in a column (one, if the array has a single pair), so a column serves two heads
at a time; where there are more heads than pairs, each pair takes some in turn. A column's shim tile has two streams:
the keys of both heads, the values of both. A memory tile splits each, and sends each head's chunk as 8 x 8 sub-tiles.
The queries come in through columns to the right, those of four pairs through one memory tile.

FlowKV-SWA (a sliding window) is the same array; only the sequence's chunks and the run-time parameters differ.

Run-time parameters of a K tile: those of attention (kernels/README.md); of a V tile: word 0, the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.attention import Cache, Sinks, sweep
from flownpu.aie.designs.common import (
    F32,
    I32,
    PARAMETERS,
    RunTimeParameters,
    Window,
    bits,
    ceil_div,
    device,
    kernel,
    limits_of,
    named,
    pieces,
    tensor,
    tiled,
    worker,
)
from flownpu.aie.iron.compat import Buffer, ObjectFifo, Program, Runtime, TensorAccessPattern, Tile, range_

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.iron.compat import Kernel, ObjectFifoHandle, Worker

_PAIRS_OF_A_QUERY_STREAM = 4  # the most that a memory tile's six output channels allow


@dataclass(frozen=True)
class FlowKV:
    """The array of FlowKV.

    Attributes:
        target: npu1 or npu2.
        heads: query heads H.
        kv_heads: KV heads G, a divisor of H.
        d: head size, a multiple of 8.
        keys: positions of a chunk, a multiple of 8. The default is 16 to 64, so that a chunk has at most 16 KB (with
            d <= 512), and two fit L1 with the rest.
        softcap: c of c tanh(score / c), by which scores are bounded; 0: none.
        has_sinks: each head has a sink.
    """

    target: str
    heads: int
    kv_heads: int
    d: int
    keys: int = 0
    softcap: float = 0
    has_sinks: bool = False

    def __post_init__(self) -> None:
        if self.keys == 0:
            object.__setattr__(self, "keys", max(16, min(64, 8192 // self.d // 16 * 16)))
        if self.heads % self.kv_heads:
            raise ValueError(f"[flow_kv] expected KV heads that divide the heads, got {self.kv_heads} of {self.heads}")
        if self.d % 8 or self.keys % 8:
            raise ValueError(f"[flow_kv] expected d and keys in multiples of 8, got {self.d} and {self.keys}")
        _ = self.sinks  # raises for groups that are too large

    @property
    def sinks(self) -> Sinks | None:
        """The sinks, if there are any."""
        return Sinks(self.kv_heads, self.group, self.d) if self.has_sinks else None

    @property
    def pairs(self) -> int:
        """Pairs of compute tiles: the most that share the KV heads evenly and leave columns for the query streams."""
        columns = limits_of(self.target).columns
        fitting = [
            count
            for count in (1, *range(2, 2 * columns, 2))
            if self.kv_heads % count == 0 and ceil_div(count, 2) + ceil_div(count, _PAIRS_OF_A_QUERY_STREAM) <= columns
        ]
        return int(fitting[-1])

    @property
    def pairs_of_column(self) -> int:
        """Pairs in a column."""
        return min(2, self.pairs)

    @property
    def columns(self) -> int:
        """Columns of pairs."""
        return self.pairs // self.pairs_of_column

    @property
    def turns(self) -> int:
        """KV heads of a pair, which takes them one after the other: head turn x pairs + pair."""
        return self.kv_heads // self.pairs

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    def program(self, total: int, capacity: int, *, window: int | None = None, scale: float | None = None) -> Program:
        """Host buffers q [H, d], kv [capacity, G, 2, d], o [H, d], bf16; the token is at position total - 1.

        With sinks there is one more, `sinks` (designs/attention.py).

        `window`: keys that it sees, its own included; None: all. `scale`: of the scores; None: 1 / sqrt(d).

        Raises:
            ValueError: the total is larger than the capacity, or the capacity is no multiple of a chunk.
        """
        if not 0 < total <= capacity or capacity % self.keys:
            raise ValueError(
                f"[flow_kv] expected keys up to a capacity in multiples of {self.keys}, got {total} of {capacity}"
            )
        part = sweep(total - 1, 1, total, self.keys, window=window, causal=True, scale=scale or self.d**-0.5)
        names = [f"{kind}_{pair}" for pair in range(self.pairs) for kind in "kv"]
        parameters = RunTimeParameters(names)
        cache = Cache(capacity, self.kv_heads, self.d, self.keys)
        queries, keys, values, outputs, workers = self._array(parameters)
        sinks = self.sinks

        def sequence(ends: Any, q: Any, kv: Any, o: Any, *of_sinks: Any) -> None:
            q_ends, k_ends, v_ends, o_ends = ends
            for number in range(0, len(names), 2):
                parameters.write(number, part.words(total - 1, 1))
                parameters.write(number + 1, [part.chunks])
            parameters.start()
            tasks = [
                start(buffer, tap=self._of_pairs(place * count, count), wait=True, managed=False)
                for buffer, count, starts in (
                    (q, _PAIRS_OF_A_QUERY_STREAM, [end.fill for end in q_ends]),
                    (o, self.pairs_of_column, [end.drain for end in o_ends]),
                )
                for place, start in enumerate(starts)
            ]
            windows = [Window() for _ in (*k_ends, *v_ends)]
            most, count = limits_of(self.target).iteration_maximum, self.pairs_of_column
            for turn in range(self.turns):
                if sinks:
                    for column, end in enumerate(k_ends):
                        first = (turn * self.pairs + column * count) * self.d
                        windows[column].add(end.fill, of_sinks[0], sinks.chunk(sinks.size, first, count, self.keys))
                taps = [
                    cache.chunks(part, 2 * (turn * self.pairs + column * count) + value, count, 2, most)
                    for value in range(2)
                    for column in range(self.columns)
                ]
                for place in range(ceil_div(part.chunks, most)):
                    for tasks_of_end, end, taps_of_end in zip(windows, (*k_ends, *v_ends), taps, strict=True):
                        tasks_of_end.add(end.fill, kv, taps_of_end[place])
            for tasks_of_end in windows:
                tasks_of_end.finish()
            for task in tasks:
                task.await_()

        line = self.heads * self.d
        buffers = {"q": tensor(line), "kv": tensor(cache.size), "o": tensor(line)}
        buffers |= {"sinks": tensor(sinks.size)} if sinks else {}
        ends = [
            [fifo.prod(tile=Tile(self.columns + place, 0)) for place, fifo in enumerate(queries)],
            *[[fifo.prod(tile=Tile(column, 0)) for column, fifo in enumerate(fifos)] for fifos in (keys, values)],
            [fifo.cons(tile=Tile(column, 0)) for column, fifo in enumerate(outputs)],
        ]
        runtime = Runtime(named(sequence, ["ends", *buffers]), [ends, *buffers.values()])
        return Program(device(self.target), runtime, workers)

    def _of_pairs(self, first: int, count: int) -> TensorAccessPattern:
        """The heads of pairs first .. first + count, as far as they exist, in q or o [turn][pair][group d]."""
        line = self.group * self.d
        cuts, piece = pieces(min(count, self.pairs - first) * line, 2)
        sizes, strides = [self.turns, cuts, piece], [self.pairs * line, piece, 1]
        return TensorAccessPattern([self.heads * self.d], first * line, sizes, strides)

    # --- The array ----------------------------------------------------------------------------------------------------

    def _array(
        self, parameters: RunTimeParameters
    ) -> tuple[list[ObjectFifo], list[ObjectFifo], list[ObjectFifo], list[ObjectFifo], list[Worker]]:
        line = self.group * self.d
        queries, query_parts = [], []
        for place in range(ceil_div(self.pairs, _PAIRS_OF_A_QUERY_STREAM)):
            pairs = min(_PAIRS_OF_A_QUERY_STREAM, self.pairs - place * _PAIRS_OF_A_QUERY_STREAM)
            queries.append(ObjectFifo(tensor(pairs * line), name=f"q_{place}"))
            offsets, memory = [pair * line for pair in range(pairs)], Tile(self.columns + place, 1)
            query_parts += queries[-1].cons().split(offsets, memory, obj_types=[tensor(line)] * pairs)
        columns = Pairs(
            self.group, self.keys, self.d, self.pairs_of_column, range(self.columns), self.turns, self.softcap,
            self.sinks,
        )  # fmt: skip
        return queries, *columns.columns_of(query_parts, parameters.buffers, parameters)


@dataclass(frozen=True)
class Pairs:
    """Columns of pairs, a K tile and above it a V tile, which take their KV heads one after the other.

    Attributes:
        heads: query heads of a KV head.
        keys: positions of a chunk.
        d: head size.
        pairs: pairs of a column, one or two.
        columns: the array's columns that hold pairs.
        turns: KV heads of a pair.
        softcap: c of c tanh(score / c), by which scores are bounded; 0: none.
        sinks: the heads' sinks, which come as a chunk ahead of each KV head's keys.
    """

    heads: int
    keys: int
    d: int
    pairs: int
    columns: Sequence[int]
    turns: int = 1
    softcap: float = 0
    sinks: Sinks | None = None

    def columns_of(
        self, queries: Sequence[ObjectFifo], words: Sequence[Buffer], parameters: RunTimeParameters
    ) -> tuple[list[ObjectFifo], list[ObjectFifo], list[ObjectFifo], list[Worker]]:
        """For each column its streams of keys, values and outputs; and the pairs' tiles.

        A column's stream has the chunks of its pairs side by side; its memory tile sends each pair's as sub-tiles.

        Args:
            queries: the fifo of each pair's queries.
            words: run-time parameters, of each pair's K tile and then its V tile.
            parameters: has the barrier that the tiles wait for.
        """
        count, chunk, line = self.pairs, self.keys * self.d, self.heads * self.d
        keys, values, outputs, workers = list[ObjectFifo](), list[ObjectFifo](), list[ObjectFifo](), list["Worker"]()
        for place, column in enumerate(self.columns):
            memory, parts = Tile(column, 1), []
            for streams, name in ((keys, "k"), (values, "v")):
                streams.append(ObjectFifo(tensor(count * chunk), name=f"{name}_{place}"))
                offsets, walks = [pair * chunk for pair in range(count)], [tiled(self.keys, self.d)] * count
                kinds = [tensor(chunk)] * count
                parts.append(streams[-1].cons().split(offsets, memory, obj_types=kinds, to_stream=walks))
            outputs.append(ObjectFifo(tensor(count * line), name=f"o_{place}"))
            offsets = [pair * line for pair in range(count)]
            o_parts = outputs[-1].prod().join(offsets, memory, obj_types=[tensor(line)] * count)
            for inside in range(count):
                number = place * count + inside
                ends = queries[number].cons(), parts[0][inside].cons(), parts[1][inside].cons(), o_parts[inside].prod()
                row = limits_of("npu2").first_compute_row + 2 * inside
                workers += self._pair(number, (column, row), ends, words[2 * number : 2 * number + 2], parameters)
        return keys, values, outputs, workers

    def _pair(
        self, number: int, place: tuple[int, int], ends: tuple[ObjectFifoHandle, ...], words: Sequence[Buffer],
        parameters: RunTimeParameters,
    ) -> list[Worker]:  # fmt: skip
        """The two tiles of a pair."""
        q_end, k_end, v_end, o_end = ends
        heads, keys, d, turns, cap = self.heads, self.keys, self.d, self.turns, bits(self.softcap)
        rows = ceil_div(heads, 4) * 4  # the kernels compute on multiples of 4
        line, chunk, rtp = tensor(heads * d), tensor(keys * d), tensor(PARAMETERS, I32)
        q_tile, state, y = tensor(rows * d), tensor(2 * rows + 16, F32), tensor(rows * d + rows, F32)
        shared, scratch = tensor(rows * keys + 4 * rows), tensor(4 * keys, F32)
        handoff = ObjectFifo(shared, name=f"handoff_{number}")
        start = kernel("flow_kv", "flow_kv_start", line, rtp, q_tile, state, I32, I32, I32)
        scores = kernel("flow_kv", "flow_kv_scores", q_tile, chunk, rtp, state, shared, scratch, *[I32] * 4)
        start_values = kernel("flow_kv", "flow_kv_start_values", y, I32, I32)
        values = kernel("flow_kv", "flow_kv_values", shared, chunk, y, I32, I32, I32)
        finish = kernel("flow_kv", "flow_kv_finish", y, line, I32, I32, I32)
        begin = [self.sinks.kernel_of_chunk(chunk, rows)] if self.sinks else []

        def k_tile(
            q: ObjectFifoHandle, k: ObjectFifoHandle, out: ObjectFifoHandle, tile: Buffer, state: Buffer,
            scratch: Buffer, rtp: Buffer, barrier: Any, start: Kernel, scores: Kernel,
            begin: list[tuple[Kernel, tuple[int, ...]]],
        ) -> None:  # fmt: skip
            barrier.wait_for_value(1)
            barrier.release_with_value(1)
            chunks = rtp[0]
            for _ in range_(turns):
                start(q.acquire(1), rtp, tile, state, heads, rows, d)
                q.release(1)
                for with_sinks, places in begin:
                    with_sinks(k.acquire(1), state, *places, 1)
                    k.release(1)
                for _ in range_(chunks):
                    scores(tile, k.acquire(1), rtp, state, out.acquire(1), scratch, rows, keys, d, cap)
                    k.release(1)
                    out.release(1)

        def v_tile(
            given: ObjectFifoHandle, v: ObjectFifoHandle, o: ObjectFifoHandle, y: Buffer, rtp: Buffer, barrier: Any,
            start: Kernel, values: Kernel, finish: Kernel,
        ) -> None:  # fmt: skip
            barrier.wait_for_value(1)
            barrier.release_with_value(1)
            chunks = rtp[0]
            for _ in range_(turns):
                start(y, rows, d)
                for _ in range_(chunks):
                    values(given.acquire(1), v.acquire(1), y, rows, keys, d)
                    given.release(1)
                    v.release(1)
                finish(y, o.acquire(1), heads, rows, d)
                o.release(1)

        kinds = {"q_tile": q_tile, "state": state, "scores": scratch}
        buffers = [Buffer(kind, name=f"{name}_{number}") for name, kind in kinds.items()]
        k_words, v_words = words
        k_arguments = [q_end, k_end, handoff.prod(), *buffers, k_words, parameters.barrier, start, scores, begin]
        v_arguments = [handoff.cons(), v_end, o_end, Buffer(y, name=f"context_{number}"), v_words, parameters.barrier]
        column, row = place
        return [
            worker(k_tile, k_arguments, tile=Tile(column, row)),
            worker(v_tile, [*v_arguments, start_values, values, finish], tile=Tile(column, row + 1)),
        ]

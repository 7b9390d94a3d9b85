# SPDX-License-Identifier: Apache-2.0
"""FlowKV: attention of one token, each KV head on a pair of compute tiles (arXiv 2602.06063, section 3.2.2, figure 10).

    K tile   scores of a chunk of keys, online softmax: F, correction C, denominator l
      |      handoff (F, C, l), in shared memory
    V tile   C y + F V; at the end y / l

The pairs stand one above the other, two in a column (one if there is a single KV head), so a column serves two heads.
Its shim tile has two streams: the keys of both heads, the values of both. A memory tile splits each, and sends
each head's chunk as 8 x 8 sub-tiles. The queries come in through columns to the right, four pairs a memory tile.

FlowKV-SWA is the same array; only the chunks of the sequence and the words of the run-time parameters differ.

Run-time parameters of a K tile: those of attention (kernels/README.md); of a V tile: word 0, the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.attention import Cache, sweep
from flownpu.aie.designs.common import (
    F32,
    I32,
    PARAMETERS,
    RunTimeParameters,
    Window,
    ceil_div,
    device,
    kernel,
    limits_of,
    run,
    tensor,
    tiled,
    worker,
)
from flownpu.aie.iron_compat import Buffer, ObjectFifo, Program, Runtime, Tile, range_

if TYPE_CHECKING:
    from flownpu.aie.iron_compat import Kernel, ObjectFifoHandle, Worker

__all__ = ["FlowKV"]

_PAIRS_OF_A_QUERY_STREAM = 4  # what a memory tile's six output channels leave room for


@dataclass(frozen=True)
class FlowKV:
    """The array of FlowKV.

    Attributes:
        target: npu1 or npu2.
        heads: query heads H.
        kv_heads: KV heads G: 1 or even.
        d: head size, a multiple of 8.
        keys: positions of a chunk; the default makes a chunk 16 KB, two of which fit L1 with the rest.
    """

    target: str
    heads: int
    kv_heads: int
    d: int
    keys: int = 0

    def __post_init__(self) -> None:
        if self.keys == 0:
            object.__setattr__(self, "keys", min(64, 8192 // self.d // 16 * 16))
        columns = limits_of(self.target).columns
        need = self.columns + ceil_div(self.kv_heads, _PAIRS_OF_A_QUERY_STREAM)
        if self.heads % self.kv_heads or (self.kv_heads > 1 and self.kv_heads % 2) or need > columns:
            raise ValueError(
                f"[flow_kv] expected KV heads 1 or even that divide the heads and fit {columns} columns, "
                f"got {self.kv_heads} of {self.heads} heads, which need {need}"
            )
        if self.d % 8 or self.keys % 8:
            raise ValueError(f"[flow_kv] expected d and keys in multiples of 8, got {self.d} and {self.keys}")

    @property
    def pairs(self) -> int:
        """Pairs of compute tiles in a column."""
        return min(2, self.kv_heads)

    @property
    def columns(self) -> int:
        """Columns of pairs."""
        return self.kv_heads // self.pairs

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Rows that the kernels compute on: the group, rounded up to 4."""
        return ceil_div(self.group, 4) * 4

    def program(self, total: int, capacity: int, *, window: int | None = None, scale: float | None = None) -> Program:
        """Host buffers q [H, d], kv [capacity, G, 2, d], o [H, d], bf16; the token is at position total - 1.

        Raises:
            ValueError: the total is larger than the capacity, or that is no multiple of a chunk.
        """
        if not 0 < total <= capacity or capacity % self.keys:
            raise ValueError(
                f"[flow_kv] expected keys up to a capacity in multiples of {self.keys}, got {total} of {capacity}"
            )
        part = sweep(total - 1, 1, total, self.keys, window=window, causal=True, scale=scale or self.d**-0.5)
        names = [f"{kind}_{head}" for head in range(self.kv_heads) for kind in "kv"]
        parameters = RunTimeParameters(names)
        cache = Cache(capacity, self.kv_heads, self.d, self.keys)
        queries, keys, values, outputs, workers = self._array(parameters)

        def sequence(q: Any, kv: Any, o: Any, q_ends: Any, k_ends: Any, v_ends: Any, o_ends: Any) -> None:
            for number in range(0, len(names), 2):
                parameters.write(number, part.words(total - 1, 1))
                parameters.write(number + 1, [part.chunks])
            parameters.start()
            size = self.heads * self.d
            share = _PAIRS_OF_A_QUERY_STREAM * self.group * self.d
            tasks = [
                end.fill(q, tap=run(size, place * share, min(share, size - place * share)), wait=True, managed=False)
                for place, end in enumerate(q_ends)
            ]
            share = self.pairs * self.group * self.d
            tasks += [
                end.drain(o, tap=run(size, column * share, share), wait=True, managed=False)
                for column, end in enumerate(o_ends)
            ]
            windows = [Window() for _ in (*k_ends, *v_ends)]
            most = limits_of(self.target).iteration_maximum
            taps = [
                cache.chunks(part, column * self.pairs * 2 + value, self.pairs, 2, most)
                for value in range(2)
                for column in range(self.columns)
            ]
            for turn in range(ceil_div(part.chunks, most)):
                for tasks_of_end, end, taps_of_end in zip(windows, (*k_ends, *v_ends), taps, strict=True):
                    tasks_of_end.add(end.fill, kv, taps_of_end[turn])
            for tasks_of_end in windows:
                tasks_of_end.finish()
            for task in tasks:
                task.await_()

        line = self.heads * self.d
        buffers = [tensor(line), tensor(cache.size), tensor(line)]
        ends = [
            [fifo.prod(tile=Tile(self.columns + place, 0)) for place, fifo in enumerate(queries)],
            *[[fifo.prod(tile=Tile(column, 0)) for column, fifo in enumerate(fifos)] for fifos in (keys, values)],
            [fifo.cons(tile=Tile(column, 0)) for column, fifo in enumerate(outputs)],
        ]
        return Program(device(self.target), Runtime(sequence, [*buffers, *ends]), workers)

    # --- The array ----------------------------------------------------------------------------------------------------

    def _array(
        self, parameters: RunTimeParameters
    ) -> tuple[list[ObjectFifo], list[ObjectFifo], list[ObjectFifo], list[ObjectFifo], list[Worker]]:
        line = self.group * self.d
        queries, query_parts = [], []
        for place in range(ceil_div(self.kv_heads, _PAIRS_OF_A_QUERY_STREAM)):
            pairs = min(_PAIRS_OF_A_QUERY_STREAM, self.kv_heads - place * _PAIRS_OF_A_QUERY_STREAM)
            queries.append(ObjectFifo(tensor(pairs * line), name=f"q_{place}"))
            offsets, memory = [pair * line for pair in range(pairs)], Tile(self.columns + place, 1)
            query_parts += queries[-1].cons().split(offsets, memory, obj_types=[tensor(line)] * pairs)
        keys, values, outputs = list[ObjectFifo](), list[ObjectFifo](), list[ObjectFifo]()
        workers: list[Worker] = []
        for column in range(self.columns):
            k, v = (ObjectFifo(tensor(self.pairs * self.keys * self.d), name=f"{name}_{column}") for name in "kv")
            o = ObjectFifo(tensor(self.pairs * line), name=f"o_{column}")
            k_parts, v_parts = self._split(k, column), self._split(v, column)
            offsets = [pair * line for pair in range(self.pairs)]
            o_parts = o.prod().join(offsets, Tile(column, 1), obj_types=[tensor(line)] * self.pairs)
            for pair in range(self.pairs):
                head = column * self.pairs + pair
                ends = query_parts[head].cons(), k_parts[pair].cons(), v_parts[pair].cons(), o_parts[pair].prod()
                workers += self._pair(head, column, pair, ends, parameters)
            for fifos, fifo in ((keys, k), (values, v), (outputs, o)):
                fifos.append(fifo)
        return queries, keys, values, outputs, workers

    def _split(self, fifo: ObjectFifo, column: int) -> list[ObjectFifo]:
        """A column's stream of chunks, one for each pair, as sub-tiles."""
        chunk, memory = self.keys * self.d, Tile(column, 1)
        return fifo.cons().split(
            [pair * chunk for pair in range(self.pairs)],
            memory,
            obj_types=[tensor(chunk)] * self.pairs,
            to_stream=[tiled(self.keys, self.d)] * self.pairs,
        )

    def _pair(
        self,
        head: int,
        column: int,
        pair: int,
        ends: tuple[ObjectFifoHandle, ...],
        parameters: RunTimeParameters,
    ) -> list[Worker]:
        """The two tiles of a KV head."""
        q_end, k_end, v_end, o_end = ends
        heads, rows, keys, d = self.group, self.rows, self.keys, self.d
        line, chunk, rtp = tensor(heads * d), tensor(keys * d), tensor(PARAMETERS, I32)
        q_tile, state, y = tensor(rows * d), tensor(2 * rows + 16, F32), tensor(rows * d + rows, F32)
        shared, scratch = tensor(rows * keys + 4 * rows), tensor(4 * keys, F32)
        handoff = ObjectFifo(shared, name=f"handoff_{head}")
        start = kernel("flow_kv", "flow_kv_start", line, rtp, q_tile, state, I32, I32, I32)
        scores = kernel("flow_kv", "flow_kv_scores", q_tile, chunk, rtp, state, shared, scratch, I32, I32, I32)
        start_values = kernel("flow_kv", "flow_kv_start_values", y, I32, I32)
        values = kernel("flow_kv", "flow_kv_values", shared, chunk, y, I32, I32, I32)
        finish = kernel("flow_kv", "flow_kv_finish", y, line, I32, I32, I32)

        def k_tile(
            q: ObjectFifoHandle, k: ObjectFifoHandle, out: ObjectFifoHandle, tile: Buffer, state: Buffer,
            scratch: Buffer, rtp: Buffer, barrier: Any, start: Kernel, scores: Kernel,
        ) -> None:  # fmt: skip
            barrier.wait_for_value(1)
            barrier.release_with_value(1)
            chunks = rtp[0]
            start(q.acquire(1), rtp, tile, state, heads, rows, d)
            q.release(1)
            for _ in range_(chunks):
                scores(tile, k.acquire(1), rtp, state, out.acquire(1), scratch, rows, keys, d)
                k.release(1)
                out.release(1)

        def v_tile(
            given: ObjectFifoHandle, v: ObjectFifoHandle, o: ObjectFifoHandle, y: Buffer, rtp: Buffer, barrier: Any,
            start: Kernel, values: Kernel, finish: Kernel,
        ) -> None:  # fmt: skip
            barrier.wait_for_value(1)
            barrier.release_with_value(1)
            chunks = rtp[0]
            start(y, rows, d)
            for _ in range_(chunks):
                values(given.acquire(1), v.acquire(1), y, rows, keys, d)
                given.release(1)
                v.release(1)
            finish(y, o.acquire(1), heads, rows, d)
            o.release(1)

        state_buffers = [
            Buffer(kind, name=f"{name}_{head}")
            for kind, name in ((q_tile, "q_tile"), (state, "state"), (scratch, "scores"))
        ]
        k_parameters, v_parameters = parameters.buffers[2 * head : 2 * head + 2]
        row = limits_of(self.target).first_compute_row + 2 * pair
        k_arguments = [q_end, k_end, handoff.prod(), *state_buffers, k_parameters, parameters.barrier, start, scores]
        v_arguments = [handoff.cons(), v_end, o_end, Buffer(y, name=f"y_{head}"), v_parameters, parameters.barrier]
        return [
            worker(k_tile, k_arguments, tile=Tile(column, row)),
            worker(v_tile, [*v_arguments, start_values, values, finish], tile=Tile(column, row + 1)),
        ]

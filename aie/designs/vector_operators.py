# SPDX-License-Identifier: Apache-2.0
"""The operators on vectors: RMSNorm, RoPE, GeGLU and SwiGLU.

All have one shape: a stream of objects (rows of a norm, tokens of RoPE, chunks of a gated activation) goes through
`cores` compute tiles, one in each column, object i to core i mod `cores`. A core has two streams in and one out, which
is what a compute tile has of channels, so none of these can take a third operand.

Run-time parameters of a core: word 0, its number of objects; word 1, epsilon's bits (RMSNorm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import I32, RunTimeParameters, device, kernel, limits_of, tensor, worker
from flownpu.aie.designs.common import bits as bits_of
from flownpu.aie.iron_compat import ObjectFifo, Program, Runtime, TensorAccessPattern, Tile, range_

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flownpu.aie.iron_compat import Kernel, ObjectFifoHandle

__all__ = ["RMSNorm", "RotaryEmbedding", "gated_activation"]


@dataclass(frozen=True)
class RMSNorm:
    """y = x / rms(x) * weight for rows of `n` elements (a multiple of 16).

    Attributes:
        target: npu1 or npu2.
        n: elements of a row, bf16.
        cores: compute tiles, at most the target's columns.
    """

    target: str
    n: int
    cores: int = 1

    def program(self, rows: int, epsilon: float) -> Program:
        """Host buffers x [rows, n], weight [n], y [rows, n], bf16."""
        n, row = self.n, tensor(self.n)
        norm = kernel("rms_norm", "rms_norm", row, row, row, I32, I32, I32)
        weights = ObjectFifo(row, name="weight", depth=1)

        def body(x: ObjectFifoHandle, weight: ObjectFifoHandle, y: ObjectFifoHandle, norm: Kernel, rtp: Any) -> None:
            count, epsilon_bits = rtp[0], rtp[1]
            w = weight.acquire(1)
            for _ in range_(count):
                source, target = x.acquire(1), y.acquire(1)
                norm(source, w, target, 1, n, epsilon_bits)
                x.release(1)
                y.release(1)
            weight.release(1)

        stream = _Stream(self.target, self.cores, n, rows, body, [norm], [bits_of(epsilon)])
        return stream.program([weights.cons() for _ in range(self.cores)], weights.prod(tile=Tile(0, 0)), n)


@dataclass(frozen=True)
class RotaryEmbedding:
    """RoPE of `heads` heads of size `d` for each token, by a table of cos[d/2], sin[d/2] for each token.

    Attributes:
        target: npu1 or npu2.
        heads: heads of a token, queries and keys together if they lie side by side.
        d: head size, a multiple of 32.
        interleaved: pairs are (2i, 2i + 1) rather than (i, i + d/2).
        cores: compute tiles, at most the target's columns.
    """

    target: str
    heads: int
    d: int
    interleaved: bool = False
    cores: int = 1

    def program(self, tokens: int) -> Program:
        """Host buffers x [tokens, heads * d], table [tokens, d], y [tokens, heads * d], bf16."""
        heads, d = self.heads, self.d
        row, angles = tensor(heads * d), tensor(d)
        rope = kernel("rope", "rope_interleaved" if self.interleaved else "rope", row, angles, row, I32, I32)
        tables = [ObjectFifo(angles, name=f"table_{core}") for core in range(self.cores)]

        def body(x: ObjectFifoHandle, table: ObjectFifoHandle, y: ObjectFifoHandle, rope: Kernel, rtp: Any) -> None:
            for _ in range_(rtp[0]):
                source, turn, target = x.acquire(1), table.acquire(1), y.acquire(1)
                rope(source, turn, target, heads, d)
                for fifo in (x, table, y):
                    fifo.release(1)

        stream = _Stream(self.target, self.cores, heads * d, tokens, body, [rope], [])
        second = [table.prod(tile=Tile(core, 0)) for core, table in enumerate(tables)]
        return stream.program([table.cons() for table in tables], second, d)


def gated_activation(target: str, activation: str, elements: int, *, cores: int = 1, chunk: int = 256) -> Program:
    """GeGLU, y = gelu(gate) * up, or SwiGLU, y = silu(gate) * up.

    Host buffers gate, up and y [elements], bf16; `elements` a multiple of `chunk`, the object's size. 256 divides the
    feed-forward size of every model whose weights are cut into blocks of 256 columns.

    Raises:
        ValueError: another activation, or elements that are no multiple of the chunk.
    """
    if activation not in {"geglu", "swiglu"} or elements % chunk:
        raise ValueError(
            f"[gated_activation] expected geglu or swiglu of a multiple of {chunk}, got {activation} of {elements}"
        )
    piece = tensor(chunk)
    act = kernel(activation, activation, piece, piece, piece, I32)
    ups = [ObjectFifo(piece, name=f"up_{core}") for core in range(cores)]

    def body(gate: ObjectFifoHandle, up: ObjectFifoHandle, y: ObjectFifoHandle, act: Kernel, rtp: Any) -> None:
        for _ in range_(rtp[0]):
            left, right, target = gate.acquire(1), up.acquire(1), y.acquire(1)
            act(left, right, target, chunk)
            for fifo in (gate, up, y):
                fifo.release(1)

    stream = _Stream(target, cores, chunk, elements // chunk, body, [act], [])
    second = [up.prod(tile=Tile(core, 0)) for core, up in enumerate(ups)]
    return stream.program([up.cons() for up in ups], second, chunk)


@dataclass
class _Stream:
    """`count` objects of `size` elements through one core in each of `cores` columns."""

    target: str
    cores: int
    size: int
    count: int
    body: Callable[..., None]
    kernels: Sequence[Kernel]
    words: Sequence[int]

    def program(
        self,
        second_ends: Sequence[ObjectFifoHandle],
        second_fills: ObjectFifoHandle | Sequence[ObjectFifoHandle],
        second_size: int,
    ) -> Program:
        """The program, with the cores' second streams: one for all, sent once, or one each.

        Raises:
            ValueError: more cores than columns.
        """
        columns = limits_of(self.target).columns
        if not 1 <= self.cores <= columns:
            raise ValueError(f"[design] expected 1..{columns} cores on {self.target}, got {self.cores}")
        piece = tensor(self.size)
        xs = [ObjectFifo(piece, name=f"x_{core}") for core in range(self.cores)]
        ys = [ObjectFifo(piece, name=f"y_{core}") for core in range(self.cores)]
        parameters = RunTimeParameters([f"core_{core}" for core in range(self.cores)])

        def core_function(x: Any, second: Any, y: Any, rtp: Any, barrier: Any, *kernels: Any) -> None:
            barrier.wait_for_value(1)
            barrier.release_with_value(1)
            self.body(x, second, y, *kernels, rtp)

        shared_by_all = [parameters.barrier, *self.kernels]
        workers = [
            worker(
                core_function,
                [xs[core].cons(), second_ends[core], ys[core].prod(), parameters.buffers[core], *shared_by_all],
                tile=Tile(core, limits_of(self.target).first_compute_row),
            )
            for core in range(self.cores)
        ]
        shared = not isinstance(second_fills, (list, tuple))

        def sequence(x: Any, second: Any, y: Any, xs: Any, seconds: Any, ys: Any) -> None:
            for core in range(self.cores):
                parameters.write(core, [len(range(core, self.count, self.cores)), *self.words])
            parameters.start()
            # The weight goes to every core, also to one that has no row this time.
            drains = [seconds.fill(second, wait=True, managed=False)] if shared else []
            fills = []
            for core in range(min(self.cores, self.count)):
                tap = self._objects(core, self.size)
                fills.append(xs[core].fill(x, tap=tap, managed=False))
                if not shared:
                    fills.append(seconds[core].fill(second, tap=self._objects(core, second_size), managed=False))
                drains.append(ys[core].drain(y, tap=tap, wait=True, managed=False))
            for task in drains:
                task.await_()
            for task in fills:
                task.free()

        whole = tensor(self.count * self.size)
        second = tensor(second_size if shared else self.count * second_size)
        fills = [x.prod(tile=Tile(core, 0)) for core, x in enumerate(xs)]
        drains = [y.cons(tile=Tile(core, 0)) for core, y in enumerate(ys)]
        runtime = Runtime(sequence, [whole, second, whole, fills, second_fills, drains])
        return Program(device(self.target), runtime, workers)

    def _objects(self, core: int, size: int) -> TensorAccessPattern:
        """Objects core, core + cores, ...: as the third dimension, which has no wrap register to bound their number."""
        count, run = len(range(core, self.count, self.cores)), size // 2
        while run > 1024:  # 512 words of bf16; the innermost wrap holds 1023
            run //= 2
        sizes, strides = [count, size // run, run], [self.cores * size, run, 1]
        return TensorAccessPattern([self.count * size], core * size, sizes, strides)

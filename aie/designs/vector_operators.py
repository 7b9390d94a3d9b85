# SPDX-License-Identifier: Apache-2.0
"""Norms of rows, each a `stream` of rows.

A core has two streams in, so an operator with three operands gets two of them on one stream: a norm with a residual
gets its weight (and bias) ahead of the residual's rows, and the core copies them.

Run-time parameters of a core: word 0, its number of rows; word 1, epsilon's bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import I32, bits, bytes_of, kernel, limits_of, tensor
from flownpu.aie.designs.stream import ahead, each, once, stream
from flownpu.aie.iron.compat import Buffer, range_

if TYPE_CHECKING:
    from collections.abc import Callable

    from flownpu.aie.iron.compat import Kernel, ObjectFifoHandle, Program

_SMALL_THINGS = 2176  # bytes of a tile: 1024 each for the stack and constants of kernels, run-time parameters, counters


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

        def body(x: ObjectFifoHandle, weight: ObjectFifoHandle, y: ObjectFifoHandle, norm: Kernel, rtp: Any) -> None:
            count, epsilon_bits = rtp[0], rtp[1]
            held = weight.acquire(1)
            _for_each(count, (x, y), lambda source, target: norm(source, held, target, 1, n, epsilon_bits))
            weight.release(1)

        operands = [each("x", rows, n), once("weight", n)], [each("y", rows, n)]
        return stream(self.target, self.cores, rows, *operands, body, [norm], [bits(epsilon)])


@dataclass(frozen=True)
class ResidualRMSNorm:
    """A norm that takes the residual of the projection before it: s = x + residual, y = norm(s).

    With `norm_first` (Gemma3's norm after a projection): s = residual + norm(x), and no y.

    Attributes:
        target: npu1 or npu2.
        n: elements of a row, a multiple of 32.
        norm_first: whether the residual is added after the norm.
        cores: compute tiles, at most the target's columns.
    """

    target: str
    n: int
    norm_first: bool = False
    cores: int = 1

    def program(self, rows: int, epsilon: float) -> Program:
        """Host buffers x, residual [rows, n], weight [n], s [rows, n] and, without norm_first, y [rows, n], bf16."""
        n, row, norm_first = self.n, tensor(self.n), self.norm_first
        entry = "rms_norm_add" if norm_first else "add_rms_norm"
        kernels = [
            kernel("copy_part", "copy_part", row, row, I32, I32),
            kernel("rms_norm", entry, *[row] * (4 if norm_first else 5), I32, I32, I32),
        ]

        def body(x: ObjectFifoHandle, residual: ObjectFifoHandle, *rest: Any) -> None:
            *outputs, copy, norm, weight, rtp = rest
            count, epsilon_bits = rtp[0], rtp[1]
            copy(residual.acquire(1), weight, 0, n)
            residual.release(1)

            def call(left: Any, right: Any, *targets: Any) -> None:
                inputs = (left, weight, right) if norm_first else (left, right, weight)
                norm(*inputs, *targets, 1, n, epsilon_bits)

            _for_each(count, (x, residual, *outputs), call)

        # Outputs have one buffer, because rows of 4096 would not fit with two. For longer rows, inputs have one buffer,
        # too.
        results = [each("s", rows, n, depth=1), each("y", rows, n, depth=1)][: 1 if norm_first else 2]
        room = limits_of(self.target).compute.memory_bytes - _SMALL_THINGS
        depth = 2 if (2 * 2 + 1 + len(results)) * bytes_of(row) <= room else 1
        operands = [each("x", rows, n, depth=depth), each("residual", rows, n, depth=depth)]
        operands.append(ahead("weight", n, "residual"))
        return stream(
            self.target, self.cores, rows, operands, results, body, kernels, [bits(epsilon)],
            state=lambda core: [Buffer(row, name=f"weight_{core}")],
        )  # fmt: skip


def _for_each(count: Any, fifos: tuple[ObjectFifoHandle, ...], call: Callable[..., None]) -> None:
    """In a core: `count` times, make a call with an object of each fifo, then release the objects."""
    for _ in range_(count):
        call(*[fifo.acquire(1) for fifo in fifos])
        for fifo in fifos:
            fifo.release(1)

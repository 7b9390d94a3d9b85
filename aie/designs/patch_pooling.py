# SPDX-License-Identifier: Apache-2.0
"""Average pooling of image patches: SigLIP's 64 x 64 grid of 4096 tokens to 16 x 16 = 256, each the mean of 4 x 4.

Gemma3 normalises the means before it projects them: the sums are in L1, so that costs no transfer but the norm's
weight, which every core gets once.

A core takes a line of a square of patches at a time, which are neighbours in main memory, and adds it to f32 sums; the
last line's sums are normalised and stored. Lines of squares are dealt to the cores in turn (`stream`'s items).

Run-time parameters of a core: word 0, its lines of squares; word 1, squares in a line; word 2, epsilon's bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import BF16, F32, I32, bits, kernel, limits_of, pieces, tensor
from flownpu.aie.designs.stream import Operand, each, once, stream
from flownpu.aie.iron.compat import Buffer, TensorAccessPattern, range_

if TYPE_CHECKING:
    from flownpu.aie.iron.compat import ObjectFifoHandle, Program


@dataclass(frozen=True)
class PatchPooling:
    """y = the RMS norm of the mean of each square of `side` x `side` patches of `n` elements (a multiple of 16).

    Attributes:
        target: npu1 or npu2.
        n: elements of a patch, bf16.
        side: patches of a square's side.
        cores: compute tiles, at most the target's columns.
    """

    target: str
    n: int
    side: int = 4
    cores: int = 4

    def program(self, grid: int, *, epsilon: float = 1e-6) -> Program:
        """Host buffers x [grid, grid, n], weight [n], y [grid / side, grid / side, n], bf16.

        `epsilon`: the norm's.

        Raises:
            ValueError: the grid is no multiple of a square, or has more squares in a line than a task repeats (64).
        """
        squares, most = grid // self.side, limits_of(self.target).iteration_maximum
        if grid % self.side or not 0 < squares <= most:
            raise ValueError(
                f"[patch_pooling] expected a grid in multiples of {self.side}, {most * self.side} or less, got {grid}"
            )
        n, side = self.n, self.side
        line, sums, pooled = tensor(side * n), tensor(n, F32), tensor(n)
        kernels = [
            kernel("epilogue", "zero_f32", sums, I32),
            kernel("patch_pooling", "patch_pooling", line, sums, I32, I32),
            kernel("patch_pooling", "patch_pooling_norm", sums, pooled, pooled, *[I32] * 3),
        ]

        def body(x: ObjectFifoHandle, weight: ObjectFifoHandle, y: ObjectFifoHandle, *rest: Any) -> None:
            zero, pool, norm, total, rtp = rest
            lines, count, epsilon_bits = rtp[0], rtp[1], rtp[2]
            held = weight.acquire(1)
            for _ in range_(lines):
                for _ in range_(count):
                    zero(total, n)
                    for _ in range_(side):
                        pool(x.acquire(1), total, side, n)
                        x.release(1)
                    norm(total, held, y.acquire(1), n, side * side, epsilon_bits)
                    y.release(1)
            weight.release(1)

        cuts, piece = pieces(side * n, 2)

        def taps(items: range) -> list[TensorAccessPattern]:
            """A task for each line of squares: square x line of the square x elements of that line's patches."""
            sizes, strides = [squares, side, cuts, piece], [side * n, grid * n, piece, 1]
            return [TensorAccessPattern([grid * grid * n], item * side * grid * n, sizes, strides) for item in items]

        x = Operand("x", side * n, BF16, grid * grid * n, taps)
        y = each("y", squares, squares * n)
        y = Operand("y", n, BF16, y.host, y.taps)
        return stream(
            self.target, self.cores, squares, [x, once("weight", n)], [y], body, kernels, [squares, bits(epsilon)],
            state=lambda core: [Buffer(sums, name=f"sums_{core}")],
        )  # fmt: skip

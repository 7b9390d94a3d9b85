# SPDX-License-Identifier: Apache-2.0
"""The predicted time of a GEMM on the whole array, from its tiles.

The scheme is that of arXiv 2512.13282 (figure 3) with the megatiles of arXiv 2602.06063 (equation 5), as in
`designs.gemm`: rows of A are broadcast to rows of compute tiles, columns of B to columns of them, and C stays in L1
while K is reduced. A *megatile*, e_y x e_x tiles of C on every compute tile, is what the array reduces at a time. These
go on at the same time, and a megatile takes as long as the slowest:

compute: its kernel calls (equation 1 of 2512.13282: m k n / macs + (element + accumulator_byte x bytes of C in L1) m n
cycles, and `call` for each); with one output buffer also C's way out, during which the core waits.

read: A and B from main memory, hypot(bytes / rate, runs of a stream x run / clock), and no less than the fullest of the
streams of 32 bits a cycle takes. A run of contiguous bytes takes a stream at least `run` cycles, as the next one is on
another page of memory (figure 6): e_y m K / k_mt runs of A, e_x n K / k_mt of B in columns, a 32nd of these of panels.

write: C to main memory. Unlike in equation 10 writes do not share the reads' rate: no single rate would fit.

The GEMM takes the time of all its megatiles, of the first tiles' way in, of the last tile's way out, and a dispatch.
Without overlap of descriptors and transfers (section 4.4) each megatile pays for both ways and `synchronise`. Padding
to megatiles and k_mt takes time and does not count as work. **Nothing here was measured by us.**
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu.aie.cost.gemm_kernel import KernelSize, call_cycles, precision_of
from flownpu.aie.cost.gemm_parameters import gemm_parameters
from flownpu.aie.designs.common import ceil_div
from flownpu.aie.plan.limits import LIMITS

if TYPE_CHECKING:
    from flownpu.aie.cost.gemm_kernel import Precision
    from flownpu.aie.cost.gemm_parameters import GemmParameters
    from flownpu.aie.designs.gemm import Gemm

ROWS = 4  # compute tiles in a column, on both generations
_VECTOR = {"npu1": 32, "npu2": 64}  # bytes a core stores in a cycle (AMD AM020)
_PANEL = 32  # columns of B that lie together in `panels` order (kernels/README.md)
_ABOUT = 4096  # the paper's "about 4K"


@dataclass(frozen=True)
class Tiling:
    """The tiles of a GEMM, for which an array is compiled.

    Attributes:
        m: rows of a tile of C in L1.
        k: columns of A and rows of B in L1.
        n: columns of a tile of C.
        k_mt: columns of A (rows of B) in L2, a multiple of k.
        e_y: tiles of C that a compute tile reduces together, down.
        e_x: tiles of C that a compute tile reduces together, across.
        gates: 2 if pairs of tiles, a gate's and its up projection's, become one when they are stored; else 1.
        epilogue: what the stores make of the sums: none, or a kind of `epilogue` (parameters.toml).
        panels: whether B lies in main memory prepacked, as our design reads it; else in columns, as in the paper.
        overlapped: whether descriptors are written while transfers go on (section 4.4).
    """

    m: int
    k: int
    n: int
    k_mt: int
    e_y: int = 1
    e_x: int = 1
    gates: int = 1
    epilogue: str = "none"
    panels: bool = False
    overlapped: bool = True

    def __post_init__(self) -> None:
        if min(self.m, self.k, self.n, self.e_y, self.e_x) < 1 or self.k_mt < 1 or self.k_mt % self.k:
            raise ValueError(f"[gemm cost] expected sizes of 1 or more and k_mt in multiples of k, got {self}")
        if self.gates not in {1, 2}:
            raise ValueError(f"[gemm cost] expected 1 or 2 gates, got {self}")

    @property
    def size(self) -> KernelSize:
        """Rows, inner size and columns of one kernel call."""
        return KernelSize(self.m, self.k, self.n)

    @property
    def accumulators(self) -> int:
        """Tiles of C that a compute tile reduces together."""
        return self.e_y * self.e_x * self.gates

    def native(self, target: str) -> tuple[int, int, int]:
        """The multiples of M, K and N to which sizes are padded (section 4.2.2); N counts stored columns."""
        return ROWS * self.e_y * self.m, self.k_mt, LIMITS[target].columns * self.e_x * self.n

    def nearest(self, target: str) -> tuple[int, int, int]:
        """M, K, N of the paper's "about 4K square": in each dimension the multiple of `native` nearest to 4096."""
        m, k, n = (round(_ABOUT / unit) * unit for unit in self.native(target))
        return m, k, n


@dataclass(frozen=True)
class GemmPrediction:
    """A GEMM's predicted time, and what it is made of. Padding counts everywhere except in `tops`.

    Attributes:
        seconds: from the call to its completion, dispatch included.
        tops: 2 M K N (gated: twice that) operations over `seconds`, in 10^12 a second.
        read_bytes: from main memory.
        write_bytes: to main memory.
        macs: multiply-adds done.
        padded: M, K, N as the array computes them.
        macs_per_cycle: multiply-adds a cycle of a core while its kernel runs.
        bound: what takes longest: compute, read or write.
    """

    seconds: float
    tops: float
    read_bytes: float
    write_bytes: float
    macs: float
    padded: tuple[int, int, int]
    macs_per_cycle: float
    bound: str


def predict_design(design: Gemm, m: int, k: int, n: int) -> GemmPrediction:
    """The prediction for a call of our own GEMM: M rows of A, N columns of C (gated: B has 2 N)."""
    return predict_gemm(design.target, design.weights, m, k, n, tiling_of(design))


def tiling_of(design: Gemm) -> Tiling:
    """The tiles of our own GEMM.

    A megatile has e_x transfers of C in each column; where those of two megatiles do not fit into a channel's queue, a
    megatile waits for the one before.
    """
    overlapped = LIMITS[design.target].task_queue // design.e_x > 1
    return Tiling(
        design.m, design.k, design.n, design.k_mt, design.e_y, design.e_x, design.gates, design.epilogue,
        panels=True, overlapped=overlapped,
    )  # fmt: skip


def predict_gemm(target: str, precision: str, m: int, k: int, n: int, tiling: Tiling) -> GemmPrediction:
    """The prediction for C[m, n] = A[m, k] B[k, n] with these tiles.

    Args:
        target: npu1 or npu2.
        precision: a name of `gemm_kernel.PRECISIONS`.
        m: rows of A; like k and n any number, padded to the tiling's.
        k: columns of A.
        n: columns of C; with two gates B has twice as many.
        tiling: the tiles.

    Raises:
        ValueError: no such target, precision or epilogue, or a size is not positive.
    """
    if min(m, k, n) < 1:
        raise ValueError(f"[gemm cost] expected M, K and N of 1 or more, got {m}, {k} and {n}")
    kind, known = precision_of(target, precision), gemm_parameters(target)
    if tiling.epilogue not in {"none", *known.kinds("epilogue")}:
        raise ValueError(
            f"[gemm cost] expected an epilogue of none, {', '.join(known.kinds('epilogue'))}, got {tiling.epilogue!r}"
        )
    native = tiling.native(target)
    rows, depth, columns = (ceil_div(size, unit) * unit for size, unit in zip((m, k, n), native, strict=True))
    megatile = _Megatile(known, kind, tiling, depth)
    count = (rows // native[0]) * (columns // native[2])
    compute, read, write = (count * seconds for seconds in (megatile.compute, megatile.read, megatile.write))
    slowest = max(("compute", compute), ("read", read), ("write", write), key=lambda pair: pair[1])
    ends = megatile.fill + megatile.flush
    apart = 0.0
    if not tiling.overlapped:
        apart = (count - 1) * (ends + known["synchronise"] / known["clock"])
    dispatch = known["dispatch"] + ends
    seconds = slowest[1] + apart + dispatch
    return GemmPrediction(
        seconds=seconds,
        tops=2.0 * m * k * n * tiling.gates / seconds / 1e12,
        read_bytes=count * megatile.read_bytes,
        write_bytes=count * megatile.write_bytes,
        macs=float(rows * depth * columns) * tiling.gates,
        padded=(rows, depth, columns),
        macs_per_cycle=tiling.size.macs / megatile.call_cycles,
        bound=slowest[0],
    )


class _Megatile:
    """The times of one megatile of K `depth`, in seconds, and its bytes."""

    def __init__(self, known: GemmParameters, precision: Precision, tiling: Tiling, depth: int) -> None:
        columns, vector = LIMITS[known.target].columns, _VECTOR[known.target]
        clock, stream = known["clock"], known["stream"] * known["clock"]
        tile = tiling.m * tiling.n
        # Bytes of A of a row of compute tiles, and of B of a column, for each step of K; bytes of C of a column.
        a, b = tiling.e_y * tiling.m * precision.a, tiling.gates * tiling.e_x * tiling.n * precision.b
        c = ROWS * tiling.e_y * tiling.e_x * tile * precision.output

        self.call_cycles = call_cycles(known, precision, tiling.size)
        steps = depth // tiling.k
        each = steps * (self.call_cycles + known["call"]) + tile * precision.accumulator / vector
        cycles = tiling.accumulators * each
        if precision.staged:  # the stores: sums in, rounded values out
            passed = tiling.gates * precision.accumulator + precision.output
            epilogue = known[f"epilogue {tiling.epilogue}"] if tiling.epilogue != "none" else 0.0
            cycles += tiling.e_y * tiling.e_x * tile * (passed / vector + epilogue)
        # A core waits while its tiles leave; with a buffer of their own, for all but the last of them.
        waiting = tiling.e_y * tiling.e_x - precision.staged
        leaving = waiting * tile * precision.output / stream
        self.compute = cycles / clock + leaving

        self.read_bytes = (ROWS * a + columns * b) * depth
        self.write_bytes = columns * c
        self.read = max(self._main_memory(known, tiling, depth), max(a, b) * depth / stream)
        self.write = c / stream
        # The first tiles come in through L2, whole, then L1; the last ones go out.
        self.fill = (max(a, b) * (tiling.k_mt + tiling.k)) / stream
        self.flush = self.write

    def _main_memory(self, known: GemmParameters, tiling: Tiling, depth: int) -> float:
        """Seconds of reading A and B.

        Main memory's rate bounds it, and so does each stream, whose runs follow one another.
        """
        lines = depth / tiling.k_mt
        a_runs = tiling.e_y * tiling.m * lines * known["run"]
        b_columns = tiling.gates * tiling.e_x * tiling.n
        b_runs = b_columns / (_PANEL if tiling.panels else 1) * lines * known["run"]
        return math.hypot(self.read_bytes / known["read"], max(a_runs, b_runs) / known["clock"])

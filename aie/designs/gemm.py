# SPDX-License-Identifier: Apache-2.0
"""GEMM by supertiles: C[M, N] = A[M, K] B[K, N], A row-major, B the dequantised weight in `panels` order.

The array's compute tiles make one *supertile* of C at a time, a tile m x n on each: the tiles of a row share a row
of A's tiles, those of a column a column of B's (arXiv 2512.13282, figure 3; arXiv 2602.06063, figure 5). C's tiles stay
in L1 in f32 over the whole reduction, in a single buffer; A and B are double-buffered in L1 and L2. A memory tile holds
k_mt columns of A (rows of B), several k of a compute tile, so that main memory is read in long runs.

    A  shim -> memory tile: m rows of k_mt; as [k_mt / k][m][k] in L2, then as 8 x 8 sub-tiles -> a row of compute tiles
    B  shim -> memory tile: n / 32 panels of k_mt rows -> k rows at a time -> a column of compute tiles
    C  four tiles -> memory tile, joined, sub-tiles to rows -> shim: 4 m rows of n

The rows of A come in through the memory tiles of the columns 0, 2, 4, 6 (XDNA: 0..3), whose shim tiles so have two
streams in; every shim tile has one of B and one of C.

C's last column of supertiles begins so that it ends with N; what it has in common with the one before is computed
twice, with equal results. M is padded to 4 m rows, K to k_mt, by whoever owns the buffers.

With gating, B has the gate's N columns, then the up projection's; a tile reduces one of each, then stores their
product.

Run-time parameters of a tile: word 0, supertiles; word 1, K / k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import (
    BF16,
    F32,
    I32,
    U8,
    RunTimeParameters,
    Window,
    ceil_div,
    device,
    kernel,
    limits_of,
    tensor,
    tiled,
    untiled,
    worker,
)
from flownpu.aie.iron_compat import Buffer, ObjectFifo, Program, Runtime, TensorAccessPattern, Tile, range_

if TYPE_CHECKING:
    from flownpu.aie.iron_compat import Kernel, ObjectFifoHandle, Worker

__all__ = ["Gemm"]

_ROWS = 4  # of compute tiles
_PANEL = 32  # columns of B that lie together
# store: the epilogue's entry and its accumulators.
_EPILOGUES = {
    "none": ("store_bf16", 1),
    "gelu": ("store_gelu", 1),
    "geglu": ("store_gelu_mul", 2),
    "swiglu": ("store_silu_mul", 2),
}


@dataclass(frozen=True)
class Gemm:
    """The array of a GEMM.

    The defaults fill L1: 2 x 8 KB of A, 2 x 8 KB of B, 16 KB of C in f32 and 8 KB of it in bf16; with gating, which has
    two accumulators, m is 32. m and n are multiples of 8 and 32, k of 16, k_mt of k.

    Attributes:
        target: npu1 or npu2.
        weights: bf16, or (npu2 only) bfp16: 8 values in 9 bytes.
        epilogue: none, gelu, geglu or swiglu.
        m: rows of a compute tile's C.
        k: rows of B in L1.
        n: columns of a compute tile's C.
        k_mt: rows of B in L2.
    """

    target: str
    weights: str = "bf16"
    epilogue: str = "none"
    m: int = 0
    k: int = 64
    n: int = 64
    k_mt: int = 256

    def __post_init__(self) -> None:
        if self.m == 0:
            object.__setattr__(self, "m", 64 if self.accumulators == 1 else 32)
        if self.weights not in {"bf16", "bfp16"} or (self.weights == "bfp16" and self.target == "npu1"):
            raise ValueError(
                f"[gemm] expected weights in bf16 or, on npu2, bfp16, got {self.weights!r} on {self.target}"
            )
        if self.m % 8 or self.n % _PANEL or self.k % 16 or self.k_mt % self.k:
            raise ValueError(
                f"[gemm] expected m, n, k and k_mt in multiples of 8, {_PANEL}, 16 and k, "
                f"got {self.m}, {self.n}, {self.k} and {self.k_mt}"
            )

    @property
    def accumulators(self) -> int:
        """Tiles of C that a compute tile reduces before it stores."""
        if self.epilogue not in _EPILOGUES:
            raise ValueError(f"[gemm] expected an epilogue of {', '.join(_EPILOGUES)}, got {self.epilogue!r}")
        return _EPILOGUES[self.epilogue][1]

    @property
    def columns(self) -> int:
        """Columns of the array."""
        return limits_of(self.target).columns

    def padded(self, m: int, k: int) -> tuple[int, int]:
        """M and K as the buffers of a call hold them."""
        return ceil_div(m, _ROWS * self.m) * _ROWS * self.m, ceil_div(k, self.k_mt) * self.k_mt

    def program(self, m: int, k: int, n: int) -> Program:
        """Host buffers a [M, K] bf16, b [N (gating: 2 N) / 32 panels][K][32] (bfp16: its bytes), c [M, N] bf16; padded.

        Raises:
            ValueError: N is less than a supertile has, or no multiple of 32.
        """
        width = self.columns * self.n
        if n % _PANEL or n < width:
            raise ValueError(f"[gemm] expected N in multiples of {_PANEL}, {width} or more (a supertile), got {n}")
        m, k = self.padded(m, k)
        starts = [min(place * width, n - width) for place in range(ceil_div(n, width))]
        names = [f"tile_{column}_{row}" for column in range(self.columns) for row in range(_ROWS)]
        parameters = RunTimeParameters(names)
        fifos = self._fifos()
        workers = self._workers(fifos, parameters)

        def sequence(a: Any, b: Any, c: Any, a_ends: Any, b_ends: Any, c_ends: Any) -> None:
            for number in range(len(names)):
                parameters.write(number, [m // (_ROWS * self.m) * len(starts), k // self.k])
            parameters.start()
            windows = [Window() for _ in (*a_ends, *b_ends, *c_ends)]
            a_windows, b_windows, c_windows = windows[:_ROWS], windows[_ROWS : -len(c_ends)], windows[-len(c_ends) :]
            for top in range(0, m, _ROWS * self.m):
                for row, end in enumerate(a_ends):
                    for tap in self._a_taps(top + row * self.m, m, k, len(starts)):
                        a_windows[row].add(end.fill, a, tap)
                for column, end in enumerate(c_ends):
                    for tap in self._c_taps(top, column, starts, m, n):
                        c_windows[column].add(end.drain, c, tap)
                for start in starts:
                    for half in range(self.accumulators):
                        for column, end in enumerate(b_ends):
                            tap = self._b_tap(half * n + start + column * self.n, k, self.accumulators * n)
                            b_windows[column].add(end.fill, b, tap)
            for window in windows:
                window.finish()

        a_ends = [a.prod(tile=Tile(self._a_column(row), 0)) for row, (a, _) in enumerate(fifos[0])]
        b_ends = [b.prod(tile=Tile(column, 0)) for column, (b, _) in enumerate(fifos[1])]
        c_ends = [c.cons(tile=Tile(column, 0)) for column, (c, _) in enumerate(fifos[2])]
        size, dtype = self._b_size(self.accumulators * n * k), BF16 if self.weights == "bf16" else U8
        buffers = [tensor(m * k), tensor(size, dtype), tensor(m * n)]
        return Program(device(self.target), Runtime(sequence, [*buffers, a_ends, b_ends, c_ends]), workers)

    # --- The array ----------------------------------------------------------------------------------------------------

    def _a_column(self, row: int) -> int:
        return row * self.columns // _ROWS

    def _b_size(self, values: int) -> int:
        """Elements (bf16) or bytes (bfp16) of so many values of B."""
        return values if self.weights == "bf16" else values // 8 * 9

    def _fifos(self) -> tuple[list[Any], list[Any], list[Any]]:
        """(outer fifo, inner fifo or fifos) of each row of A, each column of B and each column of C."""
        m, k, n, k_mt = self.m, self.k, self.n, self.k_mt
        dtype = BF16 if self.weights == "bf16" else U8
        a_rows, b_columns, c_columns = [], [], []
        # [m][k_mt] on the stream, [k_mt / k][m][k] in L2: each k columns lie together.
        by_k = TensorAccessPattern([m * k_mt], 0, [m, k_mt // k, k], [k, m * k, 1])
        sub_tiles = tiled(k_mt // k * m, k)
        for row in range(_ROWS):
            a = ObjectFifo(tensor(m * k_mt), name=f"a_{row}", from_stream_per_cons=by_k)
            inner = a.cons().forward(
                Tile(self._a_column(row), 1), tensor(m * k), name=f"a_tiles_{row}", to_stream=sub_tiles
            )
            a_rows.append((a, inner))
        run = self._b_size(k * _PANEL)
        piece = next(size for size in range(512, 0, -1) if run % size == 0 and size % 4 == 0)
        line = self._b_size(k_mt * _PANEL)
        by_panel = TensorAccessPattern(
            [self._b_size(k_mt * n)], 0, [k_mt // k, n // _PANEL, run // piece, piece], [run, line, piece, 1]
        )
        for column in range(self.columns):
            memory = Tile(column, 1)
            b = ObjectFifo(tensor(self._b_size(k_mt * n), dtype), name=f"b_{column}")
            kind = tensor(self._b_size(k * n), dtype)
            b_columns.append((b, b.cons().forward(memory, kind, name=f"b_tiles_{column}", to_stream=by_panel)))
            c = ObjectFifo(tensor(_ROWS * m * n), name=f"c_{column}", to_stream=untiled(m, n))
            offsets = [row * m * n for row in range(_ROWS)]
            parts = c.prod().join(offsets, memory, depths=[1] * _ROWS, obj_types=[tensor(m * n)] * _ROWS)
            c_columns.append((c, parts))
        return a_rows, b_columns, c_columns

    def _workers(self, fifos: tuple[list[Any], list[Any], list[Any]], parameters: RunTimeParameters) -> list[Worker]:
        a_rows, b_columns, c_columns = fifos
        m, k, n = self.m, self.k, self.n
        accumulator, c_tile = tensor(m * n, F32), tensor(m * n)
        dtype = BF16 if self.weights == "bf16" else U8
        a_kind, b_kind = tensor(m * k), tensor(self._b_size(k * n), dtype)
        kernels = [
            kernel("epilogue", "zero_f32", accumulator, I32),
            kernel("gemm", f"gemm_{self.weights}", a_kind, b_kind, accumulator, I32, I32, I32),
            kernel("epilogue", _EPILOGUES[self.epilogue][0], *[accumulator] * self.accumulators, c_tile, I32),
        ]

        def tile(
            a: ObjectFifoHandle,
            b: ObjectFifoHandle,
            c: ObjectFifoHandle,
            accumulators: list[Buffer],
            rtp: Buffer,
            barrier: Any,
            zero: Kernel,
            multiply: Kernel,
            store: Kernel,
        ) -> None:
            barrier.wait_for_value(1)
            barrier.release_with_value(1)
            supertiles, steps = rtp[0], rtp[1]
            for _ in range_(supertiles):
                for sums in accumulators:
                    zero(sums, m * n)
                    for _ in range_(steps):
                        multiply(a.acquire(1), b.acquire(1), sums, m, k, n)
                        a.release(1)
                        b.release(1)
                store(*accumulators, c.acquire(1), m * n)
                c.release(1)

        workers = []
        for column in range(self.columns):
            for row in range(_ROWS):
                name = f"tile_{column}_{row}"
                sums = [Buffer(accumulator, name=f"{name}_accumulator_{i}") for i in range(self.accumulators)]
                ends = [a_rows[row][1].cons(), b_columns[column][1].cons(), c_columns[column][1][row].prod()]
                rtp = parameters.buffers[column * _ROWS + row]
                place = Tile(column, limits_of(self.target).first_compute_row + row)
                workers.append(worker(tile, [*ends, sums, rtp, parameters.barrier, *kernels], tile=place))
        return workers

    # --- The sequence -------------------------------------------------------------------------------------------------

    def _a_taps(self, top: int, m: int, k: int, repeats: int) -> list[TensorAccessPattern]:
        """Rows top..top + m, k_mt columns at a time, once for every supertile in the row (and each half of a gate)."""
        passes, most = repeats * self.accumulators, limits_of(self.target).iteration_maximum
        walk = [k // self.k_mt, self.m, self.k_mt], [self.k_mt, k, 1]
        counts = [min(most, passes - done) for done in range(0, passes, most)]
        return [TensorAccessPattern([m * k], top * k, [count, *walk[0]], [0, *walk[1]]) for count in counts]

    def _b_tap(self, left: int, k: int, n: int) -> TensorAccessPattern:
        """Columns left..left + n: k_mt rows of each panel at a time, in runs that the innermost wrap holds."""
        run, line = self._b_size(self.k_mt * _PANEL), self._b_size(k * _PANEL)
        piece = 1024 if self.weights == "bf16" else 1152  # 512 or 288 words
        sizes = [k // self.k_mt, self.n // _PANEL, run // piece, piece]
        return TensorAccessPattern([self._b_size(k * n)], left // _PANEL * line, sizes, [run, line, piece, 1])

    def _c_taps(self, top: int, column: int, starts: list[int], m: int, n: int) -> list[TensorAccessPattern]:
        """4 m rows of n columns of each supertile; the last, which may overlap, by itself."""
        width, rows = self.columns * self.n, _ROWS * self.m
        offsets = [top * n + start + column * self.n for start in starts]
        regular = len(starts) if starts[-1] == (len(starts) - 1) * width else len(starts) - 1
        counts = [(offsets[0], regular)] + ([(offsets[-1], 1)] if regular < len(starts) else [])
        return [
            TensorAccessPattern([m * n], offset, [count, rows, self.n], [width, n, 1])
            for offset, count in counts
            if count
        ]

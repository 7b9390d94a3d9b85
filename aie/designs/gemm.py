# SPDX-License-Identifier: Apache-2.0
"""GEMM by supertiles and megatiles: C[M, N] = A[M, K] B[K, N], A row-major, B the dequantised weight in `panels` order.

The array's compute tiles make one *supertile* of C at a time, a tile m x n on each: the tiles of a row share a row
of A's tiles, those of a column a column of B's (arXiv 2512.13282, figure 3; arXiv 2602.06063, figure 5). C's tiles stay
in L1 in f32 over the whole reduction, in a single buffer; A and B are double-buffered in L1 and L2. A memory tile holds
k_mt columns of A (rows of B), several k of a compute tile, so that main memory is read in long runs.

A *megatile* is e_y x e_x supertiles that are reduced together (arXiv 2602.06063, equation 5): a compute tile has
e_y x e_x tiles of C, and each tile of A meets e_x of B, each of B e_y of A. A is then read N / (8 e_x n) times, B
M / (4 e_y m) times (npu1: 4 e_x n). The paper stages the megatile's C in L2; that would need a third input of a compute
tile for the partial sums (arXiv 2512.13282, section 4.2.2), so here it stays in L1, which bounds the factors.

    A  shim -> memory tile: e_y m rows of k_mt; as [k_mt / k][e_y m][k] in L2, then as 8 x 8 sub-tiles -> a row of tiles
    B  shim -> memory tile: e_x n / 32 panels of k_mt rows -> k rows at a time -> a column of compute tiles
    C  four tiles -> memory tile, joined, sub-tiles to rows -> shim: 4 times m rows of n

The rows of A come in through the memory tiles of columns 0, 2, 4, 6 (XDNA: 0..3), so the shim tiles of these columns
have two streams in; every shim tile has one of B and one of C.

C's last column of megatiles begins so that it ends with N; what it has in common with the one before is computed
twice, with equal results. In the same way, where N is narrower than a megatile, the last columns of tiles all end with
N. M is padded to 4 e_y m rows, K to k_mt, by whoever owns the buffers. But rows of A need no padding where B is 0
beyond K, as dequantised weights are if K is a multiple of 32: what is read beyond K is the beginning of A's next row,
times 0 (`line`).

Rows of A may also lie in one another, as those of a convolution do (`Walk`, `convolution.py`). K of more than 64 k_mt
comes in by several tasks of B, because the outermost size of a transfer is at most 64.

**How the sums are stored** is a run-time parameter, so that all products of a model can share an array: as they are, or
by the array's epilogue. A gated epilogue makes one tile of two tiles of C, the gate's and the up projection's: B holds
n columns of the gate, the same n of the up projection, and so on (`dequant_engine` weaves them so). Such an array is
built for pairs of tiles; a plain product on it has both tiles of a pair side by side.

A bias is a column of the weight (`with_bias`). There is no input for a residual: both inputs of a compute tile are in
use, and both are broadcasts, so every tile would be sent the residuals of eight (or four) tiles to use one; the norm
that follows adds the residual (`vector_operators.ResidualRMSNorm`).

Run-time parameters of a tile: word 0, megatiles; word 1, K / k; word 2, 1 if the sums are stored as they are; word 3, 1
if the epilogue stores them. A plan has no branches, so each of the two stores is a loop of 0 or 1 turns.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from flownpu.aie.designs.common import (
    BF16,
    F32,
    I32,
    TILES,
    U8,
    RunTimeParameters,
    ceil_div,
    device,
    kernel,
    limits_of,
    pieces,
    tensor,
    tiled,
    untiled,
    worker,
)
from flownpu.aie.iron.compat import Buffer, ObjectFifo, Program, Runtime, TensorAccessPattern, Tile, range_, shared

if TYPE_CHECKING:
    from flownpu.aie.iron.compat import Kernel, ObjectFifoHandle, Worker

_PANEL = 32  # columns of B that lie together
# By epilogue: the storing kernel, and the number of tiles of C that become one.
_EPILOGUES = {
    "none": ("store_bf16", 1),
    "gelu": ("store_gelu", 1),
    "geglu": ("store_gelu_mul", 2),
    "swiglu": ("store_silu_mul", 2),
}
# Defaults of (m, k, e_y, e_x) by target and weights: without gating, and with.
_FASTEST = {
    ("npu1", "bf16"): ((32, 64, 4, 1), (16, 64, 4, 1)),
    ("npu2", "bf16"): ((32, 64, 4, 1), (16, 64, 4, 1)),
    ("npu2", "bfp16"): ((32, 64, 2, 2), (32, 64, 2, 1)),
}


class _Array(NamedTuple):
    """The parts of the array that a sequence uses; `ends`: the host's ends of the fifos of A, B and C."""

    workers: list[Worker]
    ends: tuple[list[ObjectFifoHandle], list[ObjectFifoHandle], list[ObjectFifoHandle]]
    parameters: RunTimeParameters


class Walk(NamedTuple):
    """Rows of A that share elements: element i of run j of row r is a[r line + j apart + i].

    A row is its runs, one after the other; each has K / runs elements, a multiple of k_mt. Where fewer of them matter,
    B is 0 in the rows beyond, and what a has there must be finite.
    """

    line: int
    runs: int = 1
    apart: int = 0


@dataclass(frozen=True)
class Gemm:
    """The array of a GEMM.

    The defaults are those predicted to be fastest for the projections of models in chunks of 512 tokens, among tiles
    with n = 64 and k_mt = 256, as the dequantisation engine lays B out (docs/model.md). Where
    m, e_y or e_x is given, the others default to m = 64, e_y = e_x = 1, and k = 64 with one tile of C, 32 with several.
    m and n are multiples of 8 and 32, k of 16, k_mt of k.

    Attributes:
        target: npu1 or npu2.
        weights: bf16, or (npu2 only) bfp16: 8 values in 9 bytes.
        epilogue: none, gelu, geglu or swiglu: how a call of the array may store its sums, besides as they are.
        m: rows of a tile of C.
        k: rows of B in L1.
        n: columns of a tile of C.
        k_mt: rows of B in L2.
        e_y: supertiles of a megatile, down.
        e_x: supertiles of a megatile, across; with gating, pairs of supertiles.
    """

    target: str
    weights: str = "bf16"
    epilogue: str = "none"
    m: int = 0
    k: int = 0
    n: int = 64
    k_mt: int = 256
    e_y: int = 0
    e_x: int = 0

    def __post_init__(self) -> None:
        limits_of(self.target)
        if self.weights not in {"bf16", "bfp16"} or (self.weights == "bfp16" and self.target == "npu1"):
            raise ValueError(
                f"[gemm] expected weights in bf16 or, on npu2, bfp16, got {self.weights!r} on {self.target}"
            )
        if self.m == self.e_y == self.e_x == 0:
            defaults = _FASTEST[self.target, self.weights][self.gates - 1]
        else:
            accumulators = (self.e_y or 1) * (self.e_x or 1) * self.gates
            defaults = (64, 64 if accumulators == 1 else 32, 1, 1)
        for name, value in zip(("m", "k", "e_y", "e_x"), defaults, strict=True):
            object.__setattr__(self, name, getattr(self, name) or value)
        if self.m % 8 or self.n % _PANEL or self.k % 16 or self.k_mt % self.k or min(self.e_y, self.e_x) < 1:
            raise ValueError(
                f"[gemm] expected m, n, k and k_mt in multiples of 8, {_PANEL}, 16 and k, e_y and e_x of 1 or more, "
                f"got {self.m}, {self.n}, {self.k}, {self.k_mt}, {self.e_y} and {self.e_x}"
            )

    @property
    def gates(self) -> int:
        """Tiles of C that become one when they are stored: 2 with gating."""
        if self.epilogue not in _EPILOGUES:
            raise ValueError(f"[gemm] expected an epilogue of {', '.join(_EPILOGUES)}, got {self.epilogue!r}")
        return _EPILOGUES[self.epilogue][1]

    @property
    def stores(self) -> tuple[str, ...]:
        """The possible ways in which a call of the array stores its sums."""
        return tuple(dict.fromkeys(("none", self.epilogue)))

    @property
    def accumulators(self) -> int:
        """Tiles of C that a compute tile reduces together."""
        return self.e_y * self.e_x * self.gates

    @property
    def columns(self) -> int:
        """Columns of the array."""
        return limits_of(self.target).columns

    @property
    def height(self) -> int:
        """Rows of a megatile."""
        return TILES * self.e_y * self.m

    @property
    def width(self) -> int:
        """Columns of a megatile, as the epilogue stores it."""
        return self.columns * self.e_x * self.n

    def plain(self) -> Gemm:
        """The megatiles of a call without epilogue on this array: gate and up count as columns of their own."""
        if self.epilogue == "none":
            return self
        return replace(self, epilogue="none", e_x=self.gates * self.e_x)

    def padded(self, m: int, k: int) -> tuple[int, int]:
        """M and K as the buffers of a call hold them."""
        return ceil_div(m, self.height) * self.height, ceil_div(k, self.k_mt) * self.k_mt

    def program(
        self, m: int, k: int, n: int, *, line: int = 0, c_line: int = 0, plain: bool = False, walk: Walk | None = None
    ) -> Program:
        """Host buffers a [M, K] bf16, b [N (gating: 2 N) / 32 panels][K][32] (bfp16: its bytes), c [M, N] bf16; padded.

        `line`: elements from one row of a to the next, K or more, where that is not K as padded. Then b must be 0 from
        row K on, what follows a row's K elements must be finite, and a must go on behind its last row to K as padded.
        `c_line`: elements from one row of c to the next, where they are more than N; what lies between is not touched.
        `plain`: without the array's epilogue; then N and b are those of a product without gating.
        `walk`: where the rows of a lie, in the place of `line`.

        Raises:
            ValueError: N is less than a column of tiles has, or no multiple of 32 (gating: n); K is too long for the
                tasks that a channel's queue holds (`Limits.iteration_maximum` times k_mt each); with e_y over 1, N is
                too long for a stride of C between tiles; a line is shorter than K or N; or a walk's runs are no
                multiple of k_mt.
        """
        if walk and (walk.runs < 1 or k % (walk.runs * self.k_mt)):
            raise ValueError(f"[gemm] expected K in {walk.runs} runs of multiples of {self.k_mt} (k_mt), got {k}")
        if plain and self.epilogue != "none":
            return self.plain()._program(m, k, n, walk or Walk(line), c_line, self)
        return self._program(m, k, n, walk or Walk(line), c_line, self)

    def _program(self, m: int, k: int, n: int, walk: Walk, c_line: int, array: Gemm) -> Program:
        """A call with this design's megatiles on `array`, which may have another epilogue."""
        unit, limits = self.n if self.gates > 1 else _PANEL, limits_of(self.target)
        least = self.e_x * self.n
        if n % unit or n < least:
            raise ValueError(f"[gemm] expected N in multiples of {unit}, {least} or more (a column of tiles), got {n}")
        longest = limits.task_queue * limits.iteration_maximum * self.k_mt
        if k > longest:
            raise ValueError(f"[gemm] expected K of {longest} or less, got {k}")
        widest = (limits.granule_bytes // 2 << limits.shim.stride_bits) // (self.e_y * self.m)
        if self.e_y > 1 and max(n, c_line) > widest:
            raise ValueError(f"[gemm] expected N of {widest} or less with e_y of {self.e_y}, got {max(n, c_line)}")
        least_line = k if walk.runs == 1 and not walk.apart else 0
        for lines, given, least in (("lines of K", walk.line, least_line), ("lines of N", c_line, n)):
            if given and given < least:
                raise ValueError(f"[gemm] expected {lines}, {least}, or more, got {given}")
        m, k = self.padded(m, k)
        walk, c_line = walk._replace(line=walk.line or k), c_line or n
        starts = [min(place * self.width, max(0, n - self.width)) for place in range(ceil_div(n, self.width))]
        workers, ends, shared = _build(array)
        parameters = shared.of_a_sequence()
        stores = [int(name == self.epilogue) for name in array.stores]

        def sequence(a: Any, b: Any, c: Any, a_ends: Any, b_ends: Any, c_ends: Any) -> None:
            for number in range(len(workers)):
                parameters.write(number, [m // self.height * len(starts), k // self.k, *stores])
            parameters.start()
            under_way = deque[tuple[list[Any], list[Any]]]()
            for top in range(0, m, self.height):
                for start in starts:
                    if len(under_way) == limits.task_queue // max(self.e_x, len(self._b_taps(0, n, k))):
                        _retire(*under_way.popleft())
                    fills = [
                        end.fill(a, tap=self._a_tap(top, row, m, k, walk), managed=False)
                        for row, end in enumerate(a_ends)
                    ]
                    fills += [
                        end.fill(b, tap=tap, managed=False)
                        for column, end in enumerate(b_ends)
                        for tap in self._b_taps(self._left(start, column, n), n, k)
                    ]
                    drains = [
                        end.drain(c, tap=tap, wait=True, managed=False)
                        for column, end in enumerate(c_ends)
                        for tap in self._c_taps(top, self._left(start, column, n), m, c_line)
                    ]
                    under_way.append((fills, drains))
            for fills, drains in under_way:
                _retire(fills, drains)

        b_type = tensor(self._b_size(self.gates * n * k), self._b_dtype)
        buffers = [tensor(self._a_size(m, k, walk)), b_type, tensor(m * c_line)]
        return Program(device(self.target), Runtime(sequence, [*buffers, *ends]), workers)

    # --- The array ----------------------------------------------------------------------------------------------------

    def _a_column(self, row: int) -> int:
        return row * self.columns // TILES

    @property
    def _b_dtype(self) -> Any:
        return BF16 if self.weights == "bf16" else U8

    @property
    def _b_item(self) -> int:
        return 2 if self.weights == "bf16" else 1

    def _b_size(self, values: int) -> int:
        """Elements (bf16) or bytes (bfp16) that hold `values` values of B."""
        return values if self.weights == "bf16" else values // 8 * 9

    def _build(self) -> _Array:
        """Make the array; the module's `_build` keeps it for later programs of the design."""
        names = [f"tile_{column}_{row}" for column in range(self.columns) for row in range(TILES)]
        parameters = RunTimeParameters(names)
        fifos = self._fifos()
        workers = self._workers(fifos, parameters)
        a_ends = [a.prod(tile=Tile(self._a_column(row), 0)) for row, (a, _) in enumerate(fifos[0])]
        b_ends = [b.prod(tile=Tile(column, 0)) for column, (b, _) in enumerate(fifos[1])]
        c_ends = [c.cons(tile=Tile(column, 0)) for column, (c, _) in enumerate(fifos[2])]
        return _Array(workers, (a_ends, b_ends, c_ends), parameters)

    def _fifos(self) -> tuple[list[Any], list[Any], list[Any]]:
        """(the host's fifo, the compute tiles' fifo or fifos) of each row of A, column of B and column of C."""
        m, k, n, k_mt = self.m, self.k, self.n, self.k_mt
        rows, columns = self.e_y * m, self.gates * self.e_x * n
        a_rows, b_columns, c_columns = [], [], []
        # [rows][k_mt] on the stream, [k_mt / k][rows][k] in L2: every k columns lie together.
        by_k = TensorAccessPattern([rows * k_mt], 0, [rows, k_mt // k, k], [k, rows * k, 1])
        sub_tiles = tiled(k_mt // k * rows, k)
        for row in range(TILES):
            a = ObjectFifo(tensor(rows * k_mt), name=f"a_{row}", from_stream_per_cons=by_k)
            # If several tiles of B take turns, each of them meets the same e_y tiles of A, which are held while the
            # next one arrives.
            depth = 2 if self.accumulators == self.e_y else self.e_y + 1
            inner = a.cons(depth=2).forward(
                Tile(self._a_column(row), 1), tensor(m * k), depth=depth, name=f"a_tiles_{row}", to_stream=sub_tiles
            )
            a_rows.append((a, inner))
        run, line = self._b_size(k * _PANEL), self._b_size(k_mt * _PANEL)
        limits = limits_of(self.target)
        most = limits.layout_size_maximum * self._b_item // limits.granule_bytes
        cuts, piece = pieces(run, self._b_item, most=most)
        by_panel = TensorAccessPattern(
            [self._b_size(k_mt * columns)], 0, [k_mt // k, columns // _PANEL, cuts, piece], [run, line, piece, 1]
        )
        for column in range(self.columns):
            memory = Tile(column, 1)
            b = ObjectFifo(tensor(self._b_size(k_mt * columns), self._b_dtype), name=f"b_{column}")
            kind = tensor(self._b_size(k * n), self._b_dtype)
            b_columns.append((b, b.cons().forward(memory, kind, name=f"b_tiles_{column}", to_stream=by_panel)))
            c = ObjectFifo(tensor(TILES * m * n), name=f"c_{column}", to_stream=untiled(m, n))
            offsets = [row * m * n for row in range(TILES)]
            parts = c.prod().join(offsets, memory, depths=[1] * TILES, obj_types=[tensor(m * n)] * TILES)
            c_columns.append((c, parts))
        return a_rows, b_columns, c_columns

    def _workers(self, fifos: tuple[list[Any], list[Any], list[Any]], parameters: RunTimeParameters) -> list[Worker]:
        a_rows, b_columns, c_columns = fifos
        m, k, n, e_y = self.m, self.k, self.n, self.e_y
        accumulator, c_tile = tensor(m * n, F32), tensor(m * n)
        a_kind, b_kind = tensor(m * k), tensor(self._b_size(k * n), self._b_dtype)
        kernels = [
            kernel("epilogue", "zero_f32", accumulator, I32),
            kernel("gemm", f"gemm_{self.weights}", a_kind, b_kind, accumulator, I32, I32, I32),
            *(
                kernel("epilogue", _EPILOGUES[name][0], *[accumulator] * _EPILOGUES[name][1], c_tile, I32)
                for name in self.stores
            ),
        ]

        def tile(
            a: ObjectFifoHandle,
            b: ObjectFifoHandle,
            c: ObjectFifoHandle,
            accumulators: list[list[list[Buffer]]],
            rtp: Buffer,
            barrier: Any,
            zero: Kernel,
            multiply: Kernel,
            *stores: Kernel,
        ) -> None:
            barrier.wait_for_value(1)
            barrier.release_with_value(1)
            megatiles, steps = rtp[0], rtp[1]
            # The sums that each tile of B adds to; then what each store kernel stores, if it is run.
            by_turn = [[down[gate] for down in across] for across in accumulators for gate in range(self.gates)]
            sums_of_stores = [
                [[sums] for x in by_turn for sums in x],
                [down for across in accumulators for down in across],
            ]
            times = [rtp[2 + number] for number in range(len(stores))]
            for _ in range_(megatiles):
                for sums in (sums for across in by_turn for sums in across):
                    zero(sums, m * n)
                for _ in range_(steps):
                    for turn, across in enumerate(by_turn):
                        right = b.acquire(1)
                        for y in range(e_y):
                            # A's tiles are acquired as they come, and released one by one with the last tile of B. The
                            # next step's tiles come in meanwhile, because there is room for one more than are held.
                            first, last = turn == 0, turn == len(by_turn) - 1
                            count = y + 1 if first else e_y
                            if last:  # an index counts from the oldest object that is held
                                count = 1 if first else e_y - y
                            if first or (last and y):
                                held: Any = a.acquire(count)
                            multiply(_at(held, 0 if last else y, count), right, across[y], m, k, n)
                            if last:
                                a.release(1)
                        b.release(1)
                for turns, store, stored in zip(times, stores, sums_of_stores, strict=False):
                    for _ in range_(turns):
                        for tiles in stored:
                            store(*tiles, c.acquire(1), m * n)
                            c.release(1)

        workers = []
        for column in range(self.columns):
            for row in range(TILES):
                name = f"tile_{column}_{row}"
                sums = [
                    [
                        [Buffer(accumulator, name=f"{name}_accumulator_{x}_{y}_{gate}") for gate in range(self.gates)]
                        for y in range(e_y)
                    ]
                    for x in range(self.e_x)
                ]
                ends = [a_rows[row][1].cons(), b_columns[column][1].cons(), c_columns[column][1][row].prod()]
                rtp = parameters.buffers[column * TILES + row]
                place = Tile(column, limits_of(self.target).first_compute_row + row)
                workers.append(worker(tile, [*ends, sums, rtp, parameters.barrier, *kernels], tile=place))
        return workers

    # --- The sequence: a megatile's transfers -------------------------------------------------------------------------

    def _a_size(self, m: int, k: int, walk: Walk) -> int:
        return (m - 1) * walk.line + (walk.runs - 1) * walk.apart + k // walk.runs

    def _a_tap(self, top: int, row: int, m: int, k: int, walk: Walk) -> TensorAccessPattern:
        """A row of compute tiles' rows of A, k_mt columns at a time."""
        rows = self.e_y * self.m
        sizes = [walk.runs, k // walk.runs // self.k_mt, rows, self.k_mt]
        strides, size = [walk.apart, self.k_mt, walk.line, 1], self._a_size(m, k, walk)
        return TensorAccessPattern([size], (top + row * rows) * walk.line, sizes, strides)

    def _left(self, start: int, column: int, n: int) -> int:
        """The first of C's columns that a column of tiles makes of the megatile at `start`."""
        width = self.e_x * self.n
        return min(start + column * width, n - width)

    def _b_taps(self, left: int, n: int, k: int) -> list[TensorAccessPattern]:
        """A column's columns of B: k_mt rows of each panel at a time, in runs that the innermost wrap holds."""
        run, line, width = self._b_size(self.k_mt * _PANEL), self._b_size(k * _PANEL), self.e_x * self.n
        cuts, piece = pieces(run, self._b_item)
        strides, first, steps = [run, line, piece, 1], self.gates * left // _PANEL, k // self.k_mt
        most = limits_of(self.target).iteration_maximum
        return [
            TensorAccessPattern(
                [self._b_size(self.gates * n * k)], first * line + step * run,
                [min(most, steps - step), self.gates * width // _PANEL, cuts, piece], strides,
            )
            for step in range(0, steps, most)
        ]  # fmt: skip

    def _c_taps(self, top: int, left: int, m: int, line: int) -> list[TensorAccessPattern]:
        """For each of a column's e_x tiles across, the walk supertile x compute tile x row x columns."""
        rows = self.e_y * self.m
        sizes, strides = [self.e_y, TILES, self.m, self.n], [self.m * line, rows * line, line, 1]
        taps = [
            TensorAccessPattern([m * line], top * line + left + x * self.n, sizes, strides) for x in range(self.e_x)
        ]
        # With several tiles down only whole lines could merge, m n elements, which a wrap does not hold.
        return [tap.coalesce() for tap in taps] if self.e_y == 1 else taps


def _at(held: Any, place: int, count: int) -> Any:
    """Object `place` of the `count` that an acquire gave: of a single one, the object itself."""
    return held[place] if count > 1 else held


def _retire(fills: list[Any], drains: list[Any]) -> None:
    """End a megatile: when its outputs have arrived, its inputs have all been read (arXiv 2512.13282, section 4.4)."""
    for task in drains:
        task.await_()
    for task in fills:
        task.free()


@shared
def _build(design: Gemm) -> _Array:
    return design._build()

# SPDX-License-Identifier: Apache-2.0
"""The dequantisation engine: Q4NX blocks to the weights of a GEMM, in main memory (arXiv 2602.06063, section 3.1.1).

Each compute tile turns one block after the other into a tile of 32 columns x 256 rows of B, in the order that GEMM
reads (`panels`, kernels/README.md), in bf16 or, on XDNA2, in bfp16. Objects are double-buffered in L1 and L2.

    two shim streams, each of two blocks -> memory tile, split -> four tiles, a block each
    four tiles -> memory tile, joined -> one shim stream of four tiles

The weights come out 3.2 times (bf16; 1.8 times in bfp16) as large as they went in, and one stream of 32 bits a cycle in
each of eight columns writes about what main memory takes; so one stream a column goes out.

A *group* is what a column converts at a time, four blocks; groups are dealt to the columns in turn.

- A plain weight is one run of blocks, and its tiles are one run in the same order (`panels` of the whole is its blocks'
  tiles in the file's order): a group is four neighbouring blocks, and the last group is the last four, which may
  overlap the group before.
- A gate and an up projection, one after the other in the file, are woven: 64 columns of the gate, the same 64 of the up
  projection, and so on, so that a compute tile of GEMM finds both in one run. The gate enters on the first stream, the
  up projection on the second; a group is one block from each of two rows of blocks of both. Weights in the order that
  the decode layer reads, in which the two projections' rows of blocks take turns (`decode_layer.shape.interleave`), are
  read in that order: one copy of the weights serves decoding and prefilling.

A block of 8 bits is two planes of 4 (kernels/common/q4nx.h), which a core takes as one object and adds up: an array
of its own.

A core has no run-time parameters: it converts blocks as long as they come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import (
    BF16,
    BLOCK_BYTES,
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    TILES,
    U8,
    Window,
    ceil_div,
    device,
    equal_steps,
    kernel,
    limits_of,
    pieces,
    tensor,
    worker,
)
from flownpu.aie.iron.compat import ObjectFifo, Program, Runtime, TensorAccessPattern, Tile

if TYPE_CHECKING:
    from flownpu.aie.iron.compat import Kernel, ObjectFifoHandle, Worker

_STREAMS = 2  # streams of blocks into a column: all that its shim tile has
_SHARE = TILES // _STREAMS  # blocks of a group on a stream


@dataclass(frozen=True)
class DequantEngine:
    """The array of the dequantisation engine.

    Attributes:
        target: npu1 or npu2.
        weights: what comes out: bf16 or, on npu2, bfp16 (8 values of K share an exponent, 9 bytes).
        planes: 1, or 2 for weights of 8 bits.
    """

    target: str
    weights: str = "bf16"
    planes: int = 1

    def __post_init__(self) -> None:
        limits_of(self.target)
        if self.weights not in {"bf16", "bfp16"} or (self.weights == "bfp16" and self.target == "npu1"):
            raise ValueError(
                f"[dequant_engine] expected weights in bf16 or, on npu2, bfp16, got {self.weights!r} on {self.target}"
            )

    @property
    def columns(self) -> int:
        """Columns of the array."""
        return limits_of(self.target).columns

    @property
    def name(self) -> str:
        """The array's name."""
        return f"dequant_engine-{self.weights}{'-planes' * (self.planes - 1)}"

    @property
    def block_bytes(self) -> int:
        """Bytes of all planes of a block."""
        return self.planes * BLOCK_BYTES

    @property
    def tile_size(self) -> int:
        """Elements (bf16) or bytes (bfp16) of a block's weights."""
        return BLOCK_ROWS * BLOCK_COLUMNS if self.weights == "bf16" else BLOCK_ROWS * BLOCK_COLUMNS // 8 * 9

    def program(self, m: int, k: int, *, gated: bool = False, interleaved: bool = False) -> Program:
        """Host buffers w: Q4NX blocks of M (gated: 2 M) x K, u8; b: a tile for each block, bf16 (bfp16: as bytes).

        `interleaved`: in w, rows of blocks of the gate and of the up projection take turns; b is the same either way.

        Raises:
            ValueError: the weight has fewer than four blocks, M of a gated one is no multiple of 64, or one that is
                interleaved is not gated.
        """
        rows, blocks = ceil_div(m, BLOCK_ROWS), ceil_div(k, BLOCK_COLUMNS)
        total = (2 if gated else 1) * rows * blocks
        if total < TILES or (gated and rows % _SHARE):
            raise ValueError(
                f"[dequant_engine] expected {TILES} blocks of {BLOCK_ROWS} x {BLOCK_COLUMNS} or more and M of a gate "
                f"in multiples of {_SHARE * BLOCK_ROWS}, got {m} x {k}"
            )
        if interleaved and not gated:
            raise ValueError("[dequant_engine] expected a gated weight if it is interleaved, got one that is not gated")
        # The distance between a projection's rows of blocks, and from the gate's first row to the up projection's
        # first.
        apart = (2, 1) if interleaved else (1, rows)
        taps = [
            self._woven(column, rows, blocks, apart) if gated else self._plain(column, total)
            for column in range(self.columns)
        ]
        inputs, outputs, workers = self._array()

        def sequence(w: Any, b: Any, w_ends: Any, b_ends: Any) -> None:
            windows = [[Window() for _ in range(_STREAMS + 1)] for _ in range(self.columns)]
            for turn in range(max(max(map(len, lists)) for lists in taps)):
                for column, lists in enumerate(taps):
                    ends = [*(end.fill for end in w_ends[column]), b_ends[column].drain]
                    for number, (window, start, tap) in enumerate(zip(windows[column], ends, lists, strict=True)):
                        if turn < len(tap):
                            window.add(start, w if number < _STREAMS else b, tap[turn])
            for window in (window for column in windows for window in column):
                window.finish()

        size = tensor(total * self.tile_size, BF16 if self.weights == "bf16" else U8)
        fills = [[w.prod(tile=Tile(column, 0)) for w in streams] for column, streams in enumerate(inputs)]
        drains = [b.cons(tile=Tile(column, 0)) for column, b in enumerate(outputs)]
        runtime = Runtime(sequence, [tensor(total * self.block_bytes, U8), size, fills, drains])
        return Program(device(self.target), runtime, workers)

    # --- What is moved: for each stream in, and the one out, the taps of a column -------------------------------------

    def _plain(self, column: int, total: int) -> list[list[TensorAccessPattern]]:
        """Groups of four neighbours."""
        starts = [min(TILES * g, total - TILES) for g in range(column, ceil_div(total, TILES), self.columns)]
        step, lists = TILES * self.columns, list[list[TensorAccessPattern]]()
        for first, count, unit, item in (
            *((stream * _SHARE, _SHARE, self.block_bytes, 1) for stream in range(_STREAMS)),
            (0, TILES, self.tile_size, self._item_bytes),
        ):
            cuts, piece = pieces(count * unit, item)
            # The third dimension has no wrap register, so the number of groups is not bounded.
            lists.append(
                [
                    TensorAccessPattern(
                        [total * unit], (start + first) * unit, [groups, cuts, piece], [step * unit, piece, 1]
                    )
                    for start, groups in equal_steps(starts, step, total)
                ]
            )
        return lists

    def _woven(self, column: int, rows: int, blocks: int, apart: tuple[int, int]) -> list[list[TensorAccessPattern]]:
        """Two rows of blocks of both projections at a time, block by block."""
        lists: list[list[TensorAccessPattern]] = [[] for _ in range(_STREAMS + 1)]
        most = limits_of(self.target).iteration_maximum
        for top in range(_SHARE * column, rows, _SHARE * self.columns):
            for start in range(0, blocks, most):
                count = min(most, blocks - start)
                for stream in range(_STREAMS):
                    first = (top * apart[0] + stream * apart[1]) * blocks + start
                    line = apart[0] * blocks
                    lists[stream].append(_blocks(2 * rows * blocks, first, count, _SHARE, line, self.block_bytes, 1))
                first = _STREAMS * top * blocks + start
                lists[-1].append(
                    _blocks(2 * rows * blocks, first, count, TILES, blocks, self.tile_size, self._item_bytes)
                )
        return lists

    @property
    def _item_bytes(self) -> int:
        return 2 if self.weights == "bf16" else 1

    # --- The array ----------------------------------------------------------------------------------------------------

    def _array(self) -> tuple[list[list[ObjectFifo]], list[ObjectFifo], list[Worker]]:
        """The streams in and the stream out of each column, and the workers."""
        block = tensor(self.block_bytes, U8)
        dtype = BF16 if self.weights == "bf16" else U8
        kind, size = tensor(self.tile_size, dtype), self.tile_size
        dequantize = kernel("q4nx_dequant", f"q4nx_dequant_{'planes_' * (self.planes - 1)}{self.weights}", block, kind)
        inputs, outputs, workers = [], [], []
        for column in range(self.columns):
            memory = Tile(column, 1)
            streams = [
                ObjectFifo(tensor(_SHARE * self.block_bytes, U8), name=f"w_{column}_{stream}")
                for stream in range(_STREAMS)
            ]
            offsets = [place * self.block_bytes for place in range(_SHARE)]
            blocks = [
                part for stream in streams for part in stream.cons().split(offsets, memory, obj_types=[block] * _SHARE)
            ]
            b = ObjectFifo(tensor(TILES * size, dtype), name=f"b_{column}")
            parts = b.prod().join([tile * size for tile in range(TILES)], memory, obj_types=[kind] * TILES)
            for row in range(TILES):
                place = Tile(column, limits_of(self.target).first_compute_row + row)
                workers.append(worker(_tile, [blocks[row].cons(), parts[row].prod(), dequantize], tile=place))
            inputs.append(streams)
            outputs.append(b)
        return inputs, outputs, workers


def _blocks(
    total: int, first: int, count: int, rows: int, line: int, unit: int, item_bytes: int
) -> TensorAccessPattern:
    """`count` units from `first` on, of each of `rows` rows that are `line` units apart: unit x row x its elements."""
    cuts, piece = pieces(unit, item_bytes)
    return TensorAccessPattern([total * unit], first * unit, [count, rows, cuts, piece], [unit, line * unit, piece, 1])


def _tile(w: ObjectFifoHandle, b: ObjectFifoHandle, dequantize: Kernel) -> None:
    """A compute tile's program, which it runs over and over."""
    dequantize(w.acquire(1), b.acquire(1))
    w.release(1)
    b.release(1)

# SPDX-License-Identifier: Apache-2.0
"""FusedDQP on 16, 28 or 32 tiles: y = dequant(W) x for one row x, weights in Q4NX blocks as they lie in the file.

    y_acc += dequant(w) . a        over the blocks w of a row of blocks        (arXiv 2602.06063, equation 15)

A column's four compute tiles work on four consecutive rows of blocks at a time: a *row group*, 128 outputs. Row groups
are dealt to the columns in turn. W enters a column's memory tile on `channels` DMA channels and is split there into one
stream a tile; x is broadcast to all tiles once; the tiles' outputs are joined in the memory tile.

    16 tiles: columns 0..3, two channels of weights each, x from the shim tile of column 4 (npu1, which has no column 4:
              one channel each, x from the second channel of column 0)
    28 tiles: columns 0..6, two channels of weights each, x from column 7
    32 tiles: columns 0..7, one channel of weights each, x from the second channel of column 0

On npu2 eight shim channels carry weights, or with 28 tiles fourteen: what main memory gives with the software of 2026
(`memory_read` in aie/cost/parameters.toml), where eight carry two thirds of that.

A block is 1280 words, more than the shim's innermost wrap (1023), so it travels as two halves: a tile's part of an
object of the memory tile is half a block, and two parts fill the tile's object. So the pattern

    row group (iteration) x half block x tile x half block's bytes

is one task for up to 64 row groups. The last row group begins four rows before the end, so that no row of blocks is
read that is not there; up to three rows may be computed twice, with equal results.

With gating W holds the gate's rows of blocks, then the up projection's; interleaved, the two take turns. A tile
multiplies one row of blocks of each, then stores act(gate) * up.

A weight of 8 bits is two planes of 4 bits (kernels/common/q4nx.h), so a row has twice as many blocks.

Run-time parameters of a tile: word 0, its row groups; word 1, K / 256, rounded up; word 2, planes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import (
    BLOCK_BYTES,
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    F32,
    I32,
    TILES,
    U8,
    RunTimeParameters,
    Window,
    ceil_div,
    device,
    equal_steps,
    kernel,
    limits_of,
    tensor,
    worker,
)
from flownpu.aie.iron.compat import Buffer, ObjectFifo, Program, Runtime, TensorAccessPattern, Tile, range_

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flownpu.aie.iron.compat import Kernel, ObjectFifoHandle, Worker

_HALF = BLOCK_BYTES // 2
# By epilogue: the storing kernel, and its number of accumulators.
_EPILOGUES = {"none": ("store_bf16", 1), "geglu": ("store_gelu_mul", 2), "swiglu": ("store_silu_mul", 2)}


@dataclass(frozen=True)
class FusedDQP:
    """The array of FusedDQP.

    Attributes:
        target: npu1 (16 tiles) or npu2.
        k_max: largest K of a call, a multiple of 256. x is sent to the tiles with this length, whatever K is.
        tiles: 16, 28 or 32.
        epilogue: none, geglu or swiglu.
    """

    target: str
    k_max: int
    tiles: int = 32
    epilogue: str = "none"

    def __post_init__(self) -> None:
        columns = limits_of(self.target).columns
        if self.tiles not in {16, 28, 32} or self.tiles > TILES * columns:
            raise ValueError(f"[fused_dqp] expected 16 tiles or, on npu2, 28 or 32, got {self.tiles} on {self.target}")
        if self.epilogue not in _EPILOGUES or self.k_max % BLOCK_COLUMNS:
            raise ValueError(
                f"[fused_dqp] expected an epilogue of {', '.join(_EPILOGUES)} and k_max in multiples of "
                f"{BLOCK_COLUMNS}, got {self.epilogue!r} and {self.k_max}"
            )

    @property
    def columns(self) -> int:
        """Columns of the array that are used."""
        return self.tiles // TILES

    @property
    def channels(self) -> int:
        """Shim channels of weights in a column: as many as leave a channel for x in some column."""
        return 2 if self.columns < limits_of(self.target).columns else 1

    def row_groups(self, m: int, column: int) -> list[int]:
        """First row of blocks of each of a column's row groups.

        Raises:
            ValueError: M is less than one row group, or no multiple of 32.
        """
        rows = m // BLOCK_ROWS
        if m % BLOCK_ROWS or rows < TILES:
            raise ValueError(
                f"[fused_dqp] expected M in multiples of {BLOCK_ROWS}, {BLOCK_ROWS * TILES} or more, got {m}"
            )
        return [min(TILES * g, rows - TILES) for g in range(column, ceil_div(rows, TILES), self.columns)]

    def program(self, m: int, k: int, *, interleaved: bool = False, planes: int = 1) -> Program:
        """Host buffers w: Q4NX blocks of M (gating: 2 M) x K, u8; x [k_max], y [m], bf16.

        Beyond K, x must be 0 up to a multiple of 32 and finite from there.
        `interleaved`: in w, rows of blocks of the gate and of the up projection take turns. `planes`: 1, or 2 of a
        weight of 8 bits.

        Raises:
            ValueError: K is larger than k_max, M as in `row_groups`, or interleaved is not gated.
        """
        if interleaved and _EPILOGUES[self.epilogue][1] == 1:
            raise ValueError("[fused_dqp] expected a gated weight if it is interleaved, got one that is not gated")
        if not 0 < k <= self.k_max:
            raise ValueError(f"[fused_dqp] expected K of 1..{self.k_max} (k_max), got {k}")
        groups = [self.row_groups(m, column) for column in range(self.columns)]
        columns = ceil_div(k, BLOCK_COLUMNS)
        blocks = planes * columns
        halves = 2 if _EPILOGUES[self.epilogue][1] == 2 else 1
        names = [f"tile_{column}_{row}" for column in range(self.columns) for row in range(TILES)]
        parameters = RunTimeParameters(names)
        xs = ObjectFifo(tensor(self.k_max), name="x", depth=1)
        weights, outputs, workers = [], [], []
        for column in range(self.columns):
            streams, y, tiles = self._column(column, xs, parameters)
            weights.append(streams)
            outputs.append(y)
            workers += tiles

        def sequence(w: Any, x: Any, y: Any, x_end: Any, weight_ends: Any, y_ends: Any) -> None:
            # A tile without a row group in the call before may still be busy with that call. When this call's x has
            # arrived, the tile has released the earlier x, and so has read the earlier call's parameters. Meanwhile the
            # first weights fill the memories.
            loaded = x_end.fill(x, wait=True, managed=False)
            weight_turns = self._send_weights(w, weight_ends, groups, m // BLOCK_ROWS, blocks, interleaved)
            next(weight_turns)
            loaded.await_()
            for number in range(self.tiles):
                parameters.write(number, [len(groups[number // TILES]), columns, planes])
            parameters.start()
            drains = [
                y_ends[column].drain(y, tap=tap, wait=True, managed=False)
                for column in range(self.columns)
                for tap in _output_taps(groups[column], m, self.columns)
            ]
            for _ in weight_turns:
                pass
            for task in drains:
                task.await_()

        buffers = [tensor(halves * m // BLOCK_ROWS * blocks * BLOCK_BYTES, U8), tensor(self.k_max), tensor(m)]
        x_column = self.columns if self.channels == 2 else 0
        ends = [
            xs.prod(tile=Tile(x_column, 0)),
            [[stream.prod(tile=Tile(column, 0)) for stream in streams] for column, streams in enumerate(weights)],
            [y.cons(tile=Tile(column, 0)) for column, y in enumerate(outputs)],
        ]
        return Program(device(self.target), Runtime(sequence, [*buffers, *ends]), workers)

    # --- One column ---------------------------------------------------------------------------------------------------

    def _column(
        self, column: int, xs: ObjectFifo, parameters: RunTimeParameters
    ) -> tuple[list[ObjectFifo], ObjectFifo, list[Worker]]:
        """The streams of weights, the outputs, and the four tiles of a column."""
        memory, share = Tile(column, 1), TILES // self.channels
        block, y_part = tensor(BLOCK_BYTES, U8), tensor(BLOCK_ROWS)
        streams = [
            ObjectFifo(tensor(share * _HALF, U8), name=f"w_{column}_{channel}") for channel in range(self.channels)
        ]
        parts = [
            part
            for stream in streams
            for part in stream.cons().split([tile * _HALF for tile in range(share)], memory, obj_types=[block] * share)
        ]
        y = ObjectFifo(tensor(TILES * BLOCK_ROWS), name=f"y_{column}")
        y_parts = y.prod().join([tile * BLOCK_ROWS for tile in range(TILES)], memory, obj_types=[y_part] * TILES)

        store, accumulators = _EPILOGUES[self.epilogue]
        sums, accumulator = tensor(self.k_max // 16), tensor(BLOCK_ROWS, F32)
        kernels = [
            kernel("fused_dqp", "fused_dqp_group_sums", tensor(self.k_max), sums, I32),
            kernel("epilogue", "zero_f32", accumulator, I32),
            kernel("fused_dqp", "fused_dqp", block, tensor(self.k_max), sums, accumulator, I32, I32),
            kernel("epilogue", store, *[accumulator] * accumulators, y_part, I32),
        ]
        workers = []
        for row in range(TILES):
            name = f"tile_{column}_{row}"
            state = [Buffer(accumulator, name=f"{name}_accumulator_{i}") for i in range(accumulators)]
            rtp = parameters.buffers[column * TILES + row]
            arguments = [parts[row].cons(), xs.cons(), y_parts[row].prod(), Buffer(sums, name=f"{name}_sums"), state]
            tile = Tile(column, limits_of(self.target).first_compute_row + row)
            workers.append(worker(_tile, [*arguments, rtp, parameters.barrier, *kernels], tile=tile))
        return streams, y, workers

    # --- The weights' way ---------------------------------------------------------------------------------------------

    def _send_weights(
        self, w: Any, ends: Any, groups: list[list[int]], rows: int, blocks: int, interleaved: bool
    ) -> Iterator[None]:
        """Fill the columns: each step starts a task on each channel, a bounded number of them at once."""
        share = TILES // self.channels
        windows = {(c, s): Window() for c in range(self.columns) for s in range(self.channels)}
        taps = {
            (column, stream): list(self._weight_taps(groups[column], stream * share, share, rows, blocks, interleaved))
            for column, stream in windows
        }
        for turn in range(max(map(len, taps.values()))):
            for (column, stream), window in windows.items():
                if turn < len(taps[column, stream]):
                    window.add(ends[column][stream].fill, w, taps[column, stream][turn])
            yield
        for window in windows.values():
            window.finish()

    def _weight_taps(
        self, groups: list[int], first: int, share: int, rows: int, blocks: int, interleaved: bool
    ) -> Iterator[TensorAccessPattern]:
        """One tap for many row groups at equal distances; gated and not interleaved, two for each row group.

        `first`, `share`: the first tile of a group that the channel feeds, and how many it feeds.
        """
        line = blocks * BLOCK_BYTES
        gated = _EPILOGUES[self.epilogue][1] == 2
        total = (2 if gated else 1) * rows * line
        if interleaved:  # a row is the gate's and then the up projection's
            line, gated = 2 * line, False
        for start, count in [(g, 1) for g in groups] if gated else self._runs(groups, line):
            for projection in range(2 if gated else 1):
                sizes = [count, line // _HALF, share, _HALF]
                strides = [self.columns * TILES * line, _HALF, line, 1]
                yield TensorAccessPattern([total], (projection * rows + start + first) * line, sizes, strides)

    def _runs(self, groups: list[int], line: int) -> list[tuple[int, int]]:
        """(First row of blocks, row groups) of each task."""
        limits, step = limits_of(self.target), self.columns * TILES
        reachable = step * line // limits.granule_bytes <= 1 << limits.shim.stride_bits
        return equal_steps(groups, step, limits.iteration_maximum if reachable else 1)


def _output_taps(groups: list[int], m: int, columns: int) -> list[TensorAccessPattern]:
    """The places of a column's outputs: 128 from each row group."""
    size, step = TILES * BLOCK_ROWS, columns * TILES * BLOCK_ROWS
    runs = equal_steps([start * BLOCK_ROWS for start in groups], step, 1023)
    return [TensorAccessPattern([m], start, [count, size], [step, 1]) for start, count in runs]


def _tile(
    w: ObjectFifoHandle,
    x: ObjectFifoHandle,
    y: ObjectFifoHandle,
    sums: Buffer,
    accumulators: list[Buffer],
    rtp: Buffer,
    barrier: Any,
    group_sums: Kernel,
    zero: Kernel,
    dqp: Kernel,
    store: Kernel,
) -> None:
    """A compute tile's program."""
    barrier.wait_for_value(1)
    barrier.release_with_value(1)
    groups, columns, planes = rtp[0], rtp[1], rtp[2]
    row = x.acquire(1)
    group_sums(row, sums, columns * BLOCK_COLUMNS)
    for _ in range_(groups):
        for accumulator in accumulators:
            zero(accumulator, BLOCK_ROWS)
            for j in range_(columns * planes):
                dqp(w.acquire(1), row, sums, accumulator, j, planes)
                w.release(1)
        store(*accumulators, y.acquire(1), BLOCK_ROWS)
        y.release(1)
    x.release(1)

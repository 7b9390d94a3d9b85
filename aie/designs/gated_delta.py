# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of some tokens: each compute tile holds the state of one head while the tokens go through it.

    states [H, dk, dv] -> tiles;  x [tokens, H, line] -> kernels/gated_delta.cc -> y [tokens, H, dv];  tiles -> states

A column takes four heads at a time, one a tile, and all columns as many as there are heads for; further heads follow
when the first ones' tokens are done (*rounds*). A state in bf16 is 32 KiB of a tile's 64 where dk = dv = 128.

**One stream each way.** A tile has two, but a memory tile has six channels each way for its four tiles. So a state
comes on the tokens' stream, in pieces as long as a token's x, and leaves on the outputs' stream, a row at a time. x is
q, k, v and the two rates, filled up to whole rows of a state, of which a piece has some.

A token takes a tile 16384 x 6 multiply-adds of 32 lanes, more than its kilobyte takes a stream; so tokens do not wait.
A single token waits for states: 2 x 32 KiB a head. `aie/programs` says where the design pays.

Run-time parameters of a core: word 0, rounds; word 1, tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.common import (
    I32,
    TILES,
    RunTimeParameters,
    Window,
    ceil_div,
    device,
    kernel,
    limits_of,
    named,
    pieces,
    tensor,
    worker,
)
from flownpu.aie.iron.compat import Buffer, ObjectFifo, Program, Runtime, TensorAccessPattern, Tile, range_

if TYPE_CHECKING:
    from flownpu.aie.iron.compat import ObjectFifoHandle

_RATES = 16  # elements of x behind q, k and v: two f32, and room


@dataclass(frozen=True)
class GatedDelta:
    """The array for heads of one shape.

    Attributes:
        target: npu1 or npu2.
        heads: heads of values H, a multiple of 4.
        dk: elements of a query or key, a multiple of 16.
        dv: elements of a value, a multiple of 32.
    """

    target: str
    heads: int
    dk: int
    dv: int

    def __post_init__(self) -> None:
        if self.heads % TILES or self.dk % 16 or self.dv % 32 or self.dk % self.rows:
            raise ValueError(
                f"[gated_delta] expected heads in multiples of {TILES}, keys of 16 and values of 32 elements, and "
                f"whole pieces of {self.rows} rows in a state, got {self.heads}, {self.dk} and {self.dv}"
            )

    @property
    def columns(self) -> int:
        """Columns with heads: as many as share them evenly."""
        most, groups = limits_of(self.target).columns, self.heads // TILES
        return next(columns for columns in range(most, 0, -1) if groups % columns == 0)

    @property
    def rows(self) -> int:
        """Rows of a state in a piece: the fewest that hold a token's x, of those that divide a state's."""
        least = ceil_div(2 * self.dk + self.dv + _RATES, self.dv)
        return next((rows for rows in range(least, self.dk + 1) if self.dk % rows == 0), least)

    @property
    def line(self) -> int:
        """Elements of a token's x in a head: q, k, v, then the f32 decay and beta, and what nobody reads."""
        return self.rows * self.dv

    def program(self, tokens: int) -> Program:
        """`tokens` tokens of all heads.

        Host buffers, bf16: x [tokens, H, line]; states [H, dk, dv], which are read; y [tokens, H, dv]; made
        [H, dk, dv], the states behind the tokens, which may be the memory of `states`.

        Raises:
            ValueError: no token.
        """
        if tokens < 1:
            raise ValueError(f"[gated_delta] expected a token or more, got {tokens}")
        heads, dv, line, rows, columns = self.heads, self.dv, self.line, self.rows, self.columns
        parameters = RunTimeParameters([f"head_{column}_{row}" for column in range(columns) for row in range(TILES)])
        whole, of_head, state = tensor(TILES * line), tensor(line), tensor(self.dk * dv)
        kernels = [
            kernel("copy_part", "copy_into", of_head, state, *[I32] * 3),
            kernel("gated_delta", "gated_delta", of_head, state, tensor(dv), I32, I32),
            kernel("copy_part", "copy_part", state, tensor(dv), I32, I32),
        ]
        ins, outs, workers = list[ObjectFifo](), list[ObjectFifo](), list[Any]()
        for column in range(columns):
            memory, x = Tile(column, 1), ObjectFifo(whole, name=f"x_{column}")
            offsets = [row * line for row in range(TILES)]
            xs = x.cons().split(offsets, memory, obj_types=[of_head] * TILES)
            y = ObjectFifo(tensor(TILES * dv), name=f"y_{column}")
            ys = y.prod().join([row * dv for row in range(TILES)], memory, obj_types=[tensor(dv)] * TILES)
            for row in range(TILES):
                number = column * TILES + row
                arguments = [
                    parameters.barrier, parameters.buffers[number], xs[row].cons(), ys[row].prod(),
                    Buffer(state, name=f"state_{column}_{row}"), *kernels,
                ]  # fmt: skip
                tile = Tile(column, limits_of(self.target).first_compute_row + row)
                workers.append(worker(self._core, arguments, tile=tile))
            ins.append(x)
            outs.append(y)

        def sequence(x: Any, states: Any, y: Any, made: Any, ends: Any) -> None:
            for number in range(columns * TILES):
                parameters.write(number, [heads // (columns * TILES), tokens])
            parameters.start()
            fills, drains = ([Window() for _ in range(columns)] for _ in range(2))
            for turn in range(heads // (columns * TILES)):
                for column in range(columns):
                    into, out = ends[0][column], ends[1][column]
                    first = (turn * columns + column) * TILES
                    drains[column].add(out.drain, y, self._of_tokens(tokens, dv, first))
                    drains[column].add(out.drain, made, self._of_states(first, 1))
                    fills[column].add(into.fill, states, self._of_states(first, rows))
                    fills[column].add(into.fill, x, self._of_tokens(tokens, line, first))
            for window in (*fills, *drains):
                window.finish()

        ends = [
            [x.prod(tile=Tile(column, 0)) for column, x in enumerate(ins)],
            [y.cons(tile=Tile(column, 0)) for column, y in enumerate(outs)],
        ]
        of_states = tensor(heads * self.dk * dv)
        types = [tensor(tokens * heads * line), of_states, tensor(tokens * heads * dv), of_states, ends]
        runtime = Runtime(named(sequence, ["x", "states", "y", "made", "ends"]), types)
        return Program(device(self.target), runtime, workers)

    def _core(
        self, barrier: Any, rtp: Any, x: ObjectFifoHandle, y: ObjectFifoHandle, state: Any, load: Any, step: Any,
        give: Any,
    ) -> None:  # fmt: skip
        barrier.wait_for_value(1)
        barrier.release_with_value(1)
        rounds, tokens = rtp[0], rtp[1]
        for _ in range_(rounds):
            for piece in range_(self.dk // self.rows):
                load(x.acquire(1), state, 0, piece, self.line)
                x.release(1)
            for _ in range_(tokens):
                step(x.acquire(1), state, y.acquire(1), self.dk, self.dv)
                x.release(1)
                y.release(1)
            for row in range_(self.dk):
                give(state, y.acquire(1), row, self.dv)
                y.release(1)

    # --- Walks --------------------------------------------------------------------------------------------------------

    def _of_tokens(self, tokens: int, elements: int, first: int) -> TensorAccessPattern:
        """Four neighbouring heads of each token, `elements` each."""
        line = self.heads * elements
        # In two pieces, so that tokens are the third dimension, which has no wrap register.
        cuts, piece = pieces(TILES * elements, 2, most=TILES * elements // 4)
        sizes, strides = [tokens, cuts, piece], [line, piece, 1]
        return TensorAccessPattern([tokens * line], first * elements, sizes, strides)

    def _of_states(self, first: int, rows: int) -> TensorAccessPattern:
        """The states of four neighbouring heads, `rows` rows of each in turn."""
        head, part = self.dk * self.dv, rows * self.dv
        sizes, strides = [self.dk // rows, TILES, part], [part, head, 1]
        return TensorAccessPattern([self.heads * head], first * head, sizes, strides)

# SPDX-License-Identifier: Apache-2.0
"""A kernel alone on one compute tile, called on the same operands as often as a run-time parameter says.

The output is that of one call, so it shows whether the kernel is right. Nothing is moved between the calls, so one call
takes (time of n calls - time of one) / (n - 1), which needs no trace.

    inputs -> before -> calls x (the kernel) -> after -> output

`before` and `after` are the steps that the kernel's design makes once for many calls. Run-time parameters: word 0 is 1;
word 1 is the number of calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from flownpu.aie.designs.common import (
    BF16,
    BLOCK_BYTES,
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    F32,
    I32,
    U8,
    bits,
    kernel,
    limits_of,
    tensor,
)
from flownpu.aie.designs.stream import each, stream
from flownpu.aie.iron.compat import Buffer, range_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flownpu.aie.iron.compat import Kernel, Program

ROW = 1024  # elements of a vector
ROW_HEADS = 8  # heads in such a vector
GEMM_TILE = 32, 64, 32  # m, k, n
_EPSILON = 1e-6
_BLOCK_SIZE = BLOCK_ROWS * BLOCK_COLUMNS


class Operand(NamedTuple):
    """An operand: name, elements, type."""

    name: str
    size: int
    dtype: Any = BF16


class Operands(NamedTuple):
    """A kernel's surroundings.

    Attributes:
        inputs: host buffers in, two at most.
        output: the host buffer out.
        entries: makes the kernels that are called; evaluated for each program.
        call: one call; gets entries, inputs, output and state.
        state: buffers of the tile.
        before: what is done once before the calls; gets the same.
        after: what is done once after them; gets the same.
        elements: elements of a vector that a call works on; 0 for kernels on matrices and blocks.
    """

    inputs: tuple[Operand, ...]
    output: Operand
    entries: Callable[[], list[Kernel]]
    call: Callable[..., None]
    state: tuple[Operand, ...] = ()
    before: Callable[..., None] = lambda *_: None
    after: Callable[..., None] = lambda *_: None
    elements: int = 0


@dataclass(frozen=True)
class OneTile:
    """The array of one kernel.

    Attributes:
        target: npu1 or npu2.
        kernel: one of KERNELS.
    """

    target: str
    kernel: str

    def __post_init__(self) -> None:
        limits_of(self.target)
        if self.kernel not in KERNELS or ("bfp16" in self.kernel and self.target == "npu1"):
            raise ValueError(f"[one_tile] expected a kernel of {', '.join(KERNELS)}, got {self.kernel!r}")

    def program(self, calls: int) -> Program:
        """The program of `calls` calls; host buffers are the inputs and the output of KERNELS, of one call each.

        Raises:
            ValueError: `calls` is less than 1.
        """
        if calls < 1:
            raise ValueError(f"[one_tile] expected one call or more, got {calls}")
        operands = KERNELS[self.kernel]
        entries, fifos = operands.entries(), len(operands.inputs) + 1

        def body(*arguments: Any) -> None:
            *rest, rtp = arguments
            ends, called, state = rest[:fifos], rest[fifos : fifos + len(entries)], rest[fifos + len(entries) :]
            held = [*(end.acquire(1) for end in ends), *state]
            operands.before(*called, *held)
            for _ in range_(rtp[1]):
                operands.call(*called, *held)
            operands.after(*called, *held)
            for end in ends:
                end.release(1)

        inputs = [each(part.name, 1, part.size, dtype=part.dtype, depth=1) for part in operands.inputs]
        output = each(operands.output.name, 1, operands.output.size, dtype=operands.output.dtype, depth=1)
        return stream(
            self.target, 1, 1, inputs, [output], body, entries, [calls],
            state=lambda _: [Buffer(tensor(part.size, part.dtype), name=part.name) for part in operands.state],
        )  # fmt: skip


# --- The kernels ------------------------------------------------------------------------------------------------------


def _dequant(weights: str, planes: int = 1) -> Operands:
    """A block, or the planes of one of 8 bits, to its tile of B."""
    block = Operand("w", planes * BLOCK_BYTES, U8)
    tile = Operand("b", _BLOCK_SIZE) if weights == "bf16" else Operand("b", _BLOCK_SIZE // 8 * 9, U8)

    def entries() -> list[Kernel]:
        kinds = tensor(block.size, block.dtype), tensor(tile.size, tile.dtype)
        return [kernel("q4nx_dequant", f"q4nx_dequant_{'planes_' * (planes - 1)}{weights}", *kinds)]

    return Operands((block,), tile, entries, lambda dequantize, w, b: dequantize(w, b))


def _fused_dqp() -> Operands:
    """A block times a part of x: sums from 0 each time."""
    sums, total = Operand("sums", BLOCK_COLUMNS // 16), Operand("total", BLOCK_ROWS, F32)

    def entries() -> list[Kernel]:
        block, x, y = tensor(BLOCK_BYTES, U8), tensor(BLOCK_COLUMNS), tensor(BLOCK_ROWS)
        of_x, f32 = tensor(sums.size), tensor(total.size, F32)
        return [
            kernel("fused_dqp", "fused_dqp_group_sums", x, of_x, I32),
            kernel("epilogue", "zero_f32", f32, I32),
            kernel("fused_dqp", "fused_dqp", block, x, of_x, f32, I32, I32),
            kernel("epilogue", "store_bf16", f32, y, I32),
        ]

    def before(
        add_up: Any, _zero: Any, _multiply: Any, _store: Any, _w: Any, x: Any, _y: Any, sums: Any, _t: Any
    ) -> None:
        add_up(x, sums, BLOCK_COLUMNS)

    def call(
        _add_up: Any, zero: Any, multiply: Any, _store: Any, w: Any, x: Any, _y: Any, sums: Any, total: Any
    ) -> None:
        zero(total, BLOCK_ROWS)
        multiply(w, x, sums, total, 0, 1)

    def after(_a: Any, _z: Any, _m: Any, store: Any, _w: Any, _x: Any, y: Any, _sums: Any, total: Any) -> None:
        store(total, y, BLOCK_ROWS)

    inputs = Operand("w", BLOCK_BYTES, U8), Operand("x", BLOCK_COLUMNS)
    return Operands(inputs, Operand("y", BLOCK_ROWS), entries, call, (sums, total), before, after)


def _gemm(weights: str) -> Operands:
    """A tile of A times a tile of B, in the order of the kernel, whose accumulators begin at 0."""
    m, k, n = GEMM_TILE
    b = Operand("b", k * n) if weights == "bf16" else Operand("b", k * n // 8 * 9, U8)

    def entries() -> list[Kernel]:
        a, c = tensor(m * k), tensor(m * n, F32)
        # In bfp16 the kernel takes blocks, which the host sees as bytes.
        return [
            kernel("epilogue", "zero_f32", c, I32),
            kernel("gemm", f"gemm_{weights}", a, tensor(b.size, b.dtype), c, I32, I32, I32),
            kernel("epilogue", "store_bf16", c, tensor(m * n), I32),
        ]

    def call(zero: Any, multiply: Any, _store: Any, a: Any, b: Any, _y: Any, c: Any) -> None:
        zero(c, m * n)
        multiply(a, b, c, m, k, n)

    def after(_zero: Any, _multiply: Any, store: Any, _a: Any, _b: Any, y: Any, c: Any) -> None:
        store(c, y, m * n)

    return Operands(
        (Operand("a", m * k), b), Operand("c", m * n), entries, call, (Operand("sums", m * n, F32),), after=after
    )


def _rms_norm() -> Operands:
    row, epsilon = tensor(ROW), bits(_EPSILON)
    return Operands(
        (Operand("x", ROW), Operand("weight", ROW)), Operand("y", ROW),
        lambda: [kernel("rms_norm", "rms_norm", row, row, row, I32, I32, I32)],
        lambda norm, x, weight, y: norm(x, weight, y, 1, ROW, epsilon), elements=ROW,
    )  # fmt: skip


def _rope() -> Operands:
    row, d = tensor(ROW), ROW // ROW_HEADS
    return Operands(
        (Operand("x", ROW), Operand("table", d)), Operand("y", ROW),
        lambda: [kernel("rope", "rope", row, tensor(d), row, I32, I32)],
        lambda turn, x, table, y: turn(x, table, y, ROW_HEADS, d), elements=ROW,
    )  # fmt: skip


KERNELS: Mapping[str, Operands] = {
    "q4nx_dequant_bf16": _dequant("bf16"),
    "q4nx_dequant_bfp16": _dequant("bfp16"),
    "q4nx_dequant_planes_bf16": _dequant("bf16", 2),
    "q4nx_dequant_planes_bfp16": _dequant("bfp16", 2),
    "fused_dqp": _fused_dqp(),
    "gemm_bf16": _gemm("bf16"),
    "gemm_bfp16": _gemm("bfp16"),
    "rms_norm": _rms_norm(),
    "rope": _rope(),
}

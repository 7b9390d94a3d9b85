# SPDX-License-Identifier: Apache-2.0
r"""Q4NX: weights of 4 or 8 bits in blocks of 32 rows by 1 or 8 groups of 32 columns (ops/formats/q4nx.h is C++'s).

A weight W[rows, columns] is stored as a uint8 tensor of shape [ceil(rows/32), ceil(columns/(32 G)), bytes of a block],
where G is the number of groups in a block. With n = 64 G, a block of 4 bits is

    bytes    0 ..       n - 1      scales,  bf16, little-endian, ordered [column/32][row]
    bytes    n ..     2 n - 1      minima,  the same; a symmetric block has none, and its codes begin here
    then     8 n bytes             codes: two strips of 16 rows; a strip is 32 G columns of 8 bytes; byte j of a column
                                   holds row 2j in its low nibble and row 2j+1 in its high nibble

    WIDE       G = 8   [.., ceil(columns/256), 5120]   in the papers, `.q4nx` files and on the NPU
    NARROW     G = 1   [.., ceil(columns/32), 640]     in converted models: read in one stream, without padding
    SYMMETRIC  G = 1   [.., ceil(columns/32), 576]     the same, for weights whose minima are all -8 times their scales

A block of 8 bits has one group: 64 bytes of scales, 64 of minima or none (minima of 0), and 1024 bytes of codes, int8
[column/4][row%2][row/2][column%4]:

    EIGHT_BITS              [.., ceil(columns/32), 1088]   without minima, as GGUF's Q8_0
    EIGHT_BITS_WITH_MINIMA  [.., ceil(columns/32), 1152]

Weights of 8 bits without minima of which at most 16 values occur, as MXFP4's and NF4's, take 4 bits: a block is a
symmetric one of 4 bits, whose codes are places in the int8 table that its last 16 bytes are:

    TABLE                   [.., ceil(columns/32), 592]

The last dimension tells the layout. Padding beyond `rows` or `columns` is zero: codes, scales and minima. (Padding
columns in the last group of 32 have that group's scale and minimum and code 0, which does not stand for 0: readers of
blocks skip them.)
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flownpu.ops.q4nx_quantize import (
    BFLOAT16,
    GROUP,
    LARGEST_CODE,
    MINIMUM_OF_SYMMETRIC,
    Bytes,
    Floats,
    Quantized,
    ceil_divide,
    check_quantized,
    dequantize_codes,
    from_affine,
    is_symmetric,
    quantize,
    quantize_bytes,
    relative_error,
    stack,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "BFLOAT16",
    "BLOCK_BYTES",
    "BLOCK_ROWS",
    "EIGHT_BITS",
    "EIGHT_BITS_WITH_MINIMA",
    "GROUP",
    "LARGEST_CODE",
    "NARROW",
    "PARAMETER_BYTES",
    "SYMMETRIC",
    "TABLE",
    "WIDE",
    "Bytes",
    "Floats",
    "Layout",
    "Quantized",
    "blocks_shape",
    "dequantize",
    "dequantize_codes",
    "from_affine",
    "gather",
    "is_symmetric",
    "layout_of",
    "pack",
    "pack_gated",
    "quantize",
    "quantize_bytes",
    "relative_error",
    "repack",
    "stack",
    "unpack",
]

BLOCK_ROWS = 32
STRIP_ROWS = 16


class Layout(NamedTuple):
    """One of the layouts of a block.

    Attributes:
        groups: Number of groups of 32 columns in a block.
        minima: Whether blocks store minima; without them, each is -8 times its scale, or of 8 bits 0.
        bits: Bits of a code, 4 or 8.
        table: Whether a code is a place in the block's table of 16 codes of 8 bits.
    """

    groups: int
    minima: bool
    bits: int = 4
    table: bool = False

    @property
    def unpacked_bits(self) -> int:
        """Bits of a code when it is unpacked: 8 for those of a table."""
        return 8 if self.table else self.bits

    @property
    def block_columns(self) -> int:
        """Number of columns in a block."""
        return self.groups * GROUP

    @property
    def block_bytes(self) -> int:
        """Size of a block in bytes."""
        return int(self.dtype.itemsize)

    @property
    def parameter_bytes(self) -> int:
        """Size in bytes of a block's scales, and as much again of its minima."""
        return 2 * self.groups * BLOCK_ROWS

    @property
    def dtype(self) -> np.dtype[np.void]:
        """A block as a NumPy record: scale, minimum and codes; bf16 as its bits."""
        parameters = ("scale", "minimum") if self.minima else ("scale",)
        codes = (
            ("codes", "u1", (BLOCK_ROWS // STRIP_ROWS, self.block_columns, STRIP_ROWS // 2))
            if self.bits == 4
            else ("codes", "i1", (self.block_columns // 4, 2, BLOCK_ROWS // 2, 4))
        )
        table = [("table", "i1", (LARGEST_CODE + 1,))] if self.table else []
        return np.dtype([*((name, "<u2", (self.groups, BLOCK_ROWS)) for name in parameters), codes, *table])


WIDE = Layout(8, minima=True)
NARROW = Layout(1, minima=True)
SYMMETRIC = Layout(1, minima=False)
EIGHT_BITS = Layout(1, minima=False, bits=8)
EIGHT_BITS_WITH_MINIMA = Layout(1, minima=True, bits=8)
TABLE = Layout(1, minima=False, table=True)
_LAYOUTS = (WIDE, NARROW, SYMMETRIC, EIGHT_BITS, EIGHT_BITS_WITH_MINIMA, TABLE)

# Sizes in bytes of a wide block, and of its scales (or its minima).
BLOCK_BYTES = WIDE.block_bytes
PARAMETER_BYTES = WIDE.parameter_bytes


def blocks_shape(rows: int, columns: int, layout: Layout = WIDE, *, gated: bool = False) -> tuple[int, int, int]:
    """The shape of the uint8 tensor that holds W[rows, columns], or with `gated` a pair of such weights (`pack_gated`).

    Raises:
        ValueError: `rows` or `columns` is less than 1.
    """
    if rows < 1 or columns < 1:
        raise ValueError(f"[q4nx] expected rows and columns of at least 1, got {rows} and {columns}")
    return (1 + gated) * ceil_divide(rows, BLOCK_ROWS), ceil_divide(columns, layout.block_columns), layout.block_bytes


def layout_of(blocks_or_shape: Bytes | Sequence[int]) -> Layout:
    """The layout of a weight's blocks, or of blocks of a given shape, told by the last of the three dimensions.

    Raises:
        ValueError: No layout has such a shape.
    """
    shape = list(blocks_or_shape.shape if isinstance(blocks_or_shape, np.ndarray) else blocks_or_shape)
    for layout in _LAYOUTS:
        if len(shape) == 3 and shape[-1] == layout.block_bytes:
            return layout
    known = ", ".join(
        f"[ceil(rows/{BLOCK_ROWS}), ceil(columns/{layout.block_columns}), {layout.block_bytes}]" for layout in _LAYOUTS
    )
    raise ValueError(f"[q4nx] expected blocks of one of the shapes {known}, got {shape}")


def pack(codes: NDArray[Any], scale: NDArray[Any], minimum: NDArray[Any], layout: Layout = WIDE) -> Bytes:
    """Lays a quantised weight out in blocks, as in `pack(*quantize(weight))`.

    Args:
        codes: uint8 [rows, columns], 0..15, for a layout of 4 bits; int8 for one of 8, or with a table.
        scale: bfloat16 [rows, ceil(columns/32)].
        minimum: bfloat16 [rows, ceil(columns/32)].
        layout: The layout of the blocks.

    Returns:
        uint8 `blocks_shape(rows, columns, layout)`.

    Raises:
        ValueError: Types or shapes do not fit, a uint8 code is above 15, the codes are not of the layout's bits, the
            layout has no minima and the weight is not symmetric, or it has a table and there are more than 16 codes.
    """
    check_quantized("pack", codes, scale, minimum)
    bits = Quantized(codes, scale, minimum).bits
    if bits != layout.unpacked_bits:
        raise ValueError(
            f"[pack] expected codes of {layout.unpacked_bits} bits for this layout, got {codes.dtype} ({bits} bits)"
        )
    if bits == 4 and codes.max() > LARGEST_CODE:
        raise ValueError(f"[pack] expected codes in 0..15, got {int(codes.max())}")
    if not layout.minima and not is_symmetric(Quantized(codes, scale, minimum)):
        raise ValueError(
            f"[pack] expected every minimum to be {MINIMUM_OF_SYMMETRIC if bits == 4 else 0} times its scale for a "
            "layout without minima, got others; choose one with minima"
        )
    rows, columns = codes.shape
    shape = block_rows, block_columns, _ = blocks_shape(rows, columns, layout)
    blocks = np.empty((block_rows, block_columns), layout.dtype)
    for name, parameter in (("scale", scale), ("minimum", minimum))[: 1 + layout.minima]:
        padded = _pad(parameter.view(np.uint16), block_rows * BLOCK_ROWS, block_columns * layout.groups)
        by_block = padded.reshape(block_rows, BLOCK_ROWS, block_columns, layout.groups)
        blocks[name] = by_block.transpose(0, 2, 3, 1)
    if layout.table:
        codes, blocks["table"] = _places(codes)
    padded = _pad(codes, block_rows * BLOCK_ROWS, block_columns * layout.block_columns)
    if layout.bits == 8:
        quads = padded.reshape(block_rows, BLOCK_ROWS // 2, 2, block_columns, GROUP // 4, 4)
        blocks["codes"] = quads.transpose(0, 3, 4, 2, 1, 5)
    else:
        pairs = padded.reshape(block_rows, 2, STRIP_ROWS // 2, 2, block_columns, layout.block_columns)
        blocks["codes"] = (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).transpose(0, 3, 1, 4, 2)
    return blocks.view(np.uint8).reshape(shape)


def pack_gated(gate: Quantized, up: Quantized, layout: Layout = WIDE) -> Bytes:
    """Blocks of a gated pair: the gate's blocks, then the up projection's, each padded to 32 rows.

    Raises:
        ValueError: The two differ in shape, or `pack` refuses one of them.
    """
    if gate.shape != up.shape:
        raise ValueError(f"[pack_gated] expected gate and up of one shape, got {gate.shape} and {up.shape}")
    return np.concatenate([pack(*gate, layout), pack(*up, layout)])


def unpack(blocks: Bytes, rows: int, columns: int) -> Quantized:
    """The inverse of `pack`, for any layout.

    Raises:
        ValueError: `blocks` is not the uint8 tensor of that many rows and columns.
    """
    layout = _check_blocks("unpack", blocks, rows, columns)
    padded_rows = blocks.shape[0] * BLOCK_ROWS
    fields = np.ascontiguousarray(blocks).view(layout.dtype)[..., 0]

    def by_row(name: str) -> NDArray[Any]:
        values = fields[name].transpose(0, 3, 1, 2).reshape(padded_rows, -1)[:rows, : ceil_divide(columns, GROUP)]
        return np.ascontiguousarray(values, dtype=np.uint16).view(BFLOAT16)

    scale = by_row("scale")
    packed = fields["codes"]
    if layout.bits == 8:
        minimum = by_row("minimum") if layout.minima else np.zeros_like(scale)
        codes = packed.transpose(0, 4, 3, 1, 2, 5).reshape(padded_rows, -1)[:rows, :columns]
        return Quantized(np.ascontiguousarray(codes), scale, minimum)
    if layout.table:
        minimum = np.zeros_like(scale)
    else:
        minimum = by_row("minimum") if layout.minima else scale * BFLOAT16.type(MINIMUM_OF_SYMMETRIC)
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)  # [block row, block column, strip, column, j, nibble]
    if layout.table:  # [.., 16] by places [.., the block's codes]
        pairs = np.take_along_axis(fields["table"], pairs.reshape(*pairs.shape[:2], -1), axis=-1).reshape(pairs.shape)
    codes = pairs.transpose(0, 2, 4, 5, 1, 3).reshape(padded_rows, -1)[:rows, :columns]
    return Quantized(np.ascontiguousarray(codes), scale, minimum)


def repack(blocks: Bytes, columns: int, layout: Layout) -> Bytes:
    """The same weight, or gated pair, in another layout. Padding rows are treated like the weight's own rows.

    Args:
        blocks: uint8 blocks of any layout.
        columns: The weight's number of columns.
        layout: The layout of the result.

    Returns:
        uint8 blocks in `layout`.

    Raises:
        ValueError: `blocks` does not have that many columns, or `layout` has no minima and the weight is not symmetric.
    """
    return pack(*unpack(blocks, len(blocks) * BLOCK_ROWS, columns), layout)


def as_read(blocks: Bytes) -> Bytes:
    """Q4NX blocks of a weight, in any layout, as an NPU's array reads them.

    The array multiplies codes of 4 bits. A weight of 8 bits, or with a table of int8 values, is the sum of two of 4,
    its *planes*: of the code or value c, the high one has c // 16 + 8, times 16 scales from -128 scales on, and the low
    one c % 16 (aie/kernels/common/q4nx.h).

    Returns:
        Wide blocks [R, ceil(K/256), 5120]; of 8 bits [R, 2 ceil(K/256), 5120], the high plane's and the low plane's in
        turn.
    """
    layout = layout_of(blocks)
    columns = blocks.shape[1] * layout.block_columns  # whole groups
    if layout.unpacked_bits == 4:
        return blocks if layout == WIDE else repack(blocks, columns, WIDE)
    codes, scale, minimum = unpack(blocks, len(blocks) * BLOCK_ROWS, columns)
    # + 0: rows of padding get 0, not -0.
    wider, least = ((scale.astype(np.float32) * factor + 0).astype(BFLOAT16) for factor in (16, -128))
    high = pack((codes // 16 + 8).astype(np.uint8), wider, least)
    low = pack((codes % 16).astype(np.uint8), scale, minimum)
    return np.stack([high, low], axis=2).reshape(len(high), -1, BLOCK_BYTES)


def dequantize(blocks: Bytes, rows: int, columns: int) -> Floats:
    """The weights that the blocks stand for (equation 3 of `q4nx_quantize`), float32 [rows, columns].

    Raises:
        ValueError: `blocks` is not the uint8 tensor of that many rows and columns.
    """
    return dequantize_codes(unpack(blocks, rows, columns))


def gather(blocks: Bytes, indices: NDArray[Any], rows: int, columns: int) -> Floats:
    """Looks up rows of the dequantised weight, as an embedding does: float32 [*indices.shape, columns].

    Raises:
        ValueError: `blocks` is not the uint8 tensor of that many rows and columns, or `indices` are no integers.
        IndexError: An index is outside 0..rows-1.
    """
    _check_blocks("gather", blocks, rows, columns)
    indices = np.asarray(indices)
    if not np.issubdtype(indices.dtype, np.integer):
        raise ValueError(f"[gather] expected integer indices, got {indices.dtype}")
    outside = indices[(indices < 0) | (indices >= rows)]
    if outside.size:
        raise IndexError(f"[gather] expected indices in 0..{rows - 1}, got {int(outside.flat[0])}")
    used, position = np.unique(indices, return_inverse=True)
    values = np.empty((used.size, columns), np.float32)
    for i, row in enumerate(used):
        block_row, row_in_block = divmod(operator.index(row), BLOCK_ROWS)
        values[i] = dequantize(blocks[block_row : block_row + 1], BLOCK_ROWS, columns)[row_in_block]
    return values[position].reshape(*indices.shape, columns)


def _check_blocks(name: str, blocks: Bytes, rows: int, columns: int) -> Layout:
    layout = layout_of(blocks)
    expected = blocks_shape(rows, columns, layout)
    if blocks.dtype != np.uint8 or blocks.shape != expected:
        raise ValueError(
            f"[{name}] expected blocks uint8 {list(expected)} for {rows} rows and {columns} columns, "
            f"got {blocks.dtype} {list(blocks.shape)}"
        )
    return layout


def _places(codes: NDArray[np.int8]) -> tuple[NDArray[np.uint8], NDArray[np.int8]]:
    """The place of each code in the table of those that occur, uint8; and the table, int8 [16], padded with 0."""
    occurrences = np.bincount(codes.ravel().view(np.uint8) ^ 128, minlength=256)
    values = (np.flatnonzero(occurrences) - 128).astype(np.int8)
    if len(values) > LARGEST_CODE + 1:
        raise ValueError(
            f"[pack] expected at most {LARGEST_CODE + 1} codes for a layout with a table, got {len(values)}"
        )
    place = np.zeros(256, np.uint8)
    place[values.view(np.uint8)] = np.arange(len(values))
    return place[codes.view(np.uint8)], _pad(values[None], 1, LARGEST_CODE + 1)[0]


def _pad(values: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    return np.pad(values, ((0, rows - values.shape[0]), (0, columns - values.shape[1])))

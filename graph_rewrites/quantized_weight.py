# SPDX-License-Identifier: Apache-2.0
"""Reads the 4-bit weights of `com.microsoft` operators and writes them as Q4NX initializers.

MatMulNBits and GatherBlockQuantized hold a weight W[M, K] as codes of 4 bits (low nibble first along K), one scale for
`block_size` columns, and a zero point, which is 8 when it is not given:

    W[m, k] = scale[m, k / block_size] * (code[m, k] - zero_point[m, k / block_size])

Q4NX says the same with a minimum (flownpu.ops.q4nx, equation 3). The codes stay as they are. Only where a block is 16
columns, two of which share Q4NX's scale, are the weights quantised again. Blocks are narrow, and symmetric where every
zero point is 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir

from flownpu.graph_rewrites.node import is_constant
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from flownpu.graph_rewrites.rule import Builder

# 2^(bits - 1), the operators' own default.
DEFAULT_ZERO_POINT = 8
# The one block_size that weights are quantised again from: the least that ORT's kernels take.
SMALL_BLOCK = 16
# Rows that are unpacked to a byte a code at a time, a multiple of the 32 rows of a block: a row of 16384 columns then
# takes 32 MB, whatever the number of rows, so that a vocabulary of 262144 never stands in memory unpacked.
_ROWS_AT_ONCE = 2048
# Of a Q4NX initializer: the values it was made of, so that a tied table is made once.
_SOURCE = "flownpu.q4nx_source"


class Packed(NamedTuple):
    """Q4NX bytes, and how far their weights are from those they were made of.

    Attributes:
        blocks: uint8 [row of blocks, block, byte].
        squared_error: sum of squares of the differences.
        squares: sum of squares of the weights they were made of.
    """

    blocks: NDArray[np.uint8]
    squared_error: float
    squares: float


class Q4NXTensor(ir.LazyTensor):
    """Q4NX bytes that are made whenever they are read, and kept by whoever reads them.

    Attributes:
        pack: makes them.
        keeps_codes: whether they have the codes of what they are made of, or are quantised again.
        relative_error: |W - W'| / |W| in the Frobenius norm, of what was read last; 0 before.
    """

    def __init__(
        self, pack: Callable[[], Packed], shape: tuple[int, ...], name: str, *, keeps_codes: bool = True
    ) -> None:
        super().__init__(self._evaluate_blocks, ir.DataType.UINT8, ir.Shape(shape), name=name)
        self.pack = pack
        self.keeps_codes = keeps_codes
        self.relative_error = 0.0

    def _evaluate_blocks(self) -> ir.TensorProtocol:
        packed = self.pack()
        self.relative_error = (packed.squared_error / packed.squares) ** 0.5 if packed.squares else 0.0
        return ir.Tensor(packed.blocks)


@dataclass(frozen=True)
class QuantizedWeight:
    """A constant W[M, K] in 4-bit codes.

    Attributes:
        codes: uint8 [M, ceil(K / block_size), block_size / 2], or the same bytes in any shape.
        scales: float32, M * ceil(K / block_size) of them.
        zero_points: None (8), uint8 packed like the codes and padded to a byte a row, or float32 like the scales.
        rows: M.
        columns: K.
        block_size: columns that share a scale: 16, or a multiple of 32.
    """

    codes: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    rows: int
    columns: int
    block_size: int

    def obstacle(self) -> str | None:
        """Why this weight cannot become Q4NX, or None if it can."""
        for value in (self.codes, self.scales, self.zero_points):
            if value is not None and not is_constant(value):
                return f"{value.name} is not a constant of the model"
        if not self.keeps_codes and self.block_size != SMALL_BLOCK:
            return (
                f"block_size={self.block_size}: Q4NX has one scale for {q4nx.GROUP} columns; "
                f"export with a block_size that is a multiple of {q4nx.GROUP}"
            )
        if (scale_type := self.scales.dtype) != ir.DataType.FLOAT:
            return f"scales and activations are {scale_type}, expected FLOAT; export with float32 inputs and outputs"
        if (code_type := self.codes.dtype) != ir.DataType.UINT8:
            return f"the codes' type is {code_type}, expected UINT8 with two codes a byte"
        packed_points = self.zero_points is not None and self.zero_points.dtype == ir.DataType.UINT8
        for name, value, expected in (
            ("codes", self.codes, self._blocks * self.block_size // 2),
            ("scales", self.scales, self._blocks),
            ("zero points", self.zero_points, -(-self._blocks // 2) if packed_points else self._blocks),
        ):
            if value is not None and (size := _size(value)) != self.rows * expected:
                return (
                    f"{value.name} has {size} elements, expected {self.rows * expected} {name} for "
                    f"{self.rows} rows of {self.columns} columns in blocks of {self.block_size}"
                )
        return None

    @property
    def keeps_codes(self) -> bool:
        """Whether its codes are Q4NX's; if not, the weights are quantised again."""
        return self.block_size % q4nx.GROUP == 0

    @property
    def layout(self) -> q4nx.Layout:
        """Of its blocks: without minima, where these are what zero points of 8 make of the scales."""
        symmetric = self.keeps_codes and bool((self._zero_point_array() == DEFAULT_ZERO_POINT).all())
        return q4nx.SYMMETRIC if symmetric else q4nx.NARROW

    def initializer(self, op: Builder) -> ir.Value:
        """The weight's Q4NX initializer, packed when it is read.

        Of one table there is one initializer, however many operators read it.
        """
        assert self.obstacle() is None
        graph = self.codes.graph
        assert isinstance(graph, ir.Graph)
        source = (self.codes, self.scales, self.zero_points)
        for existing in graph.initializers.values():
            if existing.meta.get(_SOURCE) == source:
                return existing
        name = unique_name(graph, f"{(self.codes.name or 'weight').removesuffix('_Q4')}_Q4NX")
        shape = q4nx.blocks_shape(self.rows, self.columns, self.layout)
        value: ir.Value = op.initializer(Q4NXTensor(self.pack, shape, name, keeps_codes=self.keeps_codes))
        value.meta[_SOURCE] = source
        return value

    def pack(self) -> Packed:
        """The weight's Q4NX bytes, and what they cost.

        Where codes are kept, the scale is rounded to bf16, and the minimum is -zero_point times the rounded scale: the
        weights round with their scale (relative error 2^-8), and for a power of two such as the default zero point
        nothing else does.

        Raises:
            ValueError: a scale or zero point that is not finite, or too large for bf16.
        """
        codes = _array(self.codes).reshape(self.rows, -1)
        scales = _array(self.scales).reshape(self.rows, self._blocks)
        zero_points = self._zero_point_array()
        layout = self.layout
        blocks = np.empty(q4nx.blocks_shape(self.rows, self.columns, layout), np.uint8)
        squared_error = squares = 0.0
        for first in range(0, self.rows, _ROWS_AT_ONCE):
            part = slice(first, min(first + _ROWS_AT_ONCE, self.rows))
            of_part = unpack_nibbles(codes[part])[:, : self.columns]
            points = zero_points[part].astype(np.float32)
            exact = of_part - self._by_column(points)
            exact *= self._by_column(scales[part])
            if self.keeps_codes:
                rounded = scales[part].astype(q4nx.BFLOAT16).astype(np.float32)
                minima = self._by_group(-rounded * points)
                quantized = q4nx.from_affine(of_part, self._by_group(rounded), minima)
            else:
                quantized = q4nx.quantize(exact)
            # An exact division but for the last part, which ends with the blocks.
            blocks[first // q4nx.BLOCK_ROWS : -(-part.stop // q4nx.BLOCK_ROWS)] = q4nx.pack(*quantized, layout)
            squares += _sum_of_squares(exact)
            squared_error += _sum_of_squares(exact - q4nx.dequantize_codes(quantized))
        return Packed(blocks, squared_error, squares)

    def _by_group(self, parameter: NDArray[np.float32]) -> NDArray[np.float32]:
        """A scale or zero point a block -> one for each group of 32 columns."""
        repeated: NDArray[np.float32] = np.repeat(parameter, self.block_size // q4nx.GROUP, axis=1)
        return repeated[:, : -(-self.columns // q4nx.GROUP)]

    def _by_column(self, parameter: NDArray[np.float32]) -> NDArray[np.float32]:
        """A scale or zero point a block -> one for each column."""
        repeated: NDArray[np.float32] = np.repeat(parameter, self.block_size, axis=1)
        return repeated[:, : self.columns]

    def _zero_point_array(self) -> NDArray[Any]:
        """uint8 or float32 [M, ceil(K / block_size)]."""
        if self.zero_points is None:
            return np.broadcast_to(np.uint8(DEFAULT_ZERO_POINT), (self.rows, self._blocks))
        values = _array(self.zero_points).reshape(self.rows, -1)
        return unpack_nibbles(values)[:, : self._blocks] if values.dtype == np.uint8 else values

    @property
    def _blocks(self) -> int:
        """Scales of a row."""
        return -(-self.columns // self.block_size)


def unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[rows, n] bytes to [rows, 2n] values of 4 bits, the low nibble first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def concatenated_initializer(op: Builder, parts: Sequence[ir.Value], columns: int, name: str) -> ir.Value:
    """An initializer of several Q4NX weights below one another, joined when it is read.

    Args:
        op: the builder of the rule that asks.
        parts: Q4NX initializers of equal K. All but the last have a multiple of 32 rows, unless each is to be padded.
            Of several layouts, all become narrow.
        columns: K.
        name: last part of the new name; what the parts' names have in common comes before it.
    """
    graph = parts[0].graph
    assert isinstance(graph, ir.Graph)
    tensors = [part.const_value for part in parts if part.const_value is not None]
    assert len(tensors) == len(parts)
    shapes = [tensor.shape.numpy() for tensor in tensors]
    layouts = {q4nx.layout_of(shape) for shape in shapes}
    layout = layouts.pop() if len(layouts) == 1 else q4nx.NARROW
    words = zip(*((part.name or "").split(".") for part in parts), strict=False)
    common = [word for word, *_ in takewhile(lambda same: len(set(same)) == 1, words)]
    joined: ir.Value = op.initializer(
        Q4NXTensor(
            lambda: _concatenate([_read(tensor, columns, layout) for tensor in tensors]),
            (sum(shape[0] for shape in shapes), *q4nx.blocks_shape(q4nx.BLOCK_ROWS, columns, layout)[1:]),
            unique_name(graph, ".".join([*common, name])),
            keeps_codes=all(tensor.keeps_codes for tensor in tensors if isinstance(tensor, Q4NXTensor)),
        )
    )
    return joined


def unique_name(graph: ir.Graph, name: str) -> str:
    """`name`, or with a number behind it if the graph has such an initializer."""
    taken, number = name, 1
    while taken in graph.initializers:
        taken, number = f"{name}_{number}", number + 1
    return taken


def _read(tensor: ir.TensorProtocol, columns: int, layout: q4nx.Layout) -> Packed:
    """A Q4NX tensor's bytes in some layout; of one that is there already, no error is known."""
    packed = tensor.pack() if isinstance(tensor, Q4NXTensor) else Packed(tensor.numpy(), 0.0, 0.0)
    if q4nx.layout_of(packed.blocks) == layout:
        return packed
    return packed._replace(blocks=q4nx.repack(packed.blocks, columns, layout))


def _concatenate(parts: Sequence[Packed]) -> Packed:
    return Packed(
        np.concatenate([part.blocks for part in parts]),
        sum(part.squared_error for part in parts),
        sum(part.squares for part in parts),
    )


def _sum_of_squares(values: NDArray[np.float32]) -> float:
    # Rows in float32, their sums in float64: exact to far more digits than an error is read with.
    return float(np.einsum("ij,ij->i", values, values).sum(dtype=np.float64))


def _array(value: ir.Value) -> NDArray[Any]:
    assert value.const_value is not None
    return value.const_value.numpy()


def _size(value: ir.Value) -> int:
    assert value.const_value is not None
    return value.const_value.size

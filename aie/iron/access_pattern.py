# SPDX-License-Identifier: Apache-2.0
"""Strided walks over a tensor, as a DMA makes them: the part of `aie.helpers.taplib` that our designs use.

Names and meaning are those of mlir-aie's `TensorAccessPattern` (python/helpers/taplib/tap.py): sizes and strides are
parallel, outermost first, in elements of the tensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flownpu.aie.plan.data import Dimension

if TYPE_CHECKING:
    from collections.abc import Sequence


class TensorAccessPattern:
    """A walk over a tensor of shape `tensor_dims`: from `offset`, `sizes` steps of `strides` elements.

    Methods return a new pattern. They raise a ValueError where their arguments do not fit the walk, and indexing an
    IndexError where an integer is out of range.

    Raises:
        ValueError: sizes and strides differ in number, a number is out of range, or the walk leaves the tensor.
    """

    def __init__(
        self,
        tensor_dims: Sequence[int],
        offset: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        padding: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.tensor_dims = [int(size) for size in tensor_dims]
        self.offset = int(offset)
        self.sizes = [int(size) for size in sizes]
        self.strides = [int(stride) for stride in strides]
        self.padding = tuple((int(before), int(after)) for before, after in padding) if padding is not None else None
        if len(self.sizes) != len(self.strides):
            raise ValueError(f"[tap] expected as many strides as sizes, got {self.strides} and {self.sizes}")
        if min(self.sizes, default=1) < 1 or min([self.offset, *self.strides]) < 0:
            raise ValueError(f"[tap] expected sizes of 1 or more, strides and offset of 0 or more, got {self}")
        if self.padding is not None and len(self.padding) != len(self.sizes):
            raise ValueError(f"[tap] expected one (before, after) a dimension, got {self.padding} for {self.sizes}")
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        if last >= math.prod(self.tensor_dims):
            raise ValueError(f"[tap] {self} reaches element {last} of a tensor of {math.prod(self.tensor_dims)}")

    @classmethod
    def full(cls, tensor_dims: Sequence[int]) -> TensorAccessPattern:
        """Every element once, in row-major order."""
        sizes = list(tensor_dims)
        return cls(sizes, 0, sizes, [math.prod(sizes[place + 1 :]) for place in range(len(sizes))])

    @property
    def walk(self) -> tuple[Dimension, ...]:
        """The dimensions, outermost first."""
        return tuple(map(Dimension, self.sizes, self.strides))

    @property
    def numel(self) -> int:
        """How many elements are visited, padding not counted."""
        return math.prod(self.sizes)

    def _with(self, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> TensorAccessPattern:
        if self.padding is not None:
            raise ValueError("[tap] a padded walk cannot be changed further: apply pad() last")
        return TensorAccessPattern(self.tensor_dims, offset, sizes, strides)

    def permute(self, axes: Sequence[int]) -> TensorAccessPattern:
        """Dimension i of the result is dimension `axes[i]` of this."""
        if sorted(axes) != list(range(len(self.sizes))):
            raise ValueError(f"[tap] expected a permutation of {list(range(len(self.sizes)))}, got {list(axes)}")
        return self._with(self.offset, [self.sizes[a] for a in axes], [self.strides[a] for a in axes])

    def split(self, dim: int, inner: int) -> TensorAccessPattern:
        """Cut dimension `dim` of size n into n / inner pieces of `inner`."""
        dim %= len(self.sizes)
        size, stride = self.sizes[dim], self.strides[dim]
        if size % inner:
            raise ValueError(f"[tap] dimension {dim} of size {size} is no multiple of {inner}")
        sizes = [*self.sizes[:dim], size // inner, inner, *self.sizes[dim + 1 :]]
        strides = [*self.strides[:dim], stride * inner, stride, *self.strides[dim + 1 :]]
        return self._with(self.offset, sizes, strides)

    def tile(self, tile_dims: Sequence[int]) -> TensorAccessPattern:
        """Cut every dimension into tiles: first the dimensions of the grid, then those of a tile.

        So `tiled[i, j]` is the tile at (i, j), and the whole walks tile by tile, row by row.
        """
        if len(tile_dims) != len(self.sizes):
            raise ValueError(f"[tap] expected a tile's size in each of {self.sizes}, got {list(tile_dims)}")
        cut = self
        for dim, size in enumerate(tile_dims):
            cut = cut.split(2 * dim, size)
        places = range(len(cut.sizes))
        return cut.permute([*places[::2], *places[1::2]])

    def repeat(self, count: int) -> TensorAccessPattern:
        """The whole walk `count` times."""
        return self._with(self.offset, [count, *self.sizes], [0, *self.strides])

    def pad(self, padding: Sequence[Sequence[int]]) -> TensorAccessPattern:
        """Add (before, after) zeros to each pass of each dimension, outermost first; only memory tiles send them."""
        return TensorAccessPattern(self.tensor_dims, self.offset, self.sizes, self.strides, padding)

    def coalesce(self) -> TensorAccessPattern:
        """The same walk in the fewest dimensions."""
        kept = [(n, s) for n, s in zip(self.sizes, self.strides, strict=True) if n != 1] or [(1, 0)]
        merged = [kept[0]]
        for size, stride in kept[1:]:
            outer_size, outer_stride = merged[-1]
            if outer_stride == size * stride:
                merged[-1] = (outer_size * size, stride)
            else:
                merged.append((size, stride))
        return self._with(self.offset, [n for n, _ in merged], [s for _, s in merged])

    def __getitem__(self, key: int | slice | tuple[int | slice, ...]) -> TensorAccessPattern:
        """Restrict the walk as numpy restricts an array; an integer removes its dimension."""
        keys = key if isinstance(key, tuple) else (key,)
        offset, sizes, strides = self.offset, [], []
        for place, (size, stride) in enumerate(zip(self.sizes, self.strides, strict=True)):
            part = keys[place] if place < len(keys) else slice(None)
            if isinstance(part, int):
                if not -size <= part < size:
                    raise IndexError(f"[tap] index {part} is outside dimension {place} of size {size}")
                offset += part % size * stride
                continue
            start, stop, step = part.indices(size)
            if step < 1 or stop <= start:
                raise ValueError(f"[tap] expected a slice that goes forwards and is not empty, got {part} of {size}")
            offset += start * stride
            sizes.append(len(range(start, stop, step)))
            strides.append(stride * step)
        return self._with(offset, sizes or [1], strides or [0])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorAccessPattern):
            return NotImplemented
        mine = [d for d in self.walk if d.size != 1], self.offset, self.tensor_dims, self.padding
        theirs = [d for d in other.walk if d.size != 1], other.offset, other.tensor_dims, other.padding
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.offset, tuple(d for d in self.walk if d.size != 1), tuple(self.tensor_dims), self.padding))

    def __repr__(self) -> str:
        return (
            f"TensorAccessPattern({self.tensor_dims}, offset={self.offset}, sizes={self.sizes}, strides={self.strides})"
        )

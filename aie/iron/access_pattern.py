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
    ) -> None:
        self.tensor_dims = [int(size) for size in tensor_dims]
        self.offset = int(offset)
        self.sizes = [int(size) for size in sizes]
        self.strides = [int(stride) for stride in strides]
        if len(self.sizes) != len(self.strides):
            raise ValueError(f"[tap] expected as many strides as sizes, got {self.strides} and {self.sizes}")
        if min(self.sizes, default=1) < 1 or min([self.offset, *self.strides]) < 0:
            raise ValueError(f"[tap] expected sizes of 1 or more, strides and offset of 0 or more, got {self}")
        last = self.offset + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        if last >= math.prod(self.tensor_dims):
            raise ValueError(f"[tap] {self} reaches element {last} of a tensor of {math.prod(self.tensor_dims)}")

    @property
    def walk(self) -> tuple[Dimension, ...]:
        """The dimensions, outermost first."""
        return tuple(map(Dimension, self.sizes, self.strides))

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
        sizes, strides = zip(*merged, strict=True)
        return TensorAccessPattern(self.tensor_dims, self.offset, sizes, strides)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorAccessPattern):
            return NotImplemented
        mine = [d for d in self.walk if d.size != 1], self.offset, self.tensor_dims
        theirs = [d for d in other.walk if d.size != 1], other.offset, other.tensor_dims
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.offset, tuple(d for d in self.walk if d.size != 1), tuple(self.tensor_dims)))

    def __repr__(self) -> str:
        return (
            f"TensorAccessPattern({self.tensor_dims}, offset={self.offset}, sizes={self.sizes}, strides={self.strides})"
        )

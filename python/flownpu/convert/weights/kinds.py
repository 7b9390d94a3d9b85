# SPDX-License-Identifier: Apache-2.0
"""The kinds of weights of a decoder's graph, and the tensors of a checkpoint that each is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


@dataclass(frozen=True)
class HeadOrder:
    """The order of a head's d dimensions in which dimension i is rotated with dimension i + d/2.

    Checkpoints rotate the first r of d dimensions, i with i + r/2, and leave the rest. Here the first half of the head
    is the first half of those r and then the first half of the rest, and the second half likewise. If queries and keys
    are both reordered so, their products stay the same.
    """

    size: int
    rotated: int

    def rows(self) -> NDArray[np.int64]:
        """For each row of a head in the graph, its row in the checkpoint, int64 [d]."""
        rotated, rest = np.split(np.arange(self.size), [self.rotated])
        return np.concatenate(
            [part for half in zip(np.split(rotated, 2), np.split(rest, 2), strict=True) for part in half]
        )


@dataclass(frozen=True)
class TensorSource:
    """Rows first..first+rows-1 of a checkpoint's tensor, whose name comes without the prefix in which models differ."""

    tensor: str
    rows: int
    first: int = 0
    stored: int = 0
    """How many rows the tensor has in all; 0: `rows`."""
    order: HeadOrder | None = None
    """The order of each head's rows; None: as they are stored."""

    @property
    def stored_rows(self) -> int:
        """Rows of the whole tensor."""
        return self.stored or self.rows


@dataclass(frozen=True)
class ProjectionWeight:
    """A weight that is stored as Q4NX: the rows of its sources, one source after the other."""

    name: str
    sources: tuple[TensorSource, ...]
    columns: int
    gated: bool = False
    """The sources are a gate and an up projection (for each expert), each padded to whole blocks by itself."""
    by_expert: bool = False
    """The sources of one expert follow those of the one before it, each padded to whole blocks by itself."""

    @property
    def rows(self) -> int:
        """M of Q4NXMatMul: how many values a product with this weight, or with one expert's part of it, yields."""
        one = self.gated or self.by_expert
        return self.sources[0].rows if one else sum(source.rows for source in self.sources)

    def blocks_shape(self, layout: q4nx.Layout) -> tuple[int, int, int]:
        """The shape of the uint8 tensor of blocks: rows of blocks, blocks in a row, bytes of a block."""
        rows = (sum(source.rows for source in run) for run in self.runs)
        shapes = [q4nx.blocks_shape(count, self.columns, layout) for count in rows]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def runs(self) -> tuple[tuple[TensorSource, ...], ...]:
        """The sources in groups; within a group, rows of different sources may share a block."""
        one = self.gated or self.by_expert
        return tuple((source,) for source in self.sources) if one else (self.sources,)

    @property
    def size(self) -> int:
        """How many weights it has, padding not counted."""
        return sum(source.rows for source in self.sources) * self.columns


@dataclass(frozen=True)
class NormWeight:
    """A norm's weight, float32 [size]."""

    name: str
    tensor: str
    size: int
    scale: float = 1.0
    """A factor of the weight, applied after its family's offset was added."""
    order: HeadOrder | None = None
    """The order of each head's values; None: as they are stored."""

    @property
    def sources(self) -> tuple[TensorSource, ...]:
        """The tensor that it is made of."""
        return (TensorSource(self.tensor, self.size, order=self.order),)


@dataclass(frozen=True)
class BiasWeight:
    """A vector that is not a norm's, such as a projection's bias, float32: its sources, one after the other."""

    name: str
    sources: tuple[TensorSource, ...]
    minus_exp: bool = False
    """It is -exp(x) of what the sources have."""
    experts: int = 0
    """The number of experts, or clusters, that it has a row for; 0: it is one row."""

    @property
    def size(self) -> int:
        """How many elements it has: the rows of all sources."""
        return sum(source.rows for source in self.sources)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the graph."""
        return (self.experts, self.size // self.experts) if self.experts else (self.size,)


@dataclass(frozen=True)
class RouterWeight:
    """A router's weight [experts, columns]; stored in bfloat16 if that holds it exactly, else in float32."""

    name: str
    sources: tuple[TensorSource, ...]
    columns: int

    @property
    def rows(self) -> int:
        """The rows of all sources."""
        return sum(source.rows for source in self.sources)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.rows * self.columns


@dataclass(frozen=True)
class FloatWeight(RouterWeight):
    """A matrix in float32: a depthwise convolution's [rows, 1, columns], or a right operand [columns, rows]."""

    is_operand: bool = False

    def arranged(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """The values, [rows, columns], in the graph's shape."""
        return np.ascontiguousarray(values.T) if self.is_operand else values[:, None]


Weight: TypeAlias = ProjectionWeight | NormWeight | BiasWeight | RouterWeight


class BlockPart(NamedTuple):
    """Some rows of blocks of a projection.

    Attributes:
        blocks: uint8 [n, ceil(columns / 32), 640 or 576], in the layout that `WeightSource.layout` gives.
        size: how many weights they hold, padding not counted.
        squared_error: the sum of (w - w')^2 over these weights, where the blocks hold w' for w.
        squares: the sum of w^2.
    """

    blocks: NDArray[np.uint8]
    size: int
    squared_error: float = 0.0
    squares: float = 0.0


class WeightSource(Protocol):
    """A source of the values of a decoder's weights."""

    def layout(self, projection: ProjectionWeight) -> q4nx.Layout:
        """The layout of the projection's blocks: q4nx.NARROW, or q4nx.SYMMETRIC if the weight needs no minima."""

    def blocks(self, projection: ProjectionWeight) -> Iterator[BlockPart]:
        """The projection's blocks, in parts from the first row to the last."""

    def vector(self, weight: NormWeight | BiasWeight) -> NDArray[np.float32]:
        """A norm's weight with offset and scale applied, or a bias, [size]."""

    def matrix(self, weight: RouterWeight) -> NDArray[np.float32]:
        """A weight that is not quantised, as the source has it, [rows, columns]."""

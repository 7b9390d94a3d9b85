# SPDX-License-Identifier: Apache-2.0
"""Describes the weights of an encoder's graph: matrices in a format to choose, and tensors that stay in float32."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

DenseFormat: TypeAlias = Literal["bf16", "int8", "q4nx"]
"""How a matrix [M, K] is stored: bfloat16 [K, M]; int8 [K, M] with float32 scales [M] (`scale_name`); Q4NX blocks."""


@dataclass(frozen=True)
class DenseWeight:
    """A matrix [M, K] that activations are multiplied by: the rows of its sources, one source after the other."""

    name: str
    sources: tuple[str, ...]
    rows: int
    columns: int
    transposed: bool = False
    """There is one source, and it is stored as [K, M]."""

    @property
    def size(self) -> int:
        """How many weights it has."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Table:
    """A tensor that stays in float32 (a bias, a norm, positions, the patches' kernel): its sources, concatenated."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    offset: float = 0.0
    """Added to every value."""


@dataclass(frozen=True)
class WordTable:
    """The table of word embeddings, bfloat16 [rows, columns] whatever the matrices' format: a run reads few rows."""

    name: str
    source: str
    rows: int
    columns: int

    @property
    def sources(self) -> tuple[str, ...]:
        """The tensor that it is made of."""
        return (self.source,)


EncoderWeight: TypeAlias = DenseWeight | Table | WordTable


def scale_name(weight: str) -> str:
    """The name of the scales of an int8 weight."""
    return f"{weight}_scale"


def linear(name: str, modules: tuple[str, ...], rows: int, columns: int) -> Iterator[EncoderWeight]:
    """The matrix [rows, columns] and the bias [rows] of a projection, made of those of the checkpoint's modules."""
    yield DenseWeight(f"{name}.weight", tuple(f"{module}.weight" for module in modules), rows, columns)
    yield Table(f"{name}.bias", tuple(f"{module}.bias" for module in modules), (rows,))


def layer_norm(name: str, module: str, size: int) -> Iterator[EncoderWeight]:
    """The weight and bias [size] of a norm, made of those of the checkpoint's module."""
    for part in ("weight", "bias"):
        yield Table(f"{name}.{part}", (f"{module}.{part}",), (size,))


def table(name: str, shape: tuple[int, ...]) -> Table:
    """A tensor that has the same name in the graph and in the checkpoint."""
    return Table(name, (name,), shape)

# SPDX-License-Identifier: Apache-2.0
"""The weights of an encoder's graph: matrices whose format is chosen, and tensors that stay in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "DenseFormat",
    "DenseWeight",
    "EncoderWeight",
    "Table",
    "WordTable",
    "layer_norm",
    "linear",
    "scale_name",
    "table",
]

DenseFormat: TypeAlias = Literal["bf16", "int8", "q4nx"]
"""bfloat16 [K, M]; int8 [K, M] with a float32 scale a column [M], by the name `scale_name`; Q4NX blocks."""


@dataclass(frozen=True)
class DenseWeight:
    """A matrix that activations are multiplied by: the rows of its sources below one another, [M, K]."""

    name: str
    sources: tuple[str, ...]
    rows: int
    columns: int
    transposed: bool = False
    """The one source is [K, M]."""

    @property
    def size(self) -> int:
        """Weights."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Table:
    """A tensor that stays float32: a bias, a norm, positions, the patches' kernel. Its sources follow one another."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    offset: float = 0.0
    """Added to every value."""


@dataclass(frozen=True)
class WordTable:
    """The table of the words' embeddings, bfloat16 [rows, columns], whatever the matrices are: few rows are read."""

    name: str
    source: str
    rows: int
    columns: int

    @property
    def sources(self) -> tuple[str, ...]:
        """The tensor."""
        return (self.source,)


EncoderWeight: TypeAlias = DenseWeight | Table | WordTable


def scale_name(weight: str) -> str:
    """The name of an int8 weight's scales."""
    return f"{weight}_scale"


def linear(name: str, modules: tuple[str, ...], rows: int, columns: int) -> Iterator[EncoderWeight]:
    """The matrix [rows, columns] and the bias of one projection, made of those of the checkpoint's modules."""
    yield DenseWeight(f"{name}.weight", tuple(f"{module}.weight" for module in modules), rows, columns)
    yield Table(f"{name}.bias", tuple(f"{module}.bias" for module in modules), (rows,))


def layer_norm(name: str, module: str, size: int) -> Iterator[EncoderWeight]:
    """A norm's weight and bias, of the checkpoint's module."""
    for part in ("weight", "bias"):
        yield Table(f"{name}.{part}", (f"{module}.{part}",), (size,))


def table(name: str, shape: tuple[int, ...]) -> Table:
    """A tensor by the checkpoint's name."""
    return Table(name, (name,), shape)

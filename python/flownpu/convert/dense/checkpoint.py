# SPDX-License-Identifier: Apache-2.0
"""Reads an encoder's weights from its checkpoint: each tensor as a whole (20 MB at most), except tables of words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flownpu.convert.dense.weights import DenseWeight, WordTable
from flownpu.convert.errors import ConversionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.dense.weights import EncoderWeight, Table


class EncoderCheckpoint:
    """Reads the values of a plan of weights."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Takes the checkpoint, which may hold other tensors than the encoder's."""
        self._checkpoint = checkpoint

    def locate(self, tensor: str) -> str:
        """A tensor's name in this checkpoint."""
        return tensor

    def check(self, plan: Sequence[EncoderWeight]) -> None:
        """Raises ConversionError unless every tensor that the plan needs exists and has its shape."""
        for weight in plan:
            for source in weight.sources:
                self._checkpoint.check_shape(self.locate(source), _shape(weight))

    def matrix(self, weight: DenseWeight) -> NDArray[np.float32]:
        """A product's weight, float32 [M, K].

        Raises:
            ConversionError: a tensor has another type, or a value that is not finite.
        """
        return np.concatenate([self._read(weight, source) for source in weight.sources])

    def table(self, weight: Table) -> NDArray[np.float32]:
        """A tensor that stays in float32, with its offset added.

        Raises:
            ConversionError: a tensor has another type, or a value that is not finite.
        """
        values = np.concatenate([self._read(weight, source) for source in weight.sources])
        return values + np.float32(weight.offset)

    def words(self, weight: WordTable, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start..stop-1 of a table of words, float32 [rows, columns].

        Raises:
            ConversionError: the tensor has another type, or a value that is not finite.
        """
        return self._rows(self.locate(weight.source), start, stop)

    def _read(self, weight: EncoderWeight, source: str) -> NDArray[np.float32]:
        values = self._rows(self.locate(source), 0, _shape(weight)[0])
        return values.T if isinstance(weight, DenseWeight) and weight.transposed else values

    def _rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self._checkpoint.rows(name, start, stop).astype(np.float32)
        if not np.isfinite(values).all():
            raise ConversionError(f"{self._checkpoint.folder}: tensor {name} has a value that is not finite")
        return values


def _shape(weight: EncoderWeight) -> tuple[int, ...]:
    """The shape that each of a weight's sources has."""
    if isinstance(weight, WordTable):
        return (weight.rows, weight.columns)
    if isinstance(weight, DenseWeight):
        rows = weight.rows // len(weight.sources)
        return (weight.columns, rows) if weight.transposed else (rows, weight.columns)
    first, *others = weight.shape
    return (first // len(weight.sources), *others)

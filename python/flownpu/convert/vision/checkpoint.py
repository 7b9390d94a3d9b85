# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint's vision tower, whole: the largest takes 20 MB of Gemma3's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flownpu.convert.errors import ConversionError
from flownpu.convert.vision.weights import DenseWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.vision.weights import Table, VisionWeight

__all__ = ["VisionCheckpoint"]

_TOWER = "vision_tower."
# A tensor that every tower has, and where versions of transformers put it.
_KNOWN = "embeddings.patch_embedding.weight"
_PREFIXES = ("", "model.")
_INNER = ("", "vision_model.")


class VisionCheckpoint:
    """Reads the values of `vision_weight_plan`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Finds the tensors' common prefix.

        Raises:
            ConversionError: the checkpoint has no vision tower.
        """
        self._checkpoint = checkpoint
        names = set(checkpoint.names())
        places = [(prefix, inner) for prefix in _PREFIXES for inner in _INNER]
        found = [place for place in places if f"{place[0]}{_TOWER}{place[1]}{_KNOWN}" in names]
        if not found:
            raise ConversionError(
                f"{checkpoint.folder}: config.json has a vision_config, and tensor {_TOWER}{_KNOWN} is missing from "
                "the weight files; --vision-weights none converts the text decoder alone"
            )
        self._prefix, self._inner = found[0]

    def check(self, plan: Sequence[VisionWeight]) -> None:
        """Raises ConversionError unless every tensor that is needed is there and has its shape."""
        for weight in plan:
            for source in weight.sources:
                self._checkpoint.check_shape(self._locate(source), _shape(weight))

    def matrix(self, weight: DenseWeight) -> NDArray[np.float32]:
        """A product's weight, [M, K].

        Raises:
            ConversionError: a tensor has another type, or a value that is not finite.
        """
        return np.concatenate([self._read(weight, source) for source in weight.sources])

    def table(self, weight: Table) -> NDArray[np.float32]:
        """A tensor that stays float32, with its offset added.

        Raises:
            ConversionError: a tensor has another type, or a value that is not finite.
        """
        values = np.concatenate([self._read(weight, source) for source in weight.sources])
        return values + np.float32(weight.offset)

    def _read(self, weight: VisionWeight, source: str) -> NDArray[np.float32]:
        name, shape = self._locate(source), _shape(weight)
        values = self._checkpoint.rows(name, 0, shape[0]).astype(np.float32)
        if not np.isfinite(values).all():
            raise ConversionError(f"{self._checkpoint.folder}: tensor {name} has a value that is not finite")
        return values.T if isinstance(weight, DenseWeight) and weight.transposed else values

    def _locate(self, tensor: str) -> str:
        inner = tensor.removeprefix(_TOWER)
        return self._prefix + (tensor if inner == tensor else f"{_TOWER}{self._inner}{inner}")


def _shape(weight: VisionWeight) -> tuple[int, ...]:
    """That of each of a weight's sources."""
    if isinstance(weight, DenseWeight):
        rows = weight.rows // len(weight.sources)
        return (weight.columns, rows) if weight.transposed else (rows, weight.columns)
    first, *others = weight.shape
    return (first // len(weight.sources), *others)

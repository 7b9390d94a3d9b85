# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors of a vision tower in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.convert.dense.checkpoint import EncoderCheckpoint
from flownpu.convert.errors import ConversionError

if TYPE_CHECKING:
    from flownpu.convert.checkpoint import Checkpoint

_TOWER = "vision_tower."
# A tensor that every tower has, and the prefixes before and after `_TOWER` in different versions of transformers.
_KNOWN = "embeddings.patch_embedding.weight"
_PREFIXES = ("", "model.")
_INNER = ("", "vision_model.")


class VisionCheckpoint(EncoderCheckpoint):
    """Reads the values of `vision_weight_plan`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Finds the tensors' common prefix.

        Raises:
            ConversionError: the checkpoint has no vision tower.
        """
        super().__init__(checkpoint)
        names = set(checkpoint.names())
        places = [(prefix, inner) for prefix in _PREFIXES for inner in _INNER]
        found = [place for place in places if f"{place[0]}{_TOWER}{place[1]}{_KNOWN}" in names]
        if not found:
            raise ConversionError(
                f"{checkpoint.folder}: config.json has a vision_config, and tensor {_TOWER}{_KNOWN} is missing from "
                "the weight files; --vision-weights none converts the text decoder alone"
            )
        self._prefix, self._inner = found[0]

    def locate(self, tensor: str) -> str:
        """A tensor's name in this checkpoint."""
        inner = tensor.removeprefix(_TOWER)
        return self._prefix + (tensor if inner == tensor else f"{_TOWER}{self._inner}{inner}")

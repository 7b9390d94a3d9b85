# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors of a text encoder in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.convert.dense.checkpoint import EncoderCheckpoint
from flownpu.convert.encoder.families import ENCODERS
from flownpu.convert.encoder.weights import WORDS
from flownpu.convert.errors import ConversionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.dense.weights import EncoderWeight


class TextEncoderCheckpoint(EncoderCheckpoint):
    """Reads the values of `encoder_weight_plan`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Finds the tensors' common prefix, which they have in a model that was saved with a head."""
        super().__init__(checkpoint)
        prefix = ENCODERS[checkpoint.config["model_type"]].prefix
        self._prefix = prefix if f"{prefix}{WORDS}" in checkpoint.names() else ""

    def locate(self, tensor: str) -> str:
        """A tensor's name in this checkpoint; a classifier's has no prefix."""
        return tensor if tensor.startswith("classifier") else self._prefix + tensor

    def check_places(self, plan: Sequence[EncoderWeight]) -> None:
        """Raises ConversionError if layers or embeddings have tensors that the plan has no place for."""
        known = {self.locate(source) for weight in plan for source in weight.sources}
        parts = (f"{self._prefix}encoder.", f"{self._prefix}embeddings.")
        unknown = [
            name
            for name in sorted(self._checkpoint.names())
            if name.startswith(parts) and name not in known and not name.endswith("position_ids")
        ]
        if unknown:
            shown = ", ".join(unknown[:3]) + (" ..." if len(unknown) > 3 else "")
            raise ConversionError(
                f"{self._checkpoint.folder}: {len(unknown)} tensors have no place in a model of this family as FlowNPU "
                f"knows it ({shown}); such models cannot be converted"
            )

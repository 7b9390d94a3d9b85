# SPDX-License-Identifier: Apache-2.0
"""The weights of a checkpoint that is not quantised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flownpu.convert.errors import ConversionError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.quantise import Carried
    from flownpu.convert.weights import Weight

__all__ = ["CheckpointWeights"]

# What comes before "embed_tokens.weight" in the checkpoints of the families: a text model, a model with a vision tower
# as transformers 4 saved it, and as transformers 5 does; a text model without an LM head, as models that embed are.
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
# Frequencies of RoPE, which transformers 4 once saved with each layer, and which config.json says.
_TOLD_TWICE = "rotary_emb.inv_freq"


class CheckpointWeights:
    """Rows of a checkpoint's tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Finds the tensors' common prefix.

        Raises:
            ConversionError: there is no embedding under any of the names that are known.
        """
        self.checkpoint = checkpoint
        names = set(checkpoint.names())
        found = [prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in names]
        if not found:
            raise ConversionError(
                f"{checkpoint.folder}: tensor model.embed_tokens.weight is missing from the weight files"
            )
        self._prefix = found[0]

    @property
    def source(self) -> Path:
        """The checkpoint's folder."""
        return self.checkpoint.folder

    def check_places(self, plan: Sequence[Weight]) -> None:
        """Raises ConversionError if the layers have tensors that the plan has no place for, such as a bias.

        A model that was converted without them would compute something else.
        """
        known = {self.locate(source.tensor) for weight in plan for source in weight.sources}
        unknown = [
            name
            for name in sorted(self.checkpoint.names())
            if name.startswith(f"{self._prefix}layers.")
            and not name.endswith(_TOLD_TWICE)
            and self._whole(name) not in known
        ]
        if unknown:
            shown = ", ".join(unknown[:3]) + (" ..." if len(unknown) > 3 else "")
            raise ConversionError(
                f"{self.checkpoint.folder}: {len(unknown)} tensors have no place in a model of this family as FlowNPU "
                f"knows it ({shown}); such models cannot be converted"
            )

    def check(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises ConversionError unless the tensor is there and has that shape."""
        self.checkpoint.check_shape(self.locate(tensor), shape)

    def is_symmetric(self, tensor: str) -> bool:  # noqa: ARG002  (as of any tensors)
        """No: floats are quantised, to a minimum of their own."""
        return False

    def rows(self, tensor: str, first: int, stop: int) -> NDArray[np.float32] | Carried:
        """Rows first..stop-1 of a weight.

        Raises:
            ConversionError: the tensor is missing or has another type.
        """
        return self.checkpoint.rows(self.locate(tensor), first, stop).astype(np.float32)

    def vector(self, tensor: str, size: int) -> NDArray[np.float32]:
        """A whole one-dimensional tensor.

        Raises:
            ConversionError: the tensor is missing, has another shape, or a value that is not finite.
        """
        return self.checkpoint.vector(self.locate(tensor), size)

    def _whole(self, name: str) -> str:
        """The tensor that one of the checkpoint's is, or is a part of."""
        return name

    def locate(self, tensor: str) -> str:
        """A tensor's name in this checkpoint. The LM head is not a part of the inner model."""
        if not tensor.startswith("lm_head"):
            return self._prefix + tensor
        return self._prefix.removesuffix("model.") + tensor if self._prefix.startswith("language_model") else tensor

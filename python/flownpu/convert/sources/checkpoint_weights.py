# SPDX-License-Identifier: Apache-2.0
"""The weights of a checkpoint that is not quantised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flownpu.convert.errors import ConversionError, refuse_unplaced
from flownpu.convert.quantise import Stored
from flownpu.convert.weights import DRAFTER

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.quantise import Carried
    from flownpu.convert.weights import Weight

# The prefixes of "embed_tokens.weight" in checkpoints: of a text model, of a model with a vision tower as saved by
# transformers 4 and by transformers 5, and of a text model without an LM head, such as a model that embeds texts.
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
# RoPE's frequencies, which older versions of transformers saved with each layer: config.json defines them already.
_DERIVED = "rotary_emb.inv_freq"


class CheckpointWeights:
    """A checkpoint's tensors by row: `quantise.Tensors`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Finds the tensors' common prefix.

        Raises:
            ConversionError: there is no embedding with any of the known prefixes.
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

    def check_places(self, plan: Sequence[Weight], unused: tuple[str, ...] = ()) -> None:
        """Raises ConversionError if the layers have tensors that the plan has no place for, such as a bias.

        `unused`: the beginnings of names of tensors that need none.
        """
        known = {self.locate(source.tensor) for weight in plan for source in weight.sources}
        unknown = [
            name
            for name in sorted(self.checkpoint.names())
            if name.startswith(f"{self._prefix}layers.")
            and not name.endswith(_DERIVED)
            and not name.removeprefix(self._prefix).startswith(unused)
            and self._whole(name) not in known
        ]
        refuse_unplaced(self.checkpoint.folder, unknown)

    def check(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises ConversionError unless the tensor exists and has that shape."""
        self.checkpoint.check_shape(self.locate(tensor), shape)

    def stored(self, tensor: str) -> Stored:  # noqa: ARG002  (Tensors' parameter)
        """How a weight is stored: as floats."""
        return Stored("float", again="quantised")

    def rows(self, tensor: str, first: int, stop: int) -> NDArray[np.float32] | Carried:
        """Rows first..stop-1 of a weight.

        Raises:
            ConversionError: the tensor is missing or has another type.
        """
        return self.checkpoint.rows(self.locate(tensor), first, stop).astype(np.float32)

    def vector(self, tensor: str, size: int) -> NDArray[np.float32]:
        """A whole one-dimensional tensor, whose integers, if it has such, float32 holds exactly.

        Raises:
            ConversionError: the tensor is missing, has another shape, or a value that is not finite.
        """
        located = self.locate(tensor)
        dtype = self.checkpoint.dtype(located)
        if dtype is not None and np.issubdtype(dtype, np.integer):
            return self.checkpoint.integers(located).astype(np.float32)
        return self.checkpoint.vector(located, size)

    def _whole(self, name: str) -> str:
        """The weight that the checkpoint's tensor `name` belongs to; a packed weight consists of several tensors."""
        return name

    def locate(self, tensor: str) -> str:
        """A tensor's name in this checkpoint. LM head and multi-token prediction are not parts of the inner model."""
        if tensor.startswith("mtp."):
            return tensor
        if tensor.startswith(DRAFTER):
            return tensor.removeprefix(DRAFTER)
        if not tensor.startswith("lm_head"):
            return self._prefix + tensor
        return self._prefix.removesuffix("model.") + tensor if self._prefix.startswith("language_model") else tensor

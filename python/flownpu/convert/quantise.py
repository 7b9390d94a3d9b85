# SPDX-License-Identifier: Apache-2.0
"""Quantises a checkpoint's weights to Q4NX, straight from its floats.

A projection is read, quantised and handed on a few hundred rows at a time: no weight is ever whole in memory.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from flownpu.convert.errors import ConversionError
from flownpu.convert.weights import BlockPart, Projection
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.decoder import Decoder
    from flownpu.convert.weights import NormWeight, TensorSource

__all__ = ["CheckpointWeights"]

# Weights that are quantised in one go: 2^20 take 4 MB in float32 and some tens of milliseconds, so that threads find
# work, Ctrl-C is heard soon, and a row of 16384 columns still comes in blocks of 32.
_WEIGHTS_AT_ONCE = 1 << 20

# What comes before "embed_tokens.weight" in the checkpoints of the families: a text model, a model with a vision tower
# as transformers 4 saved it, and as transformers 5 does.
_PREFIXES = ("model.", "language_model.model.", "model.language_model.")


class CheckpointWeights:
    """The weights of `decoder`, quantised from a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, decoder: Decoder) -> None:
        """Finds the tensors' common prefix.

        Raises:
            ConversionError: there is no embedding under any of the names that are known.
        """
        self._checkpoint = checkpoint
        self._offset = np.float32(decoder.norm_offset)
        names = set(checkpoint.names())
        found = [prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in names]
        if not found:
            raise ConversionError(
                f"{checkpoint.folder}: tensor model.embed_tokens.weight is missing from the weight files"
            )
        self._prefix = found[0]

    def check(self, plan: Sequence[Projection | NormWeight]) -> None:
        """Raises ConversionError unless every tensor that is needed is there and has its shape."""
        for weight in plan:
            if isinstance(weight, Projection):
                for source in weight.sources:
                    self._checkpoint.check_shape(self._locate(source.tensor), (source.rows, weight.columns))
            else:
                self._checkpoint.check_shape(self._locate(weight.tensor), (weight.size,))

    def norm(self, weight: NormWeight) -> NDArray[np.float32]:
        """The norm's weight with the family's offset added, float32 [size].

        Raises:
            ConversionError: the tensor is missing, has another shape, or a value that is not finite.
        """
        return self._offset + self._checkpoint.vector(self._locate(weight.tensor), weight.size)

    def blocks(self, projection: Projection) -> Iterator[BlockPart]:
        """Quantises a projection on all cores.

        Raises:
            ConversionError: a tensor is missing, has another type, or a value that cannot be quantised.
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(cores) as pool:
            pending: deque[Future[BlockPart]] = deque()
            try:
                for rows in self._row_parts(projection):
                    pending.append(pool.submit(_quantise, rows, projection.name))
                    if len(pending) > cores:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    def _row_parts(self, projection: Projection) -> Iterator[NDArray[np.float32]]:
        """The rows of a projection, in parts that fill whole rows of blocks (but for the last of a run)."""
        at_once = max(1, _WEIGHTS_AT_ONCE // (projection.columns * q4nx.BLOCK_ROWS)) * q4nx.BLOCK_ROWS
        for run in projection.runs:
            total = sum(source.rows for source in run)
            for first in range(0, total, at_once):
                yield np.concatenate(list(self._pieces(run, first, first + at_once)))

    def _pieces(self, run: Sequence[TensorSource], first: int, stop: int) -> Iterator[NDArray[np.float32]]:
        """Rows first..stop-1 of the sources below one another."""
        start = 0
        for source in run:
            low, high = max(first - start, 0), min(stop - start, source.rows)
            if low < high:
                yield self._checkpoint.rows(self._locate(source.tensor), low, high).astype(np.float32)
            start += source.rows

    def _locate(self, tensor: str) -> str:
        """A tensor's name in this checkpoint. The LM head is not a part of the inner model."""
        if not tensor.startswith("lm_head"):
            return self._prefix + tensor
        return self._prefix.removesuffix("model.") + tensor if self._prefix.startswith("language_model") else tensor


def _quantise(rows: NDArray[np.float32], name: str) -> BlockPart:
    try:
        quantized = q4nx.quantize(rows)
    except ValueError as error:
        raise ConversionError(f"{name}: {error}") from error
    difference = q4nx.dequantize_codes(quantized) - rows
    return BlockPart(q4nx.pack(*quantized), rows.size, _squares(difference), _squares(rows))


def _squares(values: NDArray[np.float32]) -> float:
    return float(np.einsum("ij,ij->", values, values, dtype=np.float64))

# SPDX-License-Identifier: Apache-2.0
"""Reads the weights of checkpoints that compressed-tensors (vLLM's llm-compressor) wrote, and of FP8 checkpoints.

    pack-quantized  weight_packed int32 [M, K / 8]      eight columns of W in a word, in their order
                    weight_zero_point int32 [M / 8, K / group], eight rows, in their order; none: all are 8
                    weight_scale [M, K / group]
                    weight_g_idx int32 [K], the group of each column
                    weight_shape int64 [2]
    float-quantized, and FP8             weight float8_e4m3fn [M, K]
                    weight_scale [1], [M, 1] or [M / block rows, K / block columns]; in the form that DeepSeek and Qwen
                    publish (quant_method "fp8") weight_scale_inv

What activations were rounded to is left out, because FlowNPU chooses that itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flownpu.convert.checkpoint import FLOAT8
from flownpu.convert.quantise import Stored
from flownpu.convert.sources.checkpoint_weights import CheckpointWeights
from flownpu.convert.sources.prequantised import IN_A_WORD, SYMMETRIC_ZERO, Grouped, PrequantisedWeights, unpack
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.sources.packing import Packing

# Scales that activations are rounded with.
_ACTIVATIONS = ("input_scale", "output_scale")


class CompressedWeights(PrequantisedWeights):
    """The tensors of a checkpoint in the format pack-quantized."""

    parts = ("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx", "weight_shape")

    def check_parts(self, tensor: str, rows: int, columns: int, groups: int) -> None:
        """Raises ConversionError unless codes, zero points and scales exist, with the shapes that they should have."""
        self.checkpoint.check_shape(self.part(tensor, "weight_packed"), (rows, columns // IN_A_WORD))
        self.checkpoint.check_shape(self.part(tensor, "weight_scale"), (rows, groups))
        if not self.packing.symmetric:
            self.checkpoint.check_shape(self.part(tensor, "weight_zero_point"), (rows // IN_A_WORD, groups))

    def grouped(self, tensor: str, first: int, stop: int) -> Grouped:
        """Rows first..stop-1 of a packed weight; raises as `rows`."""
        rows = slice(first, stop)
        codes = unpack(self.words(self.part(tensor, "weight_packed"), rows)).reshape(stop - first, -1)
        scales = self.checkpoint.rows(self.part(tensor, "weight_scale"), first, stop).astype(np.float32)
        words = self.zero_words(tensor, stop)
        if words is None:
            return Grouped(codes, scales, np.full_like(scales, SYMMETRIC_ZERO))
        zeros = unpack(words.T).reshape(scales.shape[1], -1).T[rows]
        return Grouped(codes, scales, zeros.astype(np.float32))

    def zero_words(self, tensor: str, rows: int) -> NDArray[np.uint32] | None:  # noqa: ARG002  (all rows are in it)
        """All stored zero points, eight in a word; None: they are all 8."""
        return None if self.packing.symmetric else self.words(self.part(tensor, "weight_zero_point"))


class Float8Weights(CheckpointWeights):
    """The tensors of a checkpoint whose projections are floats of 8 bits."""

    def __init__(self, checkpoint: Checkpoint, packing: Packing) -> None:
        """Finds the tensors' common prefix; raises as CheckpointWeights."""
        super().__init__(checkpoint)
        self._packing = packing

    def check(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises ConversionError unless the tensor, and its scales if it is of float8, exist and have their shapes."""
        super().check(tensor, shape)
        if self._is_float8(tensor):
            rows, columns = shape
            expected = [(1,), (), (rows, 1)]
            if self._packing.block is not None:
                height, width = self._packing.block
                expected = [(-(-rows // height), -(-columns // width))]
            scale = self._scale(tensor)
            if self.checkpoint.shape(scale) not in expected:
                self.checkpoint.check_shape(scale, expected[-1])

    def rows(self, tensor: str, first: int, stop: int) -> NDArray[np.float32]:
        """Rows first..stop-1 of a weight; raises as CheckpointWeights."""
        if not self._is_float8(tensor):
            return self.checkpoint.rows(self.locate(tensor), first, stop).astype(np.float32)
        values: NDArray[np.float32] = self.checkpoint.part(self.locate(tensor), slice(first, stop)).astype(np.float32)
        scales = self.checkpoint.part(self._scale(tensor)).astype(np.float32)
        if self._packing.block is not None:
            height, width = self._packing.block
            scales = np.repeat(scales[np.arange(first, stop) // height], width, axis=1)[:, : values.shape[1]]
        elif scales.ndim == 2:
            scales = scales[first:stop]
        return values * scales

    def stored(self, tensor: str) -> Stored:
        """How a weight is stored; `check` must have been called for it."""
        if not self._is_float8(tensor):
            return super().stored(tensor)
        return Stored("fp8", q4nx.EIGHT_BITS, again="quantised")

    def _whole(self, name: str) -> str:
        module, _, part = name.rpartition(".")
        return f"{module}.weight" if part in (self._packing.scale, *_ACTIVATIONS) else name

    def _is_float8(self, tensor: str) -> bool:
        return bool(self.checkpoint.dtype(self.locate(tensor)) == FLOAT8)

    def _scale(self, tensor: str) -> str:
        return self.locate(tensor).removesuffix("weight") + self._packing.scale

# SPDX-License-Identifier: Apache-2.0
"""Reads the weights of checkpoints that compressed-tensors (vLLM's llm-compressor) wrote, and of FP8 checkpoints.

    pack-quantized  weight_packed int32 [M, K / 8]      eight columns of W in a word (of 8 bits: four), in their order
                    weight_zero_point int32 [M / 8, K / group], eight rows, in their order; none: all are 8
                    weight_scale [M, K / group]
                    weight_g_idx int32 [K], the group of each column
                    weight_shape int64 [2]
    int-quantized   weight int8 [M, K], weight_zero_point int8 [M, K / group]; the other parts as above
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
from flownpu.convert.sources.packing import unpack
from flownpu.convert.sources.prequantised import PrequantisedWeights
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.sources.packing import Packing

# Scales that activations are rounded with.
_ACTIVATIONS = ("input_scale", "output_scale")


class CompressedWeights(PrequantisedWeights):
    """The tensors of a checkpoint in the formats pack-quantized and int-quantized."""

    parts = ("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx", "weight_shape", *_ACTIVATIONS)

    def check_parts(self, tensor: str, rows: int, columns: int, groups: int) -> None:
        """Raises ConversionError unless codes, zero points and scales exist, with the shapes that they should have."""
        words = 1 if self._is_bytes else self.packing.in_a_word
        self.checkpoint.check_shape(self.part(tensor, self._first_part), (rows, columns // words))
        self.checkpoint.check_shape(self.part(tensor, "weight_scale"), (rows, groups))
        if not self.packing.symmetric:
            self.checkpoint.check_shape(self.part(tensor, "weight_zero_point"), (rows // words, groups))

    def codes(self, tensor: str, first: int, stop: int) -> NDArray[np.uint8]:
        """The codes of rows first..stop-1 of a packed weight, uint8 [stop - first, columns]; raises as `rows`."""
        name, rows = self.part(tensor, self._first_part), slice(first, stop)
        if self._is_bytes:
            return _unsigned(self.checkpoint.part(name, rows))
        return unpack(self.words(name, rows), self.packing.bits).reshape(stop - first, -1)

    def scales(self, tensor: str, first: int, stop: int) -> NDArray[np.float32]:
        """The scales of rows first..stop-1 of a packed weight, float32 [stop - first, groups]; raises as `rows`."""
        return self.checkpoint.rows(self.part(tensor, "weight_scale"), first, stop).astype(np.float32)

    def zeros(self, tensor: str, rows: int) -> NDArray[np.float32] | None:  # noqa: ARG002  (all rows are read)
        """The zero points of all rows, float32 [rows, groups]; None: in the middle of the codes. Raises as `rows`."""
        if self.packing.symmetric:
            return None
        name = self.part(tensor, "weight_zero_point")
        if self._is_bytes:
            return _unsigned(self.checkpoint.part(name)).astype(np.float32)
        words = self.words(name)
        return unpack(words.T, self.packing.bits).reshape(words.shape[1], -1).T.astype(np.float32)

    @property
    def _is_bytes(self) -> bool:
        return self.packing.method == "int8"

    @property
    def _first_part(self) -> str:
        return "weight" if self._is_bytes else self.parts[0]

    def _whole(self, name: str) -> str:
        module, _, part = name.rpartition(".")
        return f"{module}.weight" if part in self.parts else name

    def _is_packed(self, tensor: str) -> bool:
        name = self.part(tensor, self._first_part)
        return name in self.names and (not self._is_bytes or self.checkpoint.dtype(name) == np.int8)


def _unsigned(values: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Values from -128 on, counted from 0 on."""
    return values.view(np.uint8) ^ np.uint8(128)


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

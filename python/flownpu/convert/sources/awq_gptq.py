# SPDX-License-Identifier: Apache-2.0
"""Reads the weights of AWQ and GPTQ checkpoints.

Both formats store a weight W[M, K] transposed:

    AWQ ("gemm")    qweight int32 [K, M / 8]      eight rows of W in a word, in the order 0 2 4 6 1 3 5 7
                    qzeros  int32 [K / group, M / 8], the same
    GPTQ            qweight int32 [K / 8, M]      eight columns of W in a word, in their order
                    qzeros  int32 [K / group, M / 8], eight rows, in their order; the zero point less 1, except in the
                            format "gptq_v2"
                    g_idx   int32 [K], the group of each column
    both            scales  float16 [K / group, M]

GPTQ has 8 bits as well: a word holds four values instead of eight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flownpu.convert.errors import ConversionError
from flownpu.convert.sources.packing import unpack
from flownpu.convert.sources.prequantised import PrequantisedWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from flownpu.convert.weights import Weight

# The order of the values in a word, for `unpack`.
_ORDER = {"awq": (0, 2, 4, 6, 1, 3, 5, 7), "gptq": None}

_ALL = slice(None)


class AwqGptqWeights(PrequantisedWeights):
    """The tensors of an AWQ or GPTQ checkpoint."""

    parts = ("qweight", "qzeros", "scales", "g_idx", "bias")

    def check_parts(self, tensor: str, rows: int, columns: int, groups: int) -> None:
        """Raises ConversionError unless qweight, qzeros and scales exist, with the shapes that they should have."""
        words = self.packing.in_a_word
        packed = (columns, rows // words) if self._is_awq else (columns // words, rows)
        self.checkpoint.check_shape(self.part(tensor, "qweight"), packed)
        self.checkpoint.check_shape(self.part(tensor, "qzeros"), (groups, rows // words))
        self.checkpoint.check_shape(self.part(tensor, "scales"), (groups, rows))

    def check_places(self, plan: Sequence[Weight], unused: tuple[str, ...] = ()) -> None:
        """Raises ConversionError if the layers have tensors that the plan has no place for, except biases of zeros.

        GPTQ's tools write such a bias with every weight.
        """
        super().check_places(plan, unused)
        known = {self.locate(source.tensor) for weight in plan for source in weight.sources}
        for name in sorted(self.names - known):
            if name.endswith(".bias") and f"{name.removesuffix('bias')}qweight" in self.names:
                (rows,) = self.checkpoint.shape(name)
                if self.checkpoint.vector(name, rows).any():
                    raise ConversionError(
                        f"{self.checkpoint.folder}: {name} is not zero, and projections of this family have no bias; "
                        "such models cannot be converted"
                    )

    def codes(self, tensor: str, first: int, stop: int) -> NDArray[np.uint8]:
        """The codes of rows first..stop-1 of a packed weight, uint8 [stop - first, columns]; raises as `rows`."""
        name, words = self.part(tensor, "qweight"), self.packing.in_a_word
        if self._is_awq:
            low = first // words * words
            return self._unpacked_rows(name, low, -(-stop // words) * words)[first - low : stop - low]
        return unpack(self.words(name, _ALL, slice(first, stop)).T, self.packing.bits).reshape(stop - first, -1)

    def scales(self, tensor: str, first: int, stop: int) -> NDArray[np.float32]:
        """The scales of rows first..stop-1 of a packed weight, float32 [stop - first, groups]; raises as `rows`."""
        return self.checkpoint.part(self.part(tensor, "scales"), _ALL, slice(first, stop)).T.astype(np.float32)

    def zeros(self, tensor: str, rows: int) -> NDArray[np.float32]:
        """The zero points of all rows, float32 [rows, groups]; raises as `rows`."""
        name, words = self.part(tensor, "qzeros"), self.packing.in_a_word
        stored, last = self._unpacked_rows(name, 0, -(-rows // words) * words), (1 << self.packing.bits) - 1
        if self.packing.zero_offset and (stored == last).any():
            raise ConversionError(
                f"{self.checkpoint.folder}: {name} has a stored zero point of {last}, which some readers of "
                f"checkpoint_format gptq take for 0 and some for {last + 1}; save the checkpoint as gptq_v2"
            )
        return stored.astype(np.float32) + np.float32(self.packing.zero_offset)

    @property
    def _is_awq(self) -> bool:
        return self.packing.method == "awq"

    def _unpacked_rows(self, name: str, first: int, stop: int) -> NDArray[np.uint8]:
        """Rows first..stop-1 of a tensor, unpacked from words [n, rows / 8] to uint8 [rows, n]."""
        each = self.packing.in_a_word
        words = self.words(name, _ALL, slice(first // each, stop // each))
        return unpack(words, self.packing.bits, _ORDER[self.packing.method]).reshape(len(words), -1).T

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
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flownpu.convert.errors import ConversionError
from flownpu.convert.sources.prequantised import IN_A_WORD, Grouped, PrequantisedWeights, unpack
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from flownpu.convert.weights import Weight

# The indices of eight values in the order of their bits in a word, from the lowest four on.
_ORDER = {"awq": (0, 2, 4, 6, 1, 3, 5, 7), "gptq": tuple(range(IN_A_WORD))}

_ALL = slice(None)


class AwqGptqWeights(PrequantisedWeights):
    """The tensors of an AWQ or GPTQ checkpoint."""

    parts = ("qweight", "qzeros", "scales", "g_idx", "bias")

    def check_parts(self, tensor: str, rows: int, columns: int, groups: int) -> None:
        """Raises ConversionError unless qweight, qzeros and scales exist, with the shapes that they should have."""
        packed = (columns, rows // IN_A_WORD) if self._is_awq else (columns // IN_A_WORD, rows)
        self.checkpoint.check_shape(self.part(tensor, "qweight"), packed)
        self.checkpoint.check_shape(self.part(tensor, "qzeros"), (groups, rows // IN_A_WORD))
        self.checkpoint.check_shape(self.part(tensor, "scales"), (groups, rows))

    def check_places(self, plan: Sequence[Weight]) -> None:
        """Raises ConversionError if the layers have tensors that the plan has no place for, except biases of zeros.

        GPTQ's tools write such a bias with every weight.
        """
        super().check_places(plan)
        known = {self.locate(source.tensor) for weight in plan for source in weight.sources}
        for name in sorted(self.names - known):
            if name.endswith(".bias") and f"{name.removesuffix('bias')}qweight" in self.names:
                (rows,) = self.checkpoint.shape(name)
                if self.checkpoint.vector(name, rows).any():
                    raise ConversionError(
                        f"{self.checkpoint.folder}: {name} is not zero, and projections of this family have no bias; "
                        "such models cannot be converted"
                    )

    def grouped(self, tensor: str, first: int, stop: int) -> Grouped:
        """Rows first..stop-1 of a packed weight; raises as `rows`."""
        low, high = first // IN_A_WORD * IN_A_WORD, -(-stop // IN_A_WORD) * IN_A_WORD
        wanted = slice(first - low, stop - low)
        codes = self._codes(tensor, low, high)[wanted]
        zeros = self._zeros(tensor, low, high)[wanted]
        scales = self.checkpoint.part(self.part(tensor, "scales"), _ALL, slice(first, stop)).T.astype(np.float32)
        return Grouped(codes, scales, zeros)

    def zero_words(self, tensor: str, rows: int) -> NDArray[np.uint32]:
        """All stored zero points, eight in a word."""
        return self.words(self.part(tensor, "qzeros"), _ALL, slice(rows // IN_A_WORD))

    @property
    def _is_awq(self) -> bool:
        return self.packing.method == "awq"

    def _codes(self, tensor: str, first: int, stop: int) -> NDArray[np.uint8]:
        """The codes of some rows of a weight, uint8 [stop - first, K]."""
        name = self.part(tensor, "qweight")
        if self._is_awq:
            return self._unpacked_rows(name, first, stop)
        return unpack(self.words(name, _ALL, slice(first, stop)).T).reshape(stop - first, -1)

    def _zeros(self, tensor: str, first: int, stop: int) -> NDArray[np.float32]:
        """The zero points of some rows of a weight, float32 [stop - first, groups]."""
        name = self.part(tensor, "qzeros")
        stored = self._unpacked_rows(name, first, stop)
        if self.packing.zero_offset and (stored == q4nx.LARGEST_CODE).any():
            raise ConversionError(
                f"{self.checkpoint.folder}: {name} has a stored zero point of {q4nx.LARGEST_CODE}, which some readers "
                "of checkpoint_format gptq take for 0 and some for 16; save the checkpoint as gptq_v2"
            )
        return stored.astype(np.float32) + np.float32(self.packing.zero_offset)

    def _unpacked_rows(self, name: str, first: int, stop: int) -> NDArray[np.uint8]:
        """Rows first..stop-1 of a tensor, unpacked from words [n, rows / 8] to uint8 [rows, n]."""
        words = self.words(name, _ALL, slice(first // IN_A_WORD, stop // IN_A_WORD))
        return unpack(words, _ORDER[self.packing.method]).reshape(len(words), -1).T

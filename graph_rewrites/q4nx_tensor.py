# SPDX-License-Identifier: Apache-2.0
"""Q4NX initializers whose bytes are computed when they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from flownpu import _native


class Q4NXTensor(ir.LazyTensor):
    """A tensor of Q4NX blocks that are computed on all cores each time it is read; it keeps no copy of them.

    Attributes:
        weight: the source of the weight, which packs the blocks.
        relative_error: |W - W'| / |W| in the Frobenius norm, set when the tensor is read; 0 before.
    """

    def __init__(self, weight: _native.Q4NXConstant, name: str) -> None:
        super().__init__(self._evaluate_blocks, ir.DataType.UINT8, ir.Shape(weight.shape), name=name)
        self.weight = weight
        self.relative_error = 0.0

    @property
    def keeps_codes(self) -> bool:
        """Whether the blocks have the source's 4-bit codes; if not, the weight is quantised anew."""
        return self.weight.keeps_codes

    def _evaluate_blocks(self) -> ir.TensorProtocol:
        blocks = np.empty(self.weight.shape, np.uint8)
        squared_error, squares = self.weight.pack(blocks)
        self.relative_error = (squared_error / squares) ** 0.5 if squares else 0.0
        return ir.Tensor(blocks)

# SPDX-License-Identifier: Apache-2.0
"""Q4NX initializers whose bytes are made when they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from flownpu import _native

__all__ = ["Q4NXTensor"]


class Q4NXTensor(ir.LazyTensor):
    """Q4NX bytes that are made whenever they are read, on all cores, and kept by whoever reads them.

    Attributes:
        weight: makes them.
        relative_error: |W - W'| / |W| in the Frobenius norm, of what was read last; 0 before.
    """

    def __init__(self, weight: _native.Q4NXConstant, name: str) -> None:
        super().__init__(self._evaluate_blocks, ir.DataType.UINT8, ir.Shape(weight.shape), name=name)
        self.weight = weight
        self.relative_error = 0.0

    @property
    def keeps_codes(self) -> bool:
        """Whether they have the codes of what they are made of, or are quantised again."""
        return self.weight.keeps_codes

    def _evaluate_blocks(self) -> ir.TensorProtocol:
        blocks = np.empty(self.weight.shape, np.uint8)
        squared_error, squares = self.weight.pack(blocks)
        self.relative_error = (squared_error / squares) ** 0.5 if squares else 0.0
        return ir.Tensor(blocks)

# SPDX-License-Identifier: Apache-2.0
"""FusedDQP: dequantisation and projection fused into a matrix-vector product, for one row.

    y_acc += dequant(w) . a        over the blocks w of W and the parts a of X        (Gemma3 on NPU, equation 15)

Inputs, output and attributes are those of Q4NXMatMul; the product of X's leading dimensions must be 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.ops.definitions import q4nx_matmul
from flownpu.ops.definitions.onnx_function import build
from flownpu.ops.definitions.q4nx_matmul import features, helpers

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir
    from numpy.typing import NDArray

__all__ = ["NAME", "features", "function", "helpers", "reference"]

NAME = "FusedDQP"

# With more than one row the reshaped row is longer than K, so that the product fails.
_ONE_ROW = """
    one_row = Constant <value_ints = [1, -1]> ()
    row = Reshape (X, one_row)
"""
_SHAPE = """
    leading = Shape <start = 0, end = -1> (X)
    any = Constant <value_ints = [-1]> ()
    output_shape = Concat <axis = 0> (leading, any)
    Y = Reshape (projected, output_shape)
"""


def function(overload: str) -> ir.Function:
    """The definition of one variant; `overload` is its features, joined by "_"."""
    body = "\n".join([_ONE_ROW, q4nx_matmul.body(overload, "row", "projected"), _SHAPE])
    return build(NAME, overload, body)


def reference(x: NDArray[Any], blocks: NDArray[np.uint8], *inputs: Any, **attributes: Any) -> NDArray[np.float64]:
    """Computes the operator in float64; arguments are those of Q4NXMatMul's reference.

    Raises:
        ValueError: `x` has more than one row.
    """
    if x.size != x.shape[-1]:
        raise ValueError(f"[{NAME}] expected one row, got X {list(x.shape)}")
    return q4nx_matmul.reference(x, blocks, *inputs, **attributes)

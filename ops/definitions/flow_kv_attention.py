# SPDX-License-Identifier: Apache-2.0
"""FlowKVAttention: attention of one new token (S = 1), which streams the KV cache once (Gemma3 on NPU, section 3.2.2).

Equations, inputs, outputs and attributes are those of FlowQKVAttention, with a query chunk of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.ops.definitions import flow_qkv_attention
from flownpu.ops.definitions.flow_qkv_attention import features, helpers
from flownpu.ops.definitions.flow_qkv_attention_body import body
from flownpu.ops.definitions.onnx_function import build

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir
    from numpy.typing import NDArray

__all__ = ["NAME", "features", "function", "helpers", "reference"]

NAME = "FlowKVAttention"


def function(overload: str) -> ir.Function:
    """The definition of one variant; `overload` is its features, joined by "_"."""
    return build(NAME, overload, body(overload, tokens=1))


def reference(
    query: NDArray[Any], *inputs: Any, **attributes: Any
) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[Any]]:
    """Computes the operator in float64; arguments and results are those of FlowQKVAttention's reference.

    Raises:
        ValueError: `query` has more than one token.
    """
    if query.shape[1] != 1:
        raise ValueError(f"[{NAME}] expected one new token, got a query of shape {list(query.shape)}")
    return flow_qkv_attention.reference(query, *inputs, **attributes)

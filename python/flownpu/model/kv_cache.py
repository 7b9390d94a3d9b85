# SPDX-License-Identifier: Apache-2.0
"""A KV cache that holds nothing yet, as a session of ONNX Runtime is fed one."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["PAST", "empty_past"]

PAST = "past_key_values."
"""How the names of a decoder's inputs begin that have the keys and values of tokens before."""

# ONNX's number of bfloat16, which numpy does not have: its bits stand in uint16.
_BFLOAT16 = 16
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}


def empty_past(onnxruntime: Any, value: Any, *, batch: int = 1, head_size: int = 0) -> Any:
    """An OrtValue of no tokens for an input of a session.

    Args:
        onnxruntime: the module.
        value: the input: [batch, heads, tokens, head size].
        batch: rows.
        head_size: where the input does not say it.
    """
    heads, size = value.shape[1], value.shape[3]
    shape = (batch, heads, 0, size if isinstance(size, int) else head_size)
    make = onnxruntime.OrtValue
    if value.type == "tensor(bfloat16)":
        return make.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, np.uint16), _BFLOAT16)
    return make.ortvalue_from_numpy(np.zeros(shape, _TYPES[value.type]))

# SPDX-License-Identifier: Apache-2.0
"""An empty KV cache, as an input of an ONNX Runtime session."""

from typing import Any

import numpy as np

PAST = "past_key_values."
"""The beginning of the names of a decoder's inputs that hold the keys and values of earlier tokens."""

# ONNX's number for the type bfloat16, which numpy lacks: its bits are given as uint16.
_BFLOAT16 = 16
_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}


def empty_past(onnxruntime: Any, value: Any, *, batch: int = 1, head_size: int = 0) -> Any:
    """An OrtValue [batch, heads, 0, head size] for an input of a session that holds keys or values.

    Args:
        onnxruntime: the module.
        value: the input's description (NodeArg), of shape [batch, heads, tokens, head size].
        batch: how many sequences.
        head_size: used where the input's last dimension is symbolic.
    """
    heads, size = value.shape[1], value.shape[3]
    shape = (batch, heads, 0, size if isinstance(size, int) else head_size)
    make = onnxruntime.OrtValue
    if value.type == "tensor(bfloat16)":
        return make.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, np.uint16), _BFLOAT16)
    return make.ortvalue_from_numpy(np.zeros(shape, _TYPES[value.type]))

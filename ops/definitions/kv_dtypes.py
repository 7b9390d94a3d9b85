# SPDX-License-Identifier: Apache-2.0
"""The types of KV caches that FlowQKVAttention takes, by the names that users write (`--kv-dtype`)."""

import onnx_ir as ir

from flownpu.ops.definitions.int8_cache import SCALE_BYTES

KV_DTYPES = {
    "bf16": ir.DataType.BFLOAT16,
    "fp16": ir.DataType.FLOAT16,
    "fp32": ir.DataType.FLOAT,
    "int8": ir.DataType.INT8,
}


def cache_columns(dtype: ir.DataType, head_size: int) -> int:
    """The number of elements in a row of a KV cache: the head size, and with int8 the bytes of the row's scale."""
    return head_size + (SCALE_BYTES if dtype == ir.DataType.INT8 else 0)

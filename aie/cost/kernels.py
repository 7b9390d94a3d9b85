# SPDX-License-Identifier: Apache-2.0
"""Cycles of a kernel's call, from what was published of such kernels; of our own none was ever timed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flownpu.aie.cost.gemm_kernel import KernelSize, call_cycles, precision_of
from flownpu.aie.cost.gemm_parameters import gemm_parameters
from flownpu.aie.timeline import kernel_cycles

if TYPE_CHECKING:
    from collections.abc import Callable

    from flownpu.aie.cost.device import Device
    from flownpu.aie.cost.parameters import Values

__all__ = ["published_cycles"]

# Elements of a call of an operator on vectors, by its integers (kernels/README.md).
_ELEMENTS: dict[str, Callable[..., int]] = {
    "rms_norm": lambda rows, n, _: rows * n,
    "rms_norm_add": lambda rows, n, _: rows * n,
    "add_rms_norm": lambda rows, n, _: rows * n,
    "add_layer_norm": lambda rows, n, _: rows * n,
    "rms_norm_rope": lambda heads, d, _: heads * d,
    "rope": lambda heads, d: heads * d,
    "rope_interleaved": lambda heads, d: heads * d,
    "patch_pooling_norm": lambda n, *_: n,
    "geglu": lambda n: n,
    "swiglu": lambda n: n,
    "store_gelu": lambda n: n,
    "store_gelu_mul": lambda n: n,
    "store_silu_mul": lambda n: n,
}
_BLOCKS = {
    "fused_dqp": "dqp_block",
    "q4nx_dequant_bf16": "dequant_block",
    "q4nx_dequant_bfp16": "dequant_block",
}  # of a block of weights each
_GEMM = {"gemm_bf16": "bf16", "gemm_bfp16": "bfp16"}
_SIDE = 8  # of the tiles that FlowQKV's kernels multiply
_FLOW_KV = {"flow_kv_scores", "flow_kv_values", "flow_kv_split"}


def published_cycles(device: Device, values: Values, kernel: str, integers: list[int], buffer_bytes: int) -> float:
    """The cycles of a call with these integers, over buffers of so many bytes together.

    What is in no published list takes one pass over its buffers, 64 bytes a cycle (`flownpu.aie.timeline`).
    """
    if kernel in _BLOCKS:
        cycles = values[_BLOCKS[kernel]]
    elif kernel in _GEMM:
        known = gemm_parameters(device.limits.name)
        cycles = call_cycles(known, precision_of(known.target, _GEMM[kernel]), KernelSize(*integers)) + known.call.value
    elif kernel == "flow_qkv_scores":
        rows, keys, d = (size / _SIDE for size in integers)
        tile = d * values["product"] + values["product_loop"] + values["softmax_tile"]
        cycles = rows * (keys * tile + values["softmax_rows"])
    elif kernel == "flow_qkv_values":
        rows, keys, d = (size / _SIDE for size in integers)
        # Sums are loaded and stored around the loop, 64 bytes a cycle.
        cycles = rows * d * (keys * values["product"] + values["product_loop"] + 2 * _SIDE * _SIDE * 4 / 64)
    elif kernel in _FLOW_KV:
        cycles = _flow_kv_cycles(device, values, kernel, integers)
    elif kernel in _ELEMENTS:
        cycles = _ELEMENTS[kernel](*integers) * values["vector_element"]
    else:
        cycles = kernel_cycles(device.limits, kernel, integers, buffer_bytes)
    return cycles


def _flow_kv_cycles(device: Device, values: Values, kernel: str, integers: list[int]) -> float:
    """Products, and the softmax where there are scores."""
    rate = device.limits.macs_per_cycle["bf16"]
    if kernel == "flow_kv_split":  # a Q4NX block's bytes of keys and values: 1280 products a row for each
        _, rows, d = integers
        return rows * (2 * 1280 / rate + values["softmax_score"] * 1280 / d)
    rows, keys, _ = integers
    softmax = values["softmax_score"] * rows * keys if kernel == "flow_kv_scores" else 0.0
    return math.prod(integers) / rate + softmax

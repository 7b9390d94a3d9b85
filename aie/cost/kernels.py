# SPDX-License-Identifier: Apache-2.0
"""Cycles of a kernel's call, from published numbers of similar kernels; none of our own was ever timed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flownpu.aie.cost.gemm_kernel import KernelSize, call_cycles, precision_of
from flownpu.aie.cost.gemm_parameters import gemm_parameters

if TYPE_CHECKING:
    from flownpu.aie.cost.chips import Chip
    from flownpu.aie.cost.parameters import Values

# Operators on vectors, with the number of integer arguments (kernels/README.md) whose product is a call's elements. 2:
# rows (heads) and the size of each; 1: all elements.
_VECTORS: dict[str, int] = dict.fromkeys(
    (
        "rms_norm",
        "rms_norm_add",
        "add_rms_norm",
        "rms_norm_rope",
        "all_norm_rope",
        "rope",
        "int8_rows",
    ),
    2,
) | dict.fromkeys(("patch_pooling_norm", "store_gelu", "store_gelu_mul", "store_silu_mul"), 1)
_BLOCKS = {
    "fused_dqp": "dqp_block",
    "q4nx_dequant_bf16": "dequant_block",
    "q4nx_dequant_bfp16": "dequant_block",
}  # cycles for each block of weights
_PLANES = "_planes"  # in the name of a kernel that takes two of them at once
_GEMM = {"gemm_bf16": "bf16", "gemm_bfp16": "bfp16"}
_SIDE = 8  # side of the sub-tiles that FlowQKV's kernels multiply
_LATENCY = 6  # cycles until an accumulator is used again (mlir-aie)
_VECTOR_BYTES = 64  # a 512-bit register: what a core loads or stores in a cycle (AMD AM020)
_STORES = _SIDE * _SIDE * 4 / _VECTOR_BYTES  # cycles in which a sub-tile of sums in f32 is stored
_FLOW_KV = {"flow_kv_scores", "flow_kv_values", "flow_kv_split", "flow_kv_split_int8"}
# Elements of the keys that an object of split keys holds (kernels/flow_kv_split.cc); its values are as many.
_SPLIT_KEYS = {"flow_kv_split": 1280, "flow_kv_split_int8": 2048}


def priced_by_integers(kernel: str) -> bool:
    """Whether a call's cycles depend on its integer arguments."""
    return any(kernel in kinds for kinds in (_VECTORS, _GEMM, _FLOW_QKV, _FLOW_KV, {"attention_sinks", "gated_delta"}))


def published_cycles(chip: Chip, values: Values, kernel: str, integers: list[int], buffer_bytes: int) -> float:
    """The cycles of a call with these integer arguments, whose buffers have `buffer_bytes` bytes together.

    Kernels of which nothing was published are taken to pass once over their buffers.
    """
    if (of_plane := kernel.replace(_PLANES, "")) in _BLOCKS:
        cycles = values[_BLOCKS[of_plane]] * (1 + (of_plane != kernel))
    elif kernel in _GEMM:
        known = gemm_parameters(chip.limits.name)
        cycles = call_cycles(known, precision_of(known.target, _GEMM[kernel]), KernelSize(*integers)) + known["call"]
    elif kernel in _FLOW_QKV:
        rows, keys, d = (size // _SIDE for size in integers[:3])
        of_block = _FLOW_QKV[kernel]
        blocks = rows // 2 * of_block(values, 2, keys, d) + rows % 2 * of_block(values, 1, keys, d)
        cycles = blocks + gemm_parameters(chip.limits.name)["call"]
        if any(integers[3:]):  # a soft cap
            cycles += rows * keys * values["softcap_tile"]
    elif kernel == "attention_sinks":  # two numbers a head, each loaded, and stored to the head's rows one by one
        heads, rows = integers[4:]
        cycles = 2 * heads * (_LATENCY + rows)
    elif kernel == "gated_delta":  # two multiply-adds of 32 lanes in its first pass over the state, four in its second
        cycles = math.prod(integers[:2]) / 32 * 6
    elif kernel in _FLOW_KV:
        cycles = _flow_kv_cycles(chip, values, kernel, integers)
    elif kernel in _VECTORS:
        cycles = math.prod(integers[: _VECTORS[kernel]]) * values["vector_element"]
    else:
        cycles = buffer_bytes / _VECTOR_BYTES
    return cycles


# FlowQKV's kernels, from the instructions of aie/kernels/common/attention.h. A block is 1 or 2 sub-tiles of rows, of
# `d` sub-tiles each, against a chunk of `keys` sub-tiles; sub-tiles of keys are taken two by two as well.


def _pairs(keys: int) -> list[int]:
    """How many sub-tiles of keys are taken at a time, one turn after the other."""
    return [2] * (keys // 2) + [1] * (keys % 2)


def _score_block(values: Values, rows: int, keys: int, d: int) -> float:
    """Cycles of scores: each step of d converts an operand of every row and column; two softmaxes take one's time."""
    products = sum(
        values["product_loop"] + d * max((rows + columns) * values["product"], _LATENCY) + rows * columns * _STORES
        for columns in _pairs(keys)
    )
    return products + keys * values["softmax_tile"] + values["softmax_rows"]


def _value_block(values: Values, rows: int, keys: int, d: int) -> float:
    """Cycles of F V.

    F is converted before the loop. In the loop, products are as fast as GEMM's and hide the moves of sums.
    """
    return sum(
        values["product_loop"]
        + rows * columns * values["product"]
        + d * rows * max(columns * values["product"], _STORES)
        for columns in _pairs(keys)
    )


_FLOW_QKV = {"flow_qkv_scores": _score_block, "flow_qkv_values": _value_block}


def _flow_kv_cycles(chip: Chip, values: Values, kernel: str, integers: list[int]) -> float:
    """Cycles of the products, and of the softmax where there are scores."""
    rate = chip.limits.macs_per_cycle["bf16"]
    if keys := _SPLIT_KEYS.get(kernel):
        _, _, rows, d, cap = integers
        # A code of int8 is taken for one of Q4NX, of which a block has 8192.
        dequantized = 2 * keys * values["dequant_block"] / 8192 if kernel == "flow_kv_split_int8" else 0.0
        return rows * (2 * keys / rate + _score(values, cap) * keys / d) + dequantized
    rows, keys, d = integers[:3]
    softmax = _score(values, integers[3]) * rows * keys if kernel == "flow_kv_scores" else 0.0
    return rows * keys * d / rate + softmax


def _score(values: Values, cap: int) -> float:
    """Cycles of a score's softmax; `cap`: bits of its soft cap, 0: none."""
    return values["softmax_score"] + (values["softcap_tile"] / _SIDE**2 if cap else 0)

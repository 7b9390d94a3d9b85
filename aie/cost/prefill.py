# SPDX-License-Identifier: Apache-2.0
"""The time of the operators of many tokens, from their shapes: dequantisation, GEMM, attention, rows of vectors.

    dequantisation  (blocks in, tiles of B out) / memory, or cycles of a block / tiles
    attention       multiply-adds / (tiles x attention_macs), or the keys' and values' bytes / streams
    vectors         elements x vector_element / cores, or their bytes / memory

GEMMs are `gemm_model.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu.aie.cost.memory import read_rate
from flownpu.aie.designs.common import ceil_div
from flownpu.aie.designs.decode_layer_shape import BLOCK_BYTES

if TYPE_CHECKING:
    from flownpu.aie.cost.device import Device
    from flownpu.aie.cost.parameters import Values

__all__ = [
    "PrefillDesign", "attention_macs", "attention_seconds", "dequant_seconds", "gemm_seconds", "vector_seconds",
]  # fmt: skip

_BLOCK_WEIGHTS = 32 * 256
_TILES = 32
_BF16_BYTES = 2


@dataclass(frozen=True)
class PrefillDesign:
    """How prefilling is laid on the array.

    Attributes:
        name: of the design.
        weight_bytes: of a dequantised weight: 2 in bf16, 9 / 8 in block floating point.
        vector_cores: cores that norms, RoPE and activations run on.
        configurations: arrays that a layer goes through, each configured anew: their locks; None: an xclbin that is
            exchanged as a whole (`reconfiguration`).
        host: the parameter that says what the host needs for a logit.
        chunk: tokens that go through all layers at a time; None: the whole prompt.
        fused_activation: the activation is the GEMM's epilogue.
        own_kernels: GEMM and attention are those of aie/designs; else as published.
    """

    name: str
    weight_bytes: float
    vector_cores: int
    configurations: tuple[int | None, ...]
    host: str
    chunk: int | None = None
    fused_activation: bool = False
    own_kernels: bool = False

    def switch_seconds(self, values: Values) -> float:
        """Configuring the array for all operators of a layer."""
        return sum(
            values["reconfiguration"] if locks is None else values["switch"] + locks * values["switch_per_lock"]
            for locks in self.configurations
        )


def dequant_seconds(blocks: int, design: PrefillDesign, device: Device, values: Values) -> float:
    """The dequantisation engine over so many Q4NX blocks: read once, written once, all 32 tiles."""
    moved = blocks * (BLOCK_BYTES + _BLOCK_WEIGHTS * design.weight_bytes)
    kernels = blocks * values["dequant_block"] / _TILES / device.clock
    return max(moved / values["memory_read"], kernels)


def attention_macs(tokens: int, past: int, heads: int, d: int, *, window: int | None, causal: bool = True) -> float:
    """Multiply-adds of queries with keys and of probabilities with values, for the pairs that are not masked."""
    if not causal:
        return 2.0 * heads * d * tokens * (past + tokens)
    return 2.0 * heads * d * (_seen(past + tokens, window) - _seen(past, window))


def _seen(total: int, window: int | None) -> float:
    """The keys that the first `total` queries see, in all."""
    near = total if window is None else min(total, window)
    return near * (near + 1) / 2 + (total - near) * near


def attention_seconds(
    macs: float, kv_heads: int, heads: int, d: int, device: Device, values: Values, *, block: int | None = None
) -> float:
    """FlowQKV over a prompt: no faster than its kernels, nor than its keys and values come in.

    Args:
        macs: multiply-adds (`attention_macs`).
        kv_heads: KV heads.
        heads: query heads.
        d: head size.
        device: the chip.
        values: the parameters.
        block: tokens that share a sweep over their head's keys, one stream a column; None: the sweeps are not
            known, and `attention_macs` has them in it.
    """
    compute = macs / (_TILES * values["attention_macs"] * device.clock)
    if block is None:
        return compute
    swept = macs / (2 * heads * d) / block * kv_heads  # keys of all sweeps
    run = d * _BF16_BYTES
    return max(compute, swept * 2 * run / read_rate(device.limits.columns, run, values))


def vector_seconds(elements: float, cores: int, device: Device, values: Values) -> float:
    """Norms, RoPE or activations over so many elements, read and written once."""
    return max(
        elements * values["vector_element"] / cores / device.clock, 2 * _BF16_BYTES * elements / values["memory_read"]
    )


def gemm_seconds(m: int, k: int, n: int, values: Values, *, tile: int = 512) -> float:
    """A GEMM as published: every size padded to the megatile's, at the rate that was published of it."""
    m, k, n = (ceil_div(size, tile) * tile for size in (m, k, n))
    return 2.0 * m * k * n / values["gemm_operations"]

# SPDX-License-Identifier: Apache-2.0
"""Operators by themselves on the emulated array of an NPU (XDNA2): the design's plan, run with the NPU's kernels.

The array rounds activations and results to bf16, and sums in float32.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu import _native
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flownpu.aie.plan import Plan

__all__ = ["fused_dqp"]

_TARGET = "npu2"
# Of this architecture's kernels, compiled for this machine beside the native module.
_KERNELS = "libflownpu_aie_xdna2.so"
# The least rows of a call, one row of blocks a tile of a column (aie/designs/fused_dqp.py).
_LEAST_ROWS = 4 * q4nx.BLOCK_ROWS


def fused_dqp(x: NDArray[Any], blocks: q4nx.Bytes, rows: int, gating: str) -> q4nx.Floats:
    """FusedDQP of one row.

    Args:
        x: float32 [K].
        blocks: Q4NX blocks of any layout; with gating the gate's and below them the up projection's.
        rows: M.
        gating: "none", "geglu" or "swiglu".

    Returns:
        float32 [M], of bf16's numbers.

    Raises:
        ValueError: The design has no place for these sizes; says why.
    """
    from flownpu.aie.emulator import Emulator  # noqa: PLC0415 # the designs take long to import

    columns = len(x)
    parts = np.split(blocks, 2) if gating != "none" else [blocks]
    padded = max(len(parts[0]) * q4nx.BLOCK_ROWS, _LEAST_ROWS)
    plan = _plan(padded, columns, gating)
    row = np.zeros(-(-columns // q4nx.WIDE.block_columns) * q4nx.WIDE.block_columns, q4nx.BFLOAT16)
    row[:columns] = x
    y = np.zeros(padded, q4nx.BFLOAT16)
    weight = np.concatenate([_wide(part, columns, padded // q4nx.BLOCK_ROWS) for part in parts])
    emulator = Emulator(plan.array, Path(_native.__file__).parent / _KERNELS)
    emulator.run(plan.sequence, [weight, row, y])
    return y[:rows].astype(np.float32)


@lru_cache(maxsize=16)
def _plan(rows: int, columns: int, gating: str) -> Plan:
    from flownpu.aie.checker import require_valid  # noqa: PLC0415
    from flownpu.aie.designs.fused_dqp import FusedDQP  # noqa: PLC0415

    padded = -(-columns // q4nx.WIDE.block_columns) * q4nx.WIDE.block_columns
    return require_valid(FusedDQP(_TARGET, padded, epilogue=gating).program(rows, columns).resolve_program("fused_dqp"))


def _wide(blocks: q4nx.Bytes, columns: int, row_blocks: int) -> q4nx.Bytes:
    """The array's layout, and rows of zeros up to so many rows of blocks."""
    wide = blocks if q4nx.layout_of(blocks) == q4nx.WIDE else q4nx.repack(blocks, columns, q4nx.WIDE)
    more = row_blocks - len(wide)
    return wide if more <= 0 else np.concatenate([wide, np.zeros((more, *wide.shape[1:]), np.uint8)])

# SPDX-License-Identifier: Apache-2.0
"""A projection's bias as a column of its weight: for GEMM and FusedDQP, whose tiles have no free input for a bias.

    [W b] [x; 1] = W x + b

In Q4NX a bias costs only its place: it is the minimum of a group of 32 columns whose scale is 0, and x is 1 in one of
them and 0 in the others. SigLIP's projections (K = 1152 and 4304) have such a group among the columns that pad K to
256; where K is a multiple of 256 a block is added to every row.

This rounds the bias to bf16 (relative error 2^-9), and once more, to 8 bits, where the weight becomes bfp16 (2^-8).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flownpu.aie.designs.common import BF16, BLOCK_BYTES, BLOCK_COLUMNS, BLOCK_ROWS, ceil_div

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GROUP = 32  # columns that share a scale and a minimum
_MINIMA = 512  # the byte of a block where its minima begin, behind the scales


def bias_column(k: int) -> int:
    """The column where x is 1: the first of the first group without weights. The call's K is this column + 1."""
    return ceil_div(k, _GROUP) * _GROUP


def with_bias(blocks: NDArray[np.uint8], bias: NDArray[np.float32], k: int) -> NDArray[np.uint8]:
    """Q4NX blocks [ceil(M / 32), ceil((bias_column(K) + 1) / 256), 5120] of [W b] from those of W [M, K] and b [M].

    Raises:
        ValueError: the blocks are not [ceil(M / 32), ceil(K / 256), 5120].
    """
    rows, columns = ceil_div(len(bias), BLOCK_ROWS), ceil_div(k, BLOCK_COLUMNS)
    if blocks.shape != (rows, columns, BLOCK_BYTES):
        raise ValueError(f"[bias] expected blocks {(rows, columns, BLOCK_BYTES)} of M and K, got {blocks.shape}")
    block, place = divmod(bias_column(k), BLOCK_COLUMNS)
    wide = np.zeros((rows, block + 1, BLOCK_BYTES), np.uint8)
    wide[:, :columns] = blocks
    minima = np.zeros(rows * BLOCK_ROWS, BF16)
    minima[: len(bias)] = bias.astype(BF16)
    start = _MINIMA + place // _GROUP * BLOCK_ROWS * minima.itemsize
    wide[:, block, start : start + BLOCK_ROWS * minima.itemsize] = minima.view(np.uint8).reshape(rows, -1)
    return wide

# SPDX-License-Identifier: Apache-2.0
"""Tiles for our own GEMM (`designs.gemm`): those that are predicted to be the fastest for some shapes.

The tuner tries tiles that fit in L1 and suit B's layout by the dequantisation engine: K padded to the 256 columns of a
Q4NX block, 64 columns of a gate beside 64 of its up projection. The checker decides whether a design is valid.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from flownpu.aie.cost.gemm_kernel import PRECISIONS
from flownpu.aie.cost.gemm_model import predict_design
from flownpu.aie.designs.common import BLOCK_COLUMNS, PARAMETERS
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.plan.kernel_memory import stack_for
from flownpu.aie.plan.limits import NPU2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# The part of a tile's memory for buffers; the stack and the kernels' constants need the rest.
_L1_BYTES = NPU2.compute.memory_bytes - stack_for(("gemm", "epilogue")) - NPU2.constant_bytes
# Tiles that are tried: calls of fewer than 16 rows are mostly overhead, and with more than 128 L1 lacks room for
# several tiles.
_ROWS = range(16, 129, 8)
_COLUMNS = (32, 64, 96, 128)
_DEPTHS = (32, 64, 128)
_EXPANSIONS = ((1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2))
_WOVEN = 64  # columns of a gate that lie beside 64 of its up projection


def l1_bytes(design: Gemm) -> float:
    """Bytes of a compute tile's memory without its stack: tiles of A (those held + 1) and B, sums, a tile of C."""
    a_tiles = 2 if design.accumulators == design.e_y else design.e_y + 1
    precision, tile = PRECISIONS[design.weights], design.m * design.n
    inputs = design.k * (a_tiles * design.m * precision.a + 2 * design.n * precision.b)
    # A counter for each of the three fifos is beside the run-time parameters.
    words = PARAMETERS + 3
    return inputs + tile * (design.accumulators * precision.accumulator + precision.output) + 4 * words


def designs(target: str, weights: str, epilogue: str) -> Iterator[Gemm]:
    """All designs that are tried; K is padded to a block's columns.

    Raises:
        ValueError: the target does not take these weights, or there is no such epilogue.
    """
    gated = Gemm(target, weights, epilogue).gates > 1
    for n, m, k, (e_y, e_x) in itertools.product(_COLUMNS, _ROWS, _DEPTHS, _EXPANSIONS):
        if gated and n != _WOVEN:
            continue
        design = Gemm(target, weights, epilogue, m, k, n, BLOCK_COLUMNS, e_y, e_x)
        if l1_bytes(design) <= _L1_BYTES:
            yield design


def rank_for_shapes(
    target: str, weights: str, epilogue: str, groups: Sequence[Iterable[tuple[int, int, int]]]
) -> list[tuple[Gemm, float]]:
    """Designs by the geometric mean of TOPS over groups of shapes (M, K, N), the highest first.

    One design serves all shapes. With several arrays each would have to be configured in turn, which costs more than
    better tiles gain. A group may be one model's shapes; each group has the same weight.
    """
    held = [list(group) for group in groups]
    ranked: list[tuple[Gemm, float]] = []
    for design in designs(target, weights, epilogue):
        if any(n < design.width for group in held for _, _, n in group):
            continue
        logarithms = [math.log(_group_tops(design, group)) for group in held]
        ranked.append((design, math.exp(sum(logarithms) / len(logarithms))))
    return sorted(ranked, key=lambda pair: -pair[1])


def _group_tops(design: Gemm, group: list[tuple[int, int, int]]) -> float:
    seconds = sum(predict_design(design, m, k, n).seconds for m, k, n in group)
    return sum(2.0 * m * k * n * design.gates for m, k, n in group) / seconds / 1e12

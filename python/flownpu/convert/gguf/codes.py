# SPDX-License-Identifier: Apache-2.0
"""Reads the codes of GGUF's 4-bit weights, and the scale and minimum of each 32, as Q4NX has them.

    Q4_0: a block of 32 weights:  float16 d;     w = d (code - 8)
    Q4_1: a block of 32 weights:  float16 d, m;  w = d code + m
    Q4_K: a block of 256 weights: float16 d, n; for each 32 of them 6 bits s and 6 bits t;  w = d s code - n t

The gguf package finds the codes: they are what a block stands for if its scales are 1 and its minima 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K, dequantize

from flownpu.convert.quantise import Carried
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ONE = np.float16(1).tobytes()
# The first bytes of a block whose scales are 1 and whose minima are 0. Q4_K has d, n, and in 12 bytes the low 6 bits of
# s 0 - 3, those of t 0 - 3, and the low 4 bits of s 4 - 7 below those of t 4 - 7.
_UNIT = {
    GGMLQuantizationType.Q4_0: _ONE,
    GGMLQuantizationType.Q4_1: _ONE + bytes(2),
    GGMLQuantizationType.Q4_K: _ONE + bytes(2) + b"\1\1\1\1" + bytes(4) + b"\1\1\1\1",
}
KEPT = {
    GGMLQuantizationType.Q4_0: "scales",
    GGMLQuantizationType.Q4_1: "scales and minima",
    GGMLQuantizationType.Q4_K: "scales and minima",
}
"""The types whose codes Q4NX keeps, and the parts that are rounded to bf16."""


def keep_codes(stored: NDArray[np.uint8], kind: GGMLQuantizationType) -> Carried:
    """Rows of a weight in Q4NX, with the codes of the file.

    Q4_K's minima make up for the rounding of scales: with d s off by e, they move by e times the group's mean code,
    which leaves the smallest squared error that these codes and scales can have. (Q4_0's minima must stay at -8 d to be
    omitted; Q4_1's have float16's 11 bits or fewer, and are the bytes of FastFlowLM's converter.)

    Args:
        stored: the rows as the file has them, uint8 [rows, bytes].
        kind: a type of `KEPT`.

    Raises:
        ValueError: a scale or minimum is not finite.
    """
    unit = stored.reshape(-1, int(GGML_QUANT_SIZES[kind][1])).copy()
    scale, minimum = (values.reshape(len(stored), -1) for values in _parameters(unit, kind))
    unit[:, : len(_UNIT[kind])] = np.frombuffer(_UNIT[kind], np.uint8)
    codes = dequantize(unit.reshape(stored.shape), kind)
    if kind == GGMLQuantizationType.Q4_0:
        codes += 8
    by_group = codes.reshape(*scale.shape, q4nx.GROUP)
    exact = scale[..., None] * by_group + minimum[..., None]
    if kind == GGMLQuantizationType.Q4_K:
        minimum = minimum + (scale - scale.astype(q4nx.BFLOAT16).astype(np.float32)) * by_group.mean(axis=-1)
    return Carried(q4nx.from_affine(codes.astype(np.uint8), scale, minimum), exact.reshape(codes.shape))


def _parameters(
    blocks: NDArray[np.uint8], kind: GGMLQuantizationType
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The scales and the minima of blocks, float32 [blocks, groups of 32]; the products of Q4_K are exact."""
    first, second = (
        np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32) for start in (0, 2)
    )
    if kind == GGMLQuantizationType.Q4_K:
        scale, minimum = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
        return first * scale, -second * minimum
    return first, -8 * first if kind == GGMLQuantizationType.Q4_0 else second

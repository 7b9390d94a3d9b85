# SPDX-License-Identifier: Apache-2.0
"""Reads the codes of GGUF's weights, and the scale and minimum of each 32, as Q4NX has them.

    Q4_0, Q5_0, Q8_0: a block of 32 weights:  float16 d;     w = d code, with codes from -8, -16 and -127 on
    Q4_1, Q5_1:       a block of 32 weights:  float16 d, m;  w = d code + m
    Q4_K, Q5_K:       a block of 256 weights: float16 d, n; for each 32 of them 6 bits s and 6 bits t;
                      w = d s code - n t
    IQ4_NL, IQ4_XS:   blocks as Q4_0 and, without minima, as Q4_K with s from -32 on; w = d s table[code]
    MXFP4:            a block of 32 weights:  8 bits e; w = 2^(e - 128) table[code], which is exact in Q4NX

The gguf package finds the codes: they are what a block stands for if its scales are 1 and its minima 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K, dequantize

from flownpu.convert.quantise import Carried
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Codes(NamedTuple):
    """A type whose codes Q4NX keeps.

    Attributes:
        layout: the smallest layout that holds them.
        unit: the first bytes of a block whose scales are 1 and whose minima are 0.
        offset: what is added to the file's codes to get Q4NX's: 8 gives those of 4 bits from 0 on, and -16 puts those
            of 5 bits around 0, so that the minimum, which belongs to the code 0, is small and its rounding as well.
    """

    layout: q4nx.Layout
    unit: bytes
    offset: int = 0


_D = np.float16(1).tobytes()
_D_M = _D + bytes(2)
# d, n, and in 12 bytes the low 6 bits of s 0 - 3, those of t 0 - 3, and the low 4 bits of s 4 - 7 below those of t.
_D_N_S_T = _D_M + b"\1\1\1\1" + bytes(4) + b"\1\1\1\1"
# d, and 6 bits s + 32: the two high bits of each s, then pairs of low bits.
_D_S = _D + b"\xaa\xaa" + b"\x11" * 4
_E = b"\x80"
# Two codes that stand for 1.
_ONES = {GGMLQuantizationType.IQ4_NL: 0x88, GGMLQuantizationType.IQ4_XS: 0x88, GGMLQuantizationType.MXFP4: 0x11}
KEPT = {
    GGMLQuantizationType.Q4_0: Codes(q4nx.SYMMETRIC, _D, 8),
    GGMLQuantizationType.Q4_1: Codes(q4nx.NARROW, _D_M),
    GGMLQuantizationType.Q4_K: Codes(q4nx.NARROW, _D_N_S_T),
    GGMLQuantizationType.Q5_0: Codes(q4nx.EIGHT_BITS, _D),
    GGMLQuantizationType.Q5_1: Codes(q4nx.EIGHT_BITS_WITH_MINIMA, _D_M, -16),
    GGMLQuantizationType.Q5_K: Codes(q4nx.EIGHT_BITS_WITH_MINIMA, _D_N_S_T, -16),
    GGMLQuantizationType.Q8_0: Codes(q4nx.EIGHT_BITS, _D),
    GGMLQuantizationType.IQ4_NL: Codes(q4nx.TABLE, _D),
    GGMLQuantizationType.IQ4_XS: Codes(q4nx.TABLE, _D_S),
    GGMLQuantizationType.MXFP4: Codes(q4nx.TABLE, _E),
}
"""The types whose codes Q4NX keeps."""


def keep_codes(stored: NDArray[np.uint8], kind: GGMLQuantizationType) -> Carried:
    """Rows of a weight in Q4NX, with the codes of the file.

    Minima make up for the rounding of scales: with a scale off by e, they move by e times the group's mean code, which
    leaves the smallest squared error that these codes and scales can have. (Not those of Q4_1, which are the bytes of
    FastFlowLM's converter.)

    Args:
        stored: the rows as the file has them, uint8 [rows, bytes].
        kind: a type of `KEPT`.

    Raises:
        ValueError: a scale or minimum is not finite.
    """
    layout, first_bytes, offset = KEPT[kind]
    unit = stored.reshape(-1, int(GGML_QUANT_SIZES[kind][1])).copy()
    parameters = _parameters_of_tables(stored, kind) if layout.table else _parameters(unit, first_bytes)
    scale, minimum = (values.reshape(len(stored), -1) for values in parameters)
    unit[:, : len(first_bytes)] = np.frombuffer(first_bytes, np.uint8)
    codes = dequantize(unit.reshape(stored.shape), kind) + np.float32(offset)
    by_group = codes.reshape(*scale.shape, q4nx.GROUP)
    minimum = minimum - offset * scale
    exact = scale[..., None] * by_group + minimum[..., None]
    if layout.minima and kind != GGMLQuantizationType.Q4_1:
        minimum = minimum + (scale - scale.astype(q4nx.BFLOAT16).astype(np.float32)) * by_group.mean(axis=-1)
    quantized = q4nx.from_affine(
        codes.astype(np.int8), scale, minimum if layout.minima else None, bits=layout.unpacked_bits
    )
    return Carried(quantized, exact.reshape(codes.shape))


def _parameters_of_tables(
    stored: NDArray[np.uint8], kind: GGMLQuantizationType
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """As `_parameters`: the values of rows whose codes all stand for 1.

    They go to the gguf package as rows, since it takes 16 rows at a time: a block a row takes 15 times as long.
    """
    ones = stored.copy()
    ones.reshape(-1, int(GGML_QUANT_SIZES[kind][1]))[:, len(KEPT[kind].unit) :] = _ONES[kind]
    scale = np.ascontiguousarray(dequantize(ones, kind)[:, :: q4nx.GROUP])
    return scale, np.zeros_like(scale)


def _parameters(blocks: NDArray[np.uint8], unit: bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The scales and the minima of blocks, float32 [blocks, groups of 32]; the products of K-quants are exact."""
    first, second = (
        np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32) for start in (0, 2)
    )
    if unit == _D_N_S_T:
        scale, minimum = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
        return first * scale, -second * minimum
    return first, second if unit == _D_M else np.zeros_like(first)

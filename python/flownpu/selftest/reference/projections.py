# SPDX-License-Identifier: Apache-2.0
"""Cases of products with weights: FusedDQP, the dequantisation engine, GEMM and its epilogues."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flownpu.aie.designs.bias import bias_column, with_bias
from flownpu.aie.designs.decode_layer.shape import interleave
from flownpu.aie.designs.one_tile import GEMM_TILE
from flownpu.ops import q4nx
from flownpu.ops.definitions import fused_dqp, q4nx_matmul
from flownpu.ops.q4nx import as_read
from flownpu.selftest.reference.case import Case
from flownpu.selftest.reference.numbers import (
    BF16_ROUNDING,
    BFLOAT16,
    EXP2,
    F32_ROUNDING,
    PRODUCT,
    bf16,
    blocks_of,
    panels,
    tiled,
    untiled,
    wide,
)

if TYPE_CHECKING:
    from flownpu.aie.designs.convolution import Convolution
    from flownpu.aie.designs.dequant_engine import DequantEngine
    from flownpu.aie.designs.fused_dqp import FusedDQP
    from flownpu.aie.designs.gemm import Gemm
    from flownpu.aie.designs.one_tile import OneTile

    Rng = np.random.Generator

# |act(x) - act(y)| <= 1.13 |x - y|: the largest slopes are 1.129 (GELU) and 1.0998 (SiLU).
STEEPEST = 1.13
ACTIVATIONS = {"geglu": q4nx_matmul.gelu, "swiglu": q4nx_matmul.silu}


def activation_tolerance(x: np.ndarray, act: np.ndarray) -> np.ndarray:
    """Bounds the error of act(x), which is x times a sigmoid.

    The sigmoid's exponent, limited to 64, takes five products; then come exp2 and four more products. The reference
    computes 1 + tanh, which is off by 2^-53.
    """
    exponent = np.minimum(1.4427 * np.maximum(np.abs(x), 1.5958 * np.abs(x + 0.044715 * x**3)), 64)
    return np.asarray((5 * exponent * PRODUCT + EXP2 + 4 * PRODUCT) * np.abs(act) + np.abs(x) * 2.0**-52)


def random_weight(rng: Rng, m: int, k: int, bits: int = 4) -> tuple[np.ndarray, q4nx.Quantized]:
    """A weight [m, k] of random codes, scales and minima: its blocks, and these numbers."""
    groups = -(-k // q4nx.GROUP)
    codes = rng.integers(0, 16, (m, k), np.uint8) if bits == 4 else rng.integers(-128, 128, (m, k), np.int8)
    scale, minimum = bf16(rng.normal(size=(m, groups)) / 2**bits), bf16(rng.normal(size=(m, groups)))
    layout = q4nx.WIDE if bits == 4 else q4nx.EIGHT_BITS_WITH_MINIMA
    return q4nx.pack(codes, scale, minimum, layout), q4nx.Quantized(codes, scale, minimum)


def projection_tolerance(weight: q4nx.Quantized, x: np.ndarray) -> np.ndarray:
    """Bounds FusedDQP's error: a group's sums are split into two bf16 (2^-16), and have 32 products and 4 sums.

    Of 8 bits, planes have codes that add up to c + 128, of two groups, and a minimum of -128 scales more.
    """
    k, eight_bits = weight.shape[1], weight.codes.dtype == np.int8
    scale, minimum = (np.repeat(np.abs(wide(p)), q4nx.GROUP, 1)[:, :k] for p in (weight.scale, weight.minimum))
    magnitude = (scale * (wide(weight.codes) + 256 * eight_bits) + minimum) @ np.abs(wide(x))
    sums = 4 * k / 32 * (1 + eight_bits)
    return np.asarray(1.01 * (2.0**-16 + (32 + sums) * F32_ROUNDING) * magnitude)


def woven(gate: np.ndarray, up: np.ndarray, n: int) -> np.ndarray:
    """Gate and up projection interleaved, [K, 2 N]: n columns of the gate, the same n of the up projection, ..."""
    parts = (
        part for start in range(0, gate.shape[1], n) for part in (gate[:, start : start + n], up[:, start : start + n])
    )
    return np.concatenate(list(parts), axis=1)


def operand(b: np.ndarray, weights: str) -> np.ndarray:
    """B [K, N] in the layout of `panels`, in bf16 or, as bytes, in bfp16 (kernels/README.md)."""
    if weights == "bf16":
        return panels(b)
    k, n = b.shape
    coded, _ = blocks_of(np.ascontiguousarray(b.T))
    return np.ascontiguousarray(coded.reshape(n // 32, 4, 8, k // 8, 9).transpose(0, 3, 1, 2, 4)).reshape(-1)


def as_multiplied(a: np.ndarray, b: np.ndarray, target: str) -> tuple[np.ndarray, np.ndarray]:
    """A and B as the matrix unit reads them: on XDNA2 in block floating point along K."""
    if target == "npu1":
        return wide(a), wide(b)
    return blocks_of(a)[1], blocks_of(np.ascontiguousarray(b.T))[1].T


def gated(sums: list[np.ndarray], errors: list[np.ndarray], gating: str) -> tuple[np.ndarray, np.ndarray]:
    """act(gate) * up of two sums with error bounds, and the tolerance of the product as it is stored, in bf16."""
    (gate, up), (gate_error, up_error) = sums, errors
    act = ACTIVATIONS[gating](gate)
    expected = act * up
    act_error = STEEPEST * gate_error + activation_tolerance(gate, act)
    tolerance = act_error * (np.abs(up) + up_error) + np.abs(act) * up_error + PRODUCT * np.abs(expected)
    return expected, tolerance + BF16_ROUNDING * (np.abs(expected) + tolerance)


def fused_dqp_case(design: FusedDQP, m: int, k: int, rng: Rng, *, interleaved: bool = False, bits: int = 4) -> Case:
    """One row times a random weight [m, k], or two of them under the design's gating."""
    gating = design.epilogue if design.epilogue in ACTIVATIONS else "none"
    parts = 1 if gating == "none" else 2
    weights = [random_weight(rng, m, k, bits) for _ in range(parts)]
    blocks = np.concatenate([blocks for blocks, _ in weights])
    x = np.zeros(design.k_max, BFLOAT16)
    x[:k] = bf16(rng.normal(size=k) / (16 if parts == 2 else 1))
    errors = [projection_tolerance(weight, x[:k]) for _, weight in weights]
    expected = fused_dqp.reference(wide(x[:k]), blocks, rows=m, columns=k, gating=gating)
    if parts == 2:
        _, tolerance = gated([wide(q4nx.dequantize(b, m, k)) @ wide(x[:k]) for b, _ in weights], errors, gating)
    else:
        tolerance = errors[0] + BF16_ROUNDING * (np.abs(expected) + errors[0])
    read = as_read(blocks)
    weight = interleave(read) if interleaved else read
    make = partial(design.program, m, k, interleaved=interleaved, planes=bits // 4)
    return Case(make, {"w": weight, "x": x}, "y", expected, tolerance)


def biased_fused_dqp_case(design: FusedDQP, m: int, k: int, rng: Rng) -> Case:
    """One row times a random weight [m, k], plus a bias, which is stored in the weight's blocks."""
    blocks, weight = random_weight(rng, m, k)
    bias, x = bf16(rng.normal(size=m)), np.zeros(design.k_max, BFLOAT16)
    x[:k], x[bias_column(k)] = bf16(rng.normal(size=k)), 1
    expected = fused_dqp.reference(wide(x[:k]), blocks, bias, rows=m, columns=k)
    sums = projection_tolerance(weight, x[:k]) + 2.0**-16 * np.abs(wide(bias))
    tolerance = sums + BF16_ROUNDING * (np.abs(expected) + sums)
    inputs = {"w": with_bias(blocks, bias.astype(np.float32), k), "x": x}
    return Case(partial(design.program, m, bias_column(k) + 1), inputs, "y", expected, tolerance)


def dequant_engine_case(
    engine: DequantEngine, m: int, k: int, rng: Rng, *, gated: bool = False, interleaved: bool = False
) -> Case:
    """Blocks of random weights; the result must be exact, for each step rounds once: to f32, to bf16, and to bfp16."""
    bits = 4 * engine.planes
    blocks = np.concatenate([random_weight(rng, m, k, bits)[0] for _ in range(2 if gated else 1)])
    height, width = -(-m // 32) * 32, -(-k // 256) * 256
    groups = -(-k // q4nx.GROUP) * q4nx.GROUP
    parts = [
        np.pad(bf16(q4nx.dequantize(part, height, groups)).T, ((0, width - groups), (0, 0)))
        for part in np.split(blocks, 2 if gated else 1)
    ]
    b = operand(woven(parts[0], parts[1], 64) if gated else parts[0], engine.weights)
    make = partial(engine.program, m, k, gated=gated, interleaved=interleaved)
    read = as_read(blocks)
    return Case(make, {"w": interleave(read) if interleaved else read}, "b", b.astype(np.float64), 0.0)


def gemm_case(design: Gemm, m: int, k: int, n: int, rng: Rng, *, plain: bool = False) -> Case:
    """A [m, k] times B [k, n], with gelu if the design has it; rows of padding hold numbers that must not matter.

    `plain`: without the design's epilogue.
    """
    rows, inner = design.padded(m, k)
    a, b = bf16(rng.normal(size=(rows, inner))), bf16(rng.normal(size=(inner, n)))
    a[:, k:] = 0
    left, right = as_multiplied(a, b, design.target)
    sums = left @ right
    tolerance = (inner + 1) * F32_ROUNDING * (np.abs(left) @ np.abs(right))
    expected = sums
    if design.epilogue == "gelu" and not plain:
        expected = q4nx_matmul.gelu(sums)
        tolerance = STEEPEST * tolerance + activation_tolerance(sums, expected)
    tolerance = tolerance + BF16_ROUNDING * (np.abs(expected) + tolerance)
    make = partial(design.program, m, k, n, plain=plain)
    return Case(make, {"a": a, "b": operand(b, design.weights)}, "c", expected, tolerance)


def convolved(x: np.ndarray, w: np.ndarray, stride: int, pads: tuple[int, int, int, int]) -> np.ndarray:
    """The definition: sums over windows of pictures x [batch, height, width, C] by w [N, C, kh, kw], in their type."""
    top, left, bottom, right = pads
    padded = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, w.shape[2:], (1, 2))[:, ::stride, ::stride]
    return np.asarray(np.tensordot(windows, w, ((3, 4, 5), (1, 2, 3))))


def convolution_case(design: Convolution, rng: Rng, *, whole_numbers: bool = False) -> Case:
    """Pictures by filters; the pixels that are no picture's are 0, and outputs that are no pixel's must not matter.

    `whole_numbers`: of -3 .. 3, which bf16 and bfp16 hold, as f32 holds their sums: only storing rounds. Else C is a
    multiple of 8, so that blocks of bfp16 do not reach from tap to tap.
    """
    gemm, sizes = design.gemm, design.sizes
    c, n, taps = sizes.channels, sizes.padded_filters, (sizes.kernel_height, sizes.kernel_width)
    pads = (sizes.pad_top, sizes.pad_left, sizes.pad_bottom, sizes.pad_right)
    size = (design.batch, sizes.height, sizes.width, c)
    draw = partial(rng.integers, -3, 4) if whole_numbers else partial(rng.normal, 0, 1)
    x, w = bf16(draw(size=size)), bf16(draw(size=(n, c, *taps)))
    by_filter = np.ascontiguousarray(w.transpose(2, 3, 1, 0)).reshape(-1, n)  # rows (i, j, c)
    left, right = (
        (wide(x).reshape(-1, c), wide(by_filter))
        if whole_numbers
        else as_multiplied(x.reshape(-1, c), by_filter, gemm.target)
    )
    filters = right.reshape(*taps, c, n).transpose(3, 2, 0, 1)
    expected, magnitude = (
        convolved(part(left).reshape(size), part(filters), sizes.stride, pads) for part in (np.array, np.abs)
    )
    tolerance = 0 if whole_numbers else (design.inner + 1) * F32_ROUNDING * magnitude
    tolerance = tolerance + BF16_ROUNDING * (np.abs(expected) + tolerance)

    walk, rows = sizes.stride * c, gemm.padded(design.rows, 1)[0]
    a = np.zeros(((rows - 1) * walk + (taps[0] - 1) * sizes.line * c + design.run), BFLOAT16)
    pictures = np.zeros((design.batch, sizes.padded_lines, sizes.line, c), BFLOAT16)
    pictures[:, : sizes.height, : sizes.width] = x
    a[sizes.head * c :][: pictures.size] = pictures.reshape(-1)[: len(a) - sizes.head * c]
    b = np.zeros((taps[0], design.run, n), BFLOAT16)
    b[:, : taps[1] * c] = by_filter.reshape(taps[0], -1, n)

    def pixels(out: np.ndarray) -> np.ndarray:
        firsts = np.arange(design.batch) * sizes.picture_rows
        high, across = np.arange(sizes.lines), np.arange(sizes.pixels)
        return np.asarray(out.reshape(rows, n)[firsts[:, None, None] + high[:, None] * sizes.line + across])

    inputs = {"a": a, "b": operand(b.reshape(-1, n), gemm.weights)}
    return Case(design.program, inputs, "c", expected, tolerance, pixels)


def gated_gemm_case(design: Gemm, m: int, k: int, n: int, rng: Rng) -> Case:
    """act(A gate) * (A up); padding is zero along K, and random along M, where it must not matter."""
    rows, inner = design.padded(m, k)
    a = bf16(rng.normal(size=(rows, inner)) / 16)
    a[:, k:] = 0
    halves = [bf16(rng.normal(size=(inner, n))) for _ in range(2)]
    sums, errors = [], []
    for half in halves:
        left, right = as_multiplied(a, half, design.target)
        sums.append(left @ right)
        errors.append((inner + 1) * F32_ROUNDING * (np.abs(left) @ np.abs(right)))
    b = operand(woven(halves[0], halves[1], design.n), design.weights)
    expected, tolerance = gated(sums, errors, design.epilogue)
    return Case(partial(design.program, m, k, n), {"a": a, "b": b}, "c", expected, tolerance)


def gemm_tile_case(design: OneTile, weights: str, rng: Rng) -> Case:
    """One call of GEMM's kernel: a tile of A times a tile of B."""
    m, k, n = GEMM_TILE
    a, b = bf16(rng.normal(size=(m, k))), bf16(rng.normal(size=(k, n)))
    left, right = as_multiplied(a, b, design.target)
    expected = left @ right
    tolerance = (k + 1) * F32_ROUNDING * (np.abs(left) @ np.abs(right))
    tolerance = tolerance + BF16_ROUNDING * (np.abs(expected) + tolerance)
    inputs = {"a": tiled(a), "b": operand(b, weights)}
    return Case(partial(design.program, 1), inputs, "c", expected, tolerance, lambda c: untiled(c, m, n))

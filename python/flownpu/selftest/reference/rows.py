# SPDX-License-Identifier: Apache-2.0
"""Cases of operators on rows: norms, RoPE, gated activations, pooling."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flownpu.aie.designs.one_tile import ROW, ROW_HEADS
from flownpu.ops.definitions import flow_qkv_attention
from flownpu.selftest.reference.case import Case
from flownpu.selftest.reference.numbers import BF16_ROUNDING, F32_ROUNDING, INVERSE, PRODUCT, bf16, wide
from flownpu.selftest.reference.projections import ACTIVATIONS, activation_tolerance

if TYPE_CHECKING:
    from flownpu.aie.designs.copy import Copy
    from flownpu.aie.designs.norm_rope import NormRope
    from flownpu.aie.designs.one_tile import OneTile
    from flownpu.aie.designs.patch_pooling import PatchPooling
    from flownpu.aie.designs.vector_operators import ResidualLayerNorm, ResidualRMSNorm, RMSNorm

    Rng = np.random.Generator

_PAD = 32  # elements by which a line is longer than the row that it holds


def copy_cases(design: Copy, rows: int, rng: Rng) -> list[Case]:
    """Copies of the first part of each row, which must be exact; a case for each stream."""
    inputs = {f"x_{number}": bf16(rng.normal(size=(rows, design.n))) for number in range(design.streams)}
    return [
        Case(partial(design.program, rows), inputs, f"y_{number}", wide(x[:, : design.part]), 0.0)
        for number, x in enumerate(inputs.values())
    ]


def rms_norm_case(design: RMSNorm, rows: int, rng: Rng) -> Case:
    """Rows divided by their root mean square, times a weight."""
    x, weight = bf16(rng.normal(size=(rows, design.n)) * 3), bf16(rng.normal(size=design.n))
    expected = _rms(wide(x), wide(weight))
    # Errors of 1/n, of the inverse root (its argument's error counts half), of f32 sums and of two split products.
    relative = BF16_ROUNDING + 2 * INVERSE + design.n * F32_ROUNDING + 2 * PRODUCT
    make = partial(design.program, rows, 1e-6)
    return Case(make, {"x": x, "weight": weight}, "y", expected, relative * np.abs(expected))


def _rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight)


def residual_rms_norm_case(design: ResidualRMSNorm, rows: int, rng: Rng, *, output: str = "s") -> Case:
    """Outputs s = x + residual and y = norm(s); or, if the design normalises first, s = residual + norm(x)."""
    x, residual = (bf16(rng.normal(size=(rows, design.n)) * 3) for _ in range(2))
    weight = bf16(rng.normal(size=design.n))
    relative = 2 * INVERSE + design.n * F32_ROUNDING + 2 * PRODUCT  # as in rms_norm_case
    summed = bf16(x.astype(np.float32) + residual.astype(np.float32))
    if design.norm_first:
        normal = _rms(wide(x), wide(weight))
        expected = wide(residual) + normal
        tolerance = relative * np.abs(normal) + BF16_ROUNDING * np.abs(expected) + 2.0**-20
    elif output == "s":
        expected, tolerance = wide(summed), np.zeros(x.shape)  # two bf16 numbers' f32 sum, rounded to the nearest
    else:
        expected = _rms(wide(summed), wide(weight))
        tolerance = (relative + BF16_ROUNDING) * np.abs(expected)
    inputs = {"x": x, "residual": residual, "weight": weight}
    return Case(partial(design.program, rows, 1e-6), inputs, output, expected, tolerance)


def residual_layer_norm_case(design: ResidualLayerNorm, rows: int, rng: Rng, *, output: str = "y") -> Case:
    """Outputs s = x + residual and y = layer norm(s); lines of x and y are longer than a row."""
    n, line = design.n, design.n + _PAD
    x, affine = bf16(rng.normal(size=(rows, line)) * 3), bf16(rng.normal(size=(2, n)))
    residual, before = bf16(rng.normal(size=(rows, n)) * 3 + 2), bf16(rng.normal(size=(rows, line)))
    weight, bias = wide(affine)
    summed = wide(bf16(x[:, :n].astype(np.float32) + residual.astype(np.float32)))
    if output == "s":
        expected, tolerance = summed, np.zeros(summed.shape)  # two bf16 numbers' f32 sum, rounded to the nearest
    else:
        mean, deviation = summed.mean(-1, keepdims=True), summed.std(-1, keepdims=True)
        normal = (summed - mean) / np.sqrt(deviation**2 + 1e-6) * weight
        # `shift`: the mean's error, from 1/n and f32 sums, divided by the deviation. The rest is that of RMSNorm, with
        # 3 products.
        shift = (INVERSE + n * F32_ROUNDING) * np.abs(mean) / deviation * np.abs(weight)
        relative = 3 * PRODUCT + 2 * INVERSE + n * F32_ROUNDING
        expected, tolerance = wide(before), np.zeros(before.shape)
        expected[:, :n] = normal + bias
        tolerance[:, :n] = BF16_ROUNDING * np.abs(normal + bias) + relative * np.abs(normal) + shift + 2.0**-20
    inputs = {"x": x, "residual": residual, "weight_and_bias": affine, "y": before}
    return Case(partial(design.program, rows, 1e-6, x_line=line, y_line=line), inputs, output, expected, tolerance)


def rope_case(design: OneTile, rng: Rng) -> Case:
    """One call of RoPE's kernel: the heads of a token at position 5."""
    heads, d = ROW_HEADS, ROW // ROW_HEADS
    angle = 5 * 10000.0 ** (-2 * np.arange(d // 2) / d)
    table, x = bf16(np.concatenate([np.cos(angle), np.sin(angle)])), bf16(rng.normal(size=(heads, d)))
    cosine, sine = np.split(wide(table), 2)
    a, b = np.split(wide(x), 2, axis=1)
    expected = np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=1)
    # Products are exact, their difference is rounded to f32 and to bf16.
    tolerance = BF16_ROUNDING * np.abs(expected) + 2 * F32_ROUNDING * np.tile(np.abs(a) + np.abs(b), 2)
    return Case(partial(design.program, 1), {"x": x, "table": table}, "y", expected, tolerance)


def gated_activation_case(design: OneTile, rng: Rng) -> Case:
    """One call of GeGLU's or SwiGLU's kernel."""
    gate, up = bf16(rng.normal(size=ROW) * 3), bf16(rng.normal(size=ROW))
    act = ACTIVATIONS[design.kernel](wide(gate))
    expected = act * wide(up)
    tolerance = activation_tolerance(wide(gate), act) * np.abs(wide(up)) + (PRODUCT + BF16_ROUNDING) * np.abs(expected)
    return Case(partial(design.program, 1), {"gate": gate, "up": up}, "y", expected, tolerance)


def norm_rope_case(
    design: NormRope, tokens: int, position: int, rng: Rng, *, capacity: int = 256, output: str = "cache"
) -> Case:
    """A chunk of tokens with the second of two rotary tables: the operator's keys and values are expected in the cache.

    The cache is full of numbers, and must keep those of other positions. The expected queries are those that the
    operator would append as keys.
    """
    heads, kv_heads, d = design.heads, design.kv_heads, design.d
    x = bf16(rng.normal(size=(tokens, heads + 2 * kv_heads, d)) * 2)
    cache, norms = bf16(rng.normal(size=(capacity, kv_heads, 2, d))), bf16(rng.uniform(0.5, 1.5, (2, d)))
    angle = np.arange(capacity)[:, None] * 10000.0 ** (-2 * np.arange(d // 2) / d)
    rotary = bf16([np.concatenate([f(angle), g(angle)], 1) for f, g in ((np.sin, np.cos), (np.cos, np.sin))])
    queries, keys, values = np.split(wide(x), [heads, heads + kv_heads], axis=1)

    def turned(heads: np.ndarray, weight: np.ndarray) -> np.ndarray:
        row, count = heads.reshape(1, tokens, -1), heads.shape[1]
        norm = wide(weight) if design.qk_norm else None
        past, (cosine, sine) = np.zeros((1, count, capacity, d)), np.split(wide(rotary[1]), 2, axis=1)
        present = flow_qkv_attention.reference(
            row, row, row, past, past, np.array([position + tokens - 1]), np.array([capacity]), cosine, sine,
            q_norm_weight=norm, k_norm_weight=norm, num_heads=count, kv_num_heads=count, head_size=d, do_rotary=1,
        )[1]  # fmt: skip
        return np.asarray(present[0, :, position : position + tokens].swapaxes(0, 1))

    def off(heads: np.ndarray, weight: np.ndarray, expected: np.ndarray) -> np.ndarray:
        # As in the kernels rope and rms_norm_rope: products are exact, except the norm's; one rounding to bf16.
        operand = 2 * F32_ROUNDING
        if design.qk_norm:
            heads = _rms(heads, wide(weight))
            operand = (1 + BF16_ROUNDING) * (2 * INVERSE + d * F32_ROUNDING + 3 * PRODUCT + 4 * F32_ROUNDING)
        magnitude = np.tile(np.abs(heads[..., : d // 2]) + np.abs(heads[..., d // 2 :]), 2)
        return np.asarray(BF16_ROUNDING * np.abs(expected) + operand * magnitude)

    if output == "q":
        expected = turned(queries, norms[0])
        tolerance = off(queries, norms[0], expected)
    else:
        here = slice(position, position + tokens)
        expected, tolerance = wide(cache), np.zeros(cache.shape)
        expected[here, :, 0], expected[here, :, 1] = turned(keys, norms[1]), values
        tolerance[here, :, 0] = off(keys, norms[1], expected[here, :, 0])
    inputs = {"qkv": x, "rotary": rotary, "cache": cache} | ({"norms": norms} if design.qk_norm else {})
    make = partial(design.program, tokens, position, capacity, tables=2, table=1)
    return Case(make, inputs, output, expected, tolerance)


def patch_pooling_case(design: PatchPooling, grid: int, rng: Rng) -> Case:
    """The mean of each square of patches."""
    side, n = design.side, design.n
    x = bf16(rng.normal(size=(grid, grid, n)))
    squares = wide(x).reshape(grid // side, side, grid // side, side, n)
    expected, magnitude = squares.mean((1, 3)), np.abs(squares).mean((1, 3))
    tolerance = (BF16_ROUNDING + INVERSE + PRODUCT) * np.abs(expected) + side**2 * F32_ROUNDING * magnitude
    return Case(partial(design.program, grid), {"x": x}, "y", expected, tolerance)


def pooled_norm_case(design: PatchPooling, grid: int, rng: Rng) -> Case:
    """The RMS norm of the mean of each square of patches; epsilon is about the mean's square, so that it matters."""
    side, n, epsilon = design.side, design.n, 0.1
    x, weight = bf16(rng.normal(size=(grid, grid, n))), bf16(rng.normal(size=n))
    squares = wide(x).reshape(grid // side, side, grid // side, side, n)
    mean, magnitude = squares.mean((1, 3)), np.abs(squares).mean((1, 3))
    inverse = 1 / np.sqrt((mean**2).mean(-1, keepdims=True) + epsilon)
    expected = mean * inverse * wide(weight)
    # Errors of the root's argument, which count half: a split square, its f32 sum and 1/n; of the inverse root and two
    # products. The tolerance adds the f32 additions of the mean.
    relative = PRODUCT / 2 + (INVERSE + n * F32_ROUNDING) / 2 + INVERSE + 2 * PRODUCT + BF16_ROUNDING
    tolerance = relative * np.abs(expected) + side**2 * F32_ROUNDING * magnitude * inverse * np.abs(wide(weight))
    return Case(partial(design.program, grid, epsilon=epsilon), {"x": x, "weight": weight}, "y", expected, tolerance)

# SPDX-License-Identifier: Apache-2.0
"""Cases of operators on rows: norms, RoPE, gated activations, pooling."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flownpu.aie.designs.one_tile import ROW, ROW_HEADS
from flownpu.selftest.reference.case import Case
from flownpu.selftest.reference.numbers import BF16_ROUNDING, F32_ROUNDING, INVERSE, PRODUCT, bf16, wide

if TYPE_CHECKING:
    from flownpu.aie.designs.copy import Copy
    from flownpu.aie.designs.one_tile import OneTile
    from flownpu.aie.designs.patch_pooling import PatchPooling
    from flownpu.aie.designs.vector_operators import ResidualRMSNorm, RMSNorm

    Rng = np.random.Generator


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

# SPDX-License-Identifier: Apache-2.0
"""More cases for the emulator: dequantisation engine, gated GEMM, projections from Q4NX blocks, norms, RoPE, pooling.

As in tests/aie/cases.py: random inputs, float64 references, tolerances of the kernels' tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flownpu.aie.designs.bias import bias_column, with_bias
from flownpu.aie.designs.decode_layer_shape import interleave
from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.ops import q4nx
from flownpu.ops.definitions import flow_qkv_attention, fused_dqp, q4nx_matmul
from tests.aie.cases import STEEPEST, activation_tolerance, projection_tolerance, random_weight
from tests.aie.emulation import Case, emulate, plan_of
from tests.aie.host_kernels import (
    BF16_ROUNDING,
    BFLOAT16,
    EXP2,
    F32_ROUNDING,
    INVERSE,
    PRODUCT,
    bf16,
    blocks_of,
    panels,
    wide,
)

if TYPE_CHECKING:
    from flownpu.aie.designs.fused_dqp import FusedDQP
    from flownpu.aie.designs.gemm import Gemm
    from flownpu.aie.designs.norm_rope import NormRope
    from flownpu.aie.designs.patch_pooling import PatchPooling
    from flownpu.aie.designs.vector_operators import ResidualRMSNorm, Softmax

    Rng = np.random.Generator

__all__ = [
    "biased_fused_dqp_case",
    "dequant_engine_case",
    "gated_gemm_case",
    "norm_rope_case",
    "patch_pooling_case",
    "product_error",
    "projection_case",
    "residual_rms_norm_case",
    "softmax_case",
]

ACTIVATIONS = {"geglu": q4nx_matmul.gelu, "swiglu": q4nx_matmul.silu}


def woven(gate: np.ndarray, up: np.ndarray, n: int) -> np.ndarray:
    """[K, 2 N] of n columns of the gate, the same n of the up projection, and so on."""
    parts = (
        part for start in range(0, gate.shape[1], n) for part in (gate[:, start : start + n], up[:, start : start + n])
    )
    return np.concatenate(list(parts), axis=1)


def operand(b: np.ndarray, weights: str) -> np.ndarray:
    """`panels` of B [K, N] in bf16 or, as bytes, in bfp16 (kernels/README.md)."""
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


def dequant_engine_case(
    engine: DequantEngine, m: int, k: int, rng: Rng, *, gated: bool = False, interleaved: bool = False
) -> Case:
    """Blocks of random weights; what comes out is exact: one rounding to f32 and one to bf16, one more to bfp16."""
    blocks = np.concatenate([random_weight(rng, m, k)[0] for _ in range(2 if gated else 1)])
    height, width = -(-m // 32) * 32, -(-k // 256) * 256
    parts = [bf16(q4nx.dequantize(part, height, width)).T for part in np.split(blocks, 2 if gated else 1)]
    b = operand(woven(*parts, 64) if gated else parts[0], engine.weights)
    plan = plan_of(engine.program(m, k, gated=gated, interleaved=interleaved))
    return Case(plan, {"w": interleave(blocks) if interleaved else blocks}, "b", b.astype(np.float64), 0.0)


def gated_gemm_case(design: Gemm, m: int, k: int, n: int, rng: Rng) -> Case:
    """act(A gate) (A up); padding holds zeros along K and numbers that must not matter along M."""
    rows, inner = design.padded(m, k)
    a = bf16(rng.normal(size=(rows, inner)) / 16)
    a[:, k:] = 0
    halves = [bf16(rng.normal(size=(inner, n))) for _ in range(2)]
    sums, errors = [], []
    for half in halves:
        left, right = as_multiplied(a, half, design.target)
        sums.append(left @ right)
        errors.append((inner + 1) * F32_ROUNDING * (np.abs(left) @ np.abs(right)))
    b = operand(woven(*halves, design.n), design.weights)
    expected, tolerance = gated(sums, errors, design.epilogue)
    return Case(plan_of(design.program(m, k, n)), {"a": a, "b": b}, "c", expected, tolerance)


def gated(sums: list[np.ndarray], errors: list[np.ndarray], gating: str) -> tuple[np.ndarray, np.ndarray]:
    """act(gate) up of two sums with errors, and how far the stored product may be off."""
    (gate, up), (gate_error, up_error) = sums, errors
    act = ACTIVATIONS[gating](gate)
    expected = act * up
    act_error = STEEPEST * gate_error + activation_tolerance(gate, act)
    tolerance = act_error * (np.abs(up) + up_error) + np.abs(act) * up_error + PRODUCT * np.abs(expected)
    return expected, tolerance + BF16_ROUNDING * (np.abs(expected) + tolerance)


def product_error(x: np.ndarray, weight: np.ndarray, inner: int, *, in_blocks: bool) -> np.ndarray:
    """How far GEMM's sums are from x [m, k] times weight [n, k] of float64, before they are rounded.

    Weights are rounded to bf16; in blocks a mantissa's rounding is half of 2^-6 of its block's power of two, all of it
    where it saturates, of both operands; sums over `inner` are f32.
    """
    error = (BF16_ROUNDING + (inner + 1) * F32_ROUNDING) * (np.abs(x) @ np.abs(weight).T)
    if in_blocks:
        k = x.shape[1]
        largest_x, largest_w = (
            np.repeat(np.abs(np.pad(part, ((0, 0), (0, -k % 8)))).reshape(len(part), -1, 8).max(-1), 8, 1)[:, :k]
            for part in (x, weight)
        )
        error += 2.0**-6 * (largest_x @ np.abs(weight).T + np.abs(x) @ largest_w.T)
        error += 2.0**-12 * largest_x @ largest_w.T
    return np.asarray(1.02 * error)  # rounded operands are larger by up to 2^-6 of a term of 2^-8


def projection_case(
    design: Gemm, m: int, k: int, n: int, rng: Rng, *, gating: str = "none", with_bias_of: float = 0.0,
    unpadded: bool = False,
) -> Case:  # fmt: skip
    """The operator Q4NXMatMul in prefill: the engine turns the blocks, GEMM multiplies; against the operator itself.

    `with_bias_of`: the bias's size, 0 for none. `unpadded`: rows of A are K long, a multiple of 32, and so those of
    other tokens are read beyond it.
    """
    parts = [random_weight(rng, n, k)[0] for _ in range(2 if gating != "none" else 1)]
    blocks, x = np.concatenate(parts), bf16(rng.normal(size=(m, k)) / (16 if gating != "none" else 1))
    bias = (rng.normal(size=n) * with_bias_of).astype(np.float32) if with_bias_of else None
    expected = q4nx_matmul.reference(wide(x), blocks, bias, rows=n, columns=k, gating=gating)

    held, columns = (blocks, k) if bias is None else (with_bias(blocks, bias, k), bias_column(k) + 1)
    rows, inner = design.padded(m, columns)
    a = np.zeros((rows, inner), BFLOAT16)
    a[:m, :k] = x
    if bias is not None:
        a[:m, bias_column(k)] = 1
    if unpadded:
        a = bf16(rng.normal(size=(rows - 1) * k + inner))
        a[: m * k] = x.reshape(-1)
    engine = DequantEngine(design.target, design.weights)
    b = emulate(engine.program(n, columns, gated=gating != "none"), w=held)["b"]

    sums, errors = [], []
    for part in parts:
        weight = q4nx.dequantize(part, n, k).astype(np.float64)
        error = product_error(wide(x), weight, inner, in_blocks=design.target == "npu2")
        if bias is not None:  # rounded as the weight is
            of_bias = BF16_ROUNDING + (inner + 1) * F32_ROUNDING + (2.0**-6 if design.target == "npu2" else 0)
            error += 1.02 * of_bias * np.abs(bias)
        sums.append(wide(x) @ weight.T)
        errors.append(error)
    if gating != "none":
        _, tolerance = gated(sums, errors, gating)
    else:
        tolerance = errors[0] + BF16_ROUNDING * (np.abs(expected) + errors[0])
    return Case(
        plan_of(design.program(m, columns, n, line=k if unpadded else 0)), {"a": a, "b": b}, "c", expected, tolerance,
        lambda c: c.reshape(rows, n)[:m],
    )  # fmt: skip


def biased_fused_dqp_case(design: FusedDQP, m: int, k: int, rng: Rng) -> Case:
    """One row times a random weight [m, k], plus a bias, which the weight's blocks hold."""
    blocks, weight = random_weight(rng, m, k)
    bias, x = bf16(rng.normal(size=m)), np.zeros(design.k_max, BFLOAT16)
    x[:k], x[bias_column(k)] = bf16(rng.normal(size=k)), 1
    expected = fused_dqp.reference(wide(x[:k]), blocks, bias, rows=m, columns=k)
    sums = projection_tolerance(weight, x[:k]) + 2.0**-16 * np.abs(wide(bias))
    tolerance = sums + BF16_ROUNDING * (np.abs(expected) + sums)
    inputs = {"w": with_bias(blocks, bias.astype(np.float32), k), "x": x}
    return Case(plan_of(design.program(m, bias_column(k) + 1)), inputs, "y", expected, tolerance)


def _rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight)


def residual_rms_norm_case(design: ResidualRMSNorm, rows: int, rng: Rng, *, output: str = "s") -> Case:
    """s = x + residual, y = norm(s); or s = residual + norm(x)."""
    x, residual = (bf16(rng.normal(size=(rows, design.n)) * 3) for _ in range(2))
    weight = bf16(rng.normal(size=design.n))
    relative = 2 * INVERSE + design.n * F32_ROUNDING + 2 * PRODUCT  # as of RMSNorm
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
    return Case(plan_of(design.program(rows, 1e-6)), inputs, output, expected, tolerance)


def softmax_case(design: Softmax, rows: int, n: int, rng: Rng) -> Case:
    """Scores of a few units; what lies beyond the columns that count does not, and comes out as 0."""
    x = (rng.normal(size=(rows, design.line)) * 6).astype(np.float32)
    x[:, n:] = 1e9
    known = wide(x[:, :n])
    power = np.exp(known - known.max(-1, keepdims=True))
    expected = np.zeros(x.shape)
    expected[:, :n] = power / power.sum(-1, keepdims=True)
    # Of each power: its exponent's product, exp2; of the sum the same, f32 additions; its inverse and the last product.
    error = np.zeros(x.shape)
    error[:, :n] = np.log(2) * 1.4427 * (known.max(-1, keepdims=True) - known) * PRODUCT + EXP2
    average = (error * expected).sum(-1, keepdims=True)
    relative = BF16_ROUNDING + error + average + n * F32_ROUNDING + INVERSE + PRODUCT
    return Case(plan_of(design.program(rows, n)), {"x": x}, "y", expected, relative * expected)


def norm_rope_case(
    design: NormRope, tokens: int, position: int, rng: Rng, *, capacity: int = 256, output: str = "cache"
) -> Case:
    """A chunk of tokens by the second of two tables, against the keys and values that the operator appends.

    A cache that is full of numbers keeps those of other positions. What is expected of the queries is what the operator
    makes of them as keys.
    """
    heads, kv_heads, d = design.heads, design.kv_heads, design.d
    x = bf16(rng.normal(size=(tokens, heads + 2 * kv_heads, d)) * 2)
    cache, norms = bf16(rng.normal(size=(capacity, kv_heads, 2, d))), bf16(rng.uniform(0.5, 1.5, (2, d)))
    angle = np.arange(capacity)[:, None] * 10000.0 ** (-2 * np.arange(d // 2) / d)
    rotary = bf16([np.concatenate([f(angle), g(angle)], 1) for f, g in ((np.sin, np.cos), (np.cos, np.sin))])
    queries, keys, values = np.split(wide(x), [heads, heads + kv_heads], axis=1)

    def turned(heads: np.ndarray, weight: np.ndarray) -> np.ndarray:
        row, count = heads.reshape(1, tokens, -1), heads.shape[1]
        of_norm = {"q_norm_weight": wide(weight), "k_norm_weight": wide(weight)} if design.qk_norm else {}
        past = [np.zeros((1, count, capacity, d))] * 2
        present = flow_qkv_attention.reference(
            row, row, row, *past, np.array([position + tokens - 1]), np.array([capacity]),
            *np.split(wide(rotary[1]), 2, axis=1), num_heads=count, kv_num_heads=count, head_size=d, do_rotary=1,
            **of_norm,
        )[1]  # fmt: skip
        return present[0, :, position : position + tokens].swapaxes(0, 1)

    def off(heads: np.ndarray, weight: np.ndarray, expected: np.ndarray) -> np.ndarray:
        # As of the kernels rope and rms_norm_rope: products are exact but for the norm's; one rounding to bf16.
        operand = 2 * F32_ROUNDING
        if design.qk_norm:
            heads = _rms(heads, wide(weight))
            operand = (1 + BF16_ROUNDING) * (2 * INVERSE + d * F32_ROUNDING + 3 * PRODUCT + 4 * F32_ROUNDING)
        magnitude = np.tile(np.abs(heads[..., : d // 2]) + np.abs(heads[..., d // 2 :]), 2)
        return BF16_ROUNDING * np.abs(expected) + operand * magnitude

    if output == "q":
        expected = turned(queries, norms[0])
        tolerance = off(queries, norms[0], expected)
    else:
        here = slice(position, position + tokens)
        expected, tolerance = wide(cache), np.zeros(cache.shape)
        expected[here, :, 0], expected[here, :, 1] = turned(keys, norms[1]), values
        tolerance[here, :, 0] = off(keys, norms[1], expected[here, :, 0])
    inputs = {"qkv": x, "rotary": rotary, "cache": cache} | ({"norms": norms} if design.qk_norm else {})
    plan = plan_of(design.program(tokens, position, capacity, tables=2, table=1))
    return Case(plan, inputs, output, expected, tolerance)


def patch_pooling_case(design: PatchPooling, grid: int, rng: Rng) -> Case:
    """The mean of each square of patches."""
    side, n = design.side, design.n
    x = bf16(rng.normal(size=(grid, grid, n)))
    squares = wide(x).reshape(grid // side, side, grid // side, side, n)
    expected, magnitude = squares.mean((1, 3)), np.abs(squares).mean((1, 3))
    tolerance = (BF16_ROUNDING + INVERSE + PRODUCT) * np.abs(expected) + side**2 * F32_ROUNDING * magnitude
    return Case(plan_of(design.program(grid)), {"x": x}, "y", expected, tolerance)

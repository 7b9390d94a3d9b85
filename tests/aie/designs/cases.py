# SPDX-License-Identifier: Apache-2.0
"""Cases for the emulator: those of the package (flownpu.selftest.reference), and a projection as prefill makes it.

Tolerances are no larger than those of the kernels' tests, because the array only moves the kernels' results.
"""

import numpy as np

from flownpu._native import ConvolutionSizes
from flownpu.aie.designs.bias import bias_column, with_bias
from flownpu.aie.designs.convolution import Convolution
from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.gemm import Gemm
from flownpu.ops import q4nx
from flownpu.ops.definitions import q4nx_matmul
from flownpu.selftest.reference import attention, projections, rows
from flownpu.selftest.reference.projections import gated, random_weight
from tests.aie.emulation import Case, emulate, emulated, plan_of
from tests.aie.host_kernels import BF16_ROUNDING, BFLOAT16, F32_ROUNDING, bf16, wide

Rng = np.random.Generator

fused_dqp_case = emulated(projections.fused_dqp_case)
biased_fused_dqp_case = emulated(projections.biased_fused_dqp_case)
dequant_engine_case = emulated(projections.dequant_engine_case)
gemm_case = emulated(projections.gemm_case)
convolution_case = emulated(projections.convolution_case)
gated_gemm_case = emulated(projections.gated_gemm_case)
flow_kv_case = emulated(attention.flow_kv_case)
flow_qkv_case = emulated(attention.flow_qkv_case)
rms_norm_case = emulated(rows.rms_norm_case)
residual_rms_norm_case = emulated(rows.residual_rms_norm_case)
pooled_norm_case = emulated(rows.pooled_norm_case)


def convolution(
    gemm: Gemm, channels: int, filters: int, height: int, width: int, batch: int = 1,
    pads: tuple[int, int, int, int] = (1, 1, 1, 1), **others: int,
) -> Convolution:  # fmt: skip
    """A convolution of 3 x 3 taps, unless `others`, by the names of its sizes, say more."""
    padded = dict(zip(("pad_top", "pad_left", "pad_bottom", "pad_right"), pads, strict=True))
    sizes = ConvolutionSizes(channels=channels, filters=filters, height=height, width=width, **padded, **others)
    return Convolution(gemm, sizes, batch)


def product_error(x: np.ndarray, weight: np.ndarray, inner: int, *, in_blocks: bool) -> np.ndarray:
    """Bounds the error of GEMM's sums, before they are rounded, from x [m, k] times weight [n, k] in float64: [m, n].

    Weights are rounded to bf16. `in_blocks`: the mantissas of both operands are rounded, too, which errs by half of
    2^-6 of their block's power of two, by all of 2^-6 where one saturates. Sums over `inner` products are f32.
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
    return np.asarray(1.02 * error)  # the terms of 2^-8 are of rounded operands, larger by up to 2^-6


def projection_case(
    design: Gemm, m: int, k: int, n: int, rng: Rng, *, gating: str = "none", with_bias_of: float = 0.0,
    unpadded: bool = False,
) -> Case:  # fmt: skip
    """Q4NXMatMul as prefill computes it, against the operator: the engine makes tiles of the blocks, GEMM multiplies.

    `with_bias_of`: the bias's standard deviation, 0 for no bias. `unpadded`: A's rows are only K long, a multiple of
    32, so GEMM, which pads K, reads on into the next row.
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
        if bias is not None:  # the bias is rounded as the weight is
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

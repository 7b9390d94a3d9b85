# SPDX-License-Identifier: Apache-2.0
"""Small cases of every design, and series of calls on one array: for planted mistakes and for random schedules."""

from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.patch_pooling import PatchPooling
from flownpu.aie.designs.vector_operators import ResidualRMSNorm, RMSNorm
from tests.aie.designs.cases import (
    dequant_engine_case,
    flow_kv_case,
    flow_qkv_case,
    fused_dqp_case,
    gated_gemm_case,
    gemm_case,
    pooled_norm_case,
    projection_case,
    residual_rms_norm_case,
    rms_norm_case,
)


def small_gemm(target="npu1", weights="bf16", **changes):
    return Gemm(target, weights, m=8, n=32, k=16, k_mt=32, **changes)


SMALL_CASES = {
    "fused_dqp": lambda rng: fused_dqp_case(FusedDQP("npu1", 512, 16), 672, 300, rng),
    "fused_dqp geglu": lambda rng: fused_dqp_case(FusedDQP("npu2", 512, 32, "geglu"), 1056, 300, rng),
    "dequant_engine": lambda rng: dequant_engine_case(DequantEngine("npu1"), 96 * 5, 300, rng),
    "dequant_engine gated": lambda rng: dequant_engine_case(DequantEngine("npu1"), 320, 300, rng, gated=True),
    "dequant_engine interleaved": lambda rng: dequant_engine_case(
        DequantEngine("npu1"), 320, 300, rng, gated=True, interleaved=True
    ),
    "gemm": lambda rng: gemm_case(small_gemm(), 40, 100, 160, rng),
    "gemm megatile": lambda rng: gemm_case(small_gemm(e_y=2, e_x=2), 70, 100, 480, rng),
    "gemm without padding": lambda rng: projection_case(
        Gemm("npu1", m=8, n=32, k=32), 60, 288, 160, rng, unpadded=True
    ),
    "gemm swiglu": lambda rng: gated_gemm_case(small_gemm(epilogue="swiglu"), 40, 100, 160, rng),
    "gemm without swiglu": lambda rng: gemm_case(small_gemm(epilogue="swiglu"), 40, 100, 480, rng, plain=True),
    "flow_kv": lambda rng: flow_kv_case(FlowKV("npu1", 8, 4, 64, keys=16), 101, 128, rng, window=40),
    "flow_qkv": lambda rng: flow_qkv_case(FlowQKV("npu1", 4, 2, 64, 16, 16), 94, 17, 128, rng, window=40),
    "flow_qkv non-causal": lambda rng: flow_qkv_case(FlowQKV("npu2", 2, 1, 64, 16, 16), 94, 0, 128, rng, causal=False),
    # 64 rows of d = 128: outputs leave in eight parts, more than a channel's queue holds.
    "flow_qkv in parts": lambda rng: flow_qkv_case(FlowQKV("npu2", 8, 1, 128), 30, 17, 48, rng, window=20),
    "rms_norm": lambda rng: rms_norm_case(RMSNorm("npu1", 96, 3), 17, rng),
    "residual_rms_norm": lambda rng: [
        residual_rms_norm_case(ResidualRMSNorm("npu1", 96, cores=3), 17, rng, output=output) for output in "sy"
    ],
    "norm first": lambda rng: residual_rms_norm_case(ResidualRMSNorm("npu1", 96, True, 3), 17, rng),
    "patch_pooling": lambda rng: pooled_norm_case(PatchPooling("npu1", 48, 2, 3), 14, rng),
}

# Calls of other shapes on one array; some leave cores without work, and between them are calls that do not.
SERIES = {
    "fused_dqp": lambda rng: [
        fused_dqp_case(FusedDQP("npu2", 512), m, k, rng) for m, k in ((128, 300), (1056, 512), (128, 512), (1056, 300))
    ],
    "dequant_engine": lambda rng: [
        dequant_engine_case(DequantEngine("npu2"), m, k, rng, gated=gated, interleaved=interleaved)
        for m, k, gated, interleaved in ((100, 300, False, False), (192, 600, True, True), (128, 256, False, False))
    ],
    "gemm": lambda rng: [
        gemm_case(small_gemm("npu2", "bfp16", e_y=2), m, k, 288, rng) for m, k in ((1, 64), (130, 200), (17, 64))
    ],
    "gemm with and without swiglu": lambda rng: [
        make(small_gemm("npu2", "bfp16", epilogue="swiglu", e_y=2), 70, 100, 544, rng, **plain)
        for make, plain in ((gated_gemm_case, {}), (gemm_case, {"plain": True}), (gated_gemm_case, {}))
    ],
    "flow_kv": lambda rng: [
        flow_kv_case(FlowKV("npu2", 4, 2, 64), total, 128, rng, window=window)
        for total, window in ((1, None), (100, None), (17, None), (101, 40))
    ],
    "flow_qkv": lambda rng: [
        flow_qkv_case(FlowQKV("npu2", 4, 2, 64), tokens, past, 256, rng, window=window, causal=causal)
        for tokens, past, window, causal in ((5, 0, None, False), (130, 17, 40, True), (17, 0, None, True))
    ],
    "rms_norm": lambda rng: [rms_norm_case(RMSNorm("npu2", 96, 4), rows, rng) for rows in (1, 9, 2, 9)],
    "residual_rms_norm": lambda rng: [
        residual_rms_norm_case(ResidualRMSNorm("npu2", 96, cores=4), rows, rng) for rows in (1, 9, 2, 9)
    ],
}


def cases_of(design, rng):
    """The cases of a design: one for each output that is compared, of the same plan."""
    made = SMALL_CASES[design](rng)
    return made if isinstance(made, list) else [made]

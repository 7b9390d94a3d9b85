# SPDX-License-Identifier: Apache-2.0
"""Mistakes planted in every design are caught: by the checker, by the emulator, or by the numbers that come out."""

import pytest

from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.norm_rope import NormRope
from flownpu.aie.designs.patch_pooling import PatchPooling
from flownpu.aie.designs.vector_operators import ResidualRMSNorm, RMSNorm, RotaryEmbedding, Softmax
from tests.aie.designs.cases import (
    dequant_engine_case,
    flow_kv_case,
    flow_qkv_case,
    fused_dqp_case,
    gated_activation_case,
    gated_gemm_case,
    gemm_case,
    norm_rope_case,
    patch_pooling_case,
    projection_case,
    residual_rms_norm_case,
    rms_norm_case,
    rotary_embedding_case,
    softmax_case,
)
from tests.aie.designs.mutations import MUTATIONS, caught


def small_gemm(**changes):
    return Gemm("npu1", m=8, n=32, k=16, k_mt=32, **changes)


CASES = {
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
    "norm_rope": lambda rng: [
        norm_rope_case(NormRope("npu1", 4, 2, 64, True, 3), 17, 40, rng, output=output) for output in ("q", "cache")
    ],
    "norm_rope without norms": lambda rng: [
        norm_rope_case(NormRope("npu1", 6, 3, 32, cores=2), 17, 40, rng, output=output) for output in ("q", "cache")
    ],
    "softmax": lambda rng: softmax_case(Softmax("npu1", 64, 3), 17, 49, rng),
    "patch_pooling": lambda rng: patch_pooling_case(PatchPooling("npu1", 48, 2, 3), 14, rng),
    "rope": lambda rng: rotary_embedding_case(RotaryEmbedding("npu1", 3, 64, cores=3), 17, rng),
    "geglu": lambda rng: gated_activation_case("npu1", "geglu", 256 * 17, rng, cores=3),
    "swiglu": lambda rng: gated_activation_case("npu1", "swiglu", 256 * 17, rng, cores=3),
}

# By design, mutants that change no result: how their names begin, and why.
_NOT_ASKED_FOR = "another call of the array stores so, this one does not"
EQUIVALENT = {
    "gemm swiglu": {
        "missing_calls core (0, 2): store_bf16": _NOT_ASKED_FOR,
        "wrong_sizes core (0, 2): store_bf16": _NOT_ASKED_FOR,
    },
    "gemm without swiglu": {
        "missing_calls core (0, 2): store_silu_mul": _NOT_ASKED_FOR,
        "wrong_sizes core (0, 2): store_silu_mul": _NOT_ASKED_FOR,
    },
    "flow_kv": {
        "wrong_parameters k_0_parameters[3]": "the key after the last is hidden as one of the future, too",
        "wrong_parameters k_0_parameters[5]": "a token at the end sees every key, causal or not",
    },
    "flow_qkv": {"wrong_parameters tile_0_0_parameters[3]": "as in flow_kv"},
    "flow_qkv in parts": {"wrong_parameters tile_0_0_parameters[3]": "as in flow_kv"},
    "flow_qkv non-causal": {
        "wrong_parameters tile_0_0_parameters[1]": "where the queries are counts for causality and windows only",
        "wrong_parameters tile_0_0_parameters[7]": "and so does which rows are the same token",
    },
    "norm_rope": {
        "strides_of_transfers qkv_0_task6: stride 0": "a weight is sent once for each KV head, and read once",
    },
}


def cases_of(design, rng):
    """The cases of a design: one for each output that is compared, of the same plan."""
    made = CASES[design](rng)
    return made if isinstance(made, list) else [made]


@pytest.mark.parametrize("design", CASES)
def test_planted_mistakes_are_caught(rng, design):
    cases = cases_of(design, rng)
    for case in cases:
        case.check()
    survivors, planted = [], 0
    for mutation in MUTATIONS:
        for text, mutant in mutation(cases[0].plan):
            planted += 1
            name = f"{mutation.__name__} {text}"
            equivalent = any(name.startswith(known) for known in EQUIVALENT.get(design, {}))
            if not caught(cases, mutant) and not equivalent:
                survivors.append(name)
    assert survivors == []
    assert planted >= 25  # even the smallest design has room for as many


def test_mutations_apply_to_some_design(rng):
    plans = [cases_of(design, rng)[0].plan for design in CASES]
    assert [m.__name__ for m in MUTATIONS if all(not list(m(plan)) for plan in plans)] == []

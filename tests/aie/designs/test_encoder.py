# SPDX-License-Identifier: Apache-2.0
"""The designs of an encoder of images: on the emulator against references, and with planted mistakes."""

import pytest

from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.patch_pooling import PatchPooling
from tests.aie.designs.cases import pooled_norm_case
from tests.aie.designs.encoder_cases import biased_gemm_case, packed_flow_qkv_case
from tests.aie.emulation import emulator

TARGETS = ["npu1", "npu2"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("epilogue", ["none", "gelu"])
@pytest.mark.parametrize("k", [144, 150], ids=["whole groups", "a part of one"])
def test_gemm_with_bias_equals_reference(rng, target, epilogue, k):
    design = Gemm(target, epilogue=epilogue, m=16, n=32, k=32, k_mt=64)
    biased_gemm_case(design, 70, k, design.width + 32, rng).check()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(2, 2, 72), (4, 2, 64)])
@pytest.mark.parametrize("tokens", [17, 300])
def test_attention_over_packed_qkv_equals_reference(rng, target, heads, kv_heads, d, tokens):
    packed_flow_qkv_case(FlowQKV(target, heads, kv_heads, d), tokens, rng).check()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("n", "side", "cores", "grid"), [(48, 2, 3, 14), (16, 4, 1, 4), (64, 3, 4, 63)])
def test_pooling_with_norm_equals_reference(rng, target, n, side, cores, grid):
    pooled_norm_case(PatchPooling(target, n, side, cores), grid, rng).check()


def test_siglip_widths_equal_references(rng):
    biased_gemm_case(Gemm("npu2"), 17, 1152, 512, rng).check()
    packed_flow_qkv_case(FlowQKV("npu2", 16, 16, 72), 40, rng).check()
    pooled_norm_case(PatchPooling("npu2", 1152, cores=8), 8, rng).check()


SERIES = {
    "flow_qkv": lambda rng: [packed_flow_qkv_case(FlowQKV("npu2", 2, 2, 72), tokens, rng) for tokens in (130, 17)],
    "pooled_norm": lambda rng: [pooled_norm_case(PatchPooling("npu2", 48, 2, 3), grid, rng) for grid in (14, 2, 8)],
}


@pytest.mark.parametrize("design", SERIES)
def test_calls_of_other_shapes_on_one_array_equal_reference(rng, design):
    cases = SERIES[design](rng)
    array = emulator(cases[0].plan.array)
    for case in cases:
        assert case.plan.array == cases[0].plan.array
        case.check(array)
    assert array.leftovers() == []
    cases[0].fuzz(range(1, 20))

# SPDX-License-Identifier: Apache-2.0
"""Every design on the emulator, against its operator's float64 reference.

Reduced sizes for every kind of shape, and each operator once at the size of a model. Tolerances are derived where the
cases are made (flownpu/selftest/reference/).
"""

import pytest

from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.gemm import Gemm
from flownpu.aie.designs.vector_operators import ResidualRMSNorm, RMSNorm
from tests.aie.designs.cases import (
    biased_fused_dqp_case,
    convolution,
    convolution_case,
    dequant_engine_case,
    flow_kv_case,
    flow_qkv_case,
    fused_dqp_case,
    gated_gemm_case,
    gemm_case,
    projection_case,
    residual_rms_norm_case,
    rms_norm_case,
)
from tests.aie.emulation import plan_of
from tests.pairwise import pairwise

TARGETS = ["npu1", "npu2"]
KINDS = [("npu1", "bf16"), ("npu2", "bf16"), ("npu2", "bfp16")]

# --- Projections ----------------------------------------------------------------------------------------------------


ARRAYS = [("npu1", 16), ("npu2", 16), ("npu2", 28), ("npu2", 32)]


@pytest.mark.parametrize(
    ("array", "size", "epilogue"),
    # The least size, one column, an odd size, runs.
    pairwise(ARRAYS, [(128, 256), (160, 1), (1056, 300), (4128, 512)], ["none", "geglu", "swiglu"]),
)
def test_fused_dqp_equals_reference(rng, array, size, epilogue):
    target, tiles = array
    fused_dqp_case(FusedDQP(target, 512, tiles, epilogue), *size, rng).check()


@pytest.mark.parametrize(
    ("m", "k", "epilogue"), [(6912, 1152, "geglu"), (1152, 6912, "none"), (1536, 1152, "none")], ids=str
)
def test_fused_dqp_of_gemma3_1b_equals_reference(rng, m, k, epilogue):
    fused_dqp_case(FusedDQP("npu2", 6912, 32, epilogue), m, k, rng).check()


@pytest.mark.parametrize(("target", "tiles"), [("npu1", 16), ("npu2", 32)])
@pytest.mark.parametrize(("m", "k"), [(160, 1), (1056, 300), (4128, 512)])
def test_fused_dqp_of_alternating_rows_equals_reference(rng, target, tiles, m, k):
    fused_dqp_case(FusedDQP(target, 512, tiles, "swiglu"), m, k, rng, interleaved=True).check()


@pytest.mark.parametrize(("target", "tiles"), ARRAYS)
@pytest.mark.parametrize(("m", "k", "epilogue"), [(128, 256, "none"), (1056, 300, "swiglu"), (4128, 512, "none")])
def test_fused_dqp_of_eight_bits_equals_reference(rng, target, tiles, m, k, epilogue):
    design = FusedDQP(target, 512, tiles, epilogue)
    fused_dqp_case(design, m, k, rng, bits=8, interleaved=epilogue != "none").check()


@pytest.mark.parametrize("k", [300, 256], ids=["among the padding", "in blocks of its own"])
def test_fused_dqp_with_bias_equals_reference(rng, k):
    biased_fused_dqp_case(FusedDQP("npu2", 512), 160, k, rng).check()


@pytest.mark.parametrize(("target", "weights"), KINDS)
@pytest.mark.parametrize(("m", "k", "planes"), [(128, 256, 1), (100, 300, 1), (1152, 1152, 1), (100, 300, 2)])
def test_dequant_engine_equals_reference(rng, target, weights, m, k, planes):
    dequant_engine_case(DequantEngine(target, weights, planes), m, k, rng).check()


@pytest.mark.parametrize(
    ("kind", "size", "order"),
    # The least size, an odd one, two tasks; whether gate and up take turns, and planes.
    pairwise(KINDS, [(64, 256), (192, 600), (64, 64 * 256 + 1)], [(False, 1), (True, 1), (True, 2)]),
)
def test_dequant_engine_weaves_gate_and_up_projection(rng, kind, size, order):
    interleaved, planes = order
    dequant_engine_case(DequantEngine(*kind, planes), *size, rng, gated=True, interleaved=interleaved).check()


def test_dequant_engine_of_gemma3_1b_equals_reference(rng):
    dequant_engine_case(DequantEngine("npu2", "bfp16"), 1536, 1152, rng).check()


def small(target, weights, epilogue="none", **expansion):
    """An array with little padding: a supertile of 64 x 256 (npu1: 128)."""
    return Gemm(target, weights, epilogue, m=16, n=32, k=32, k_mt=64, **expansion)


@pytest.mark.parametrize(("target", "weights"), KINDS)
@pytest.mark.parametrize(("m", "e_y", "e_x"), [(130, 1, 1), (17, 2, 1), (1, 1, 2), (130, 2, 2)])
def test_gemm_equals_reference(rng, target, weights, m, e_y, e_x):
    design = small(target, weights, e_y=e_y, e_x=e_x)
    gemm_case(design, m, 200, design.width + 32, rng).check()


@pytest.mark.parametrize(("kind", "epilogue", "e_x"), pairwise(KINDS, ["gelu", "geglu", "swiglu"], [1, 2]))
def test_gemm_epilogues_equal_reference(rng, kind, epilogue, e_x):
    design = small(*kind, epilogue, e_x=e_x)
    make = gemm_case if epilogue == "gelu" else gated_gemm_case
    make(design, 70, 130, design.width + 32, rng).check()


@pytest.mark.parametrize(("target", "weights"), KINDS)
@pytest.mark.parametrize(("epilogue", "e_y", "e_x"), [("gelu", 1, 1), ("geglu", 2, 2), ("swiglu", 1, 1)])
def test_gemm_without_epilogue_equals_reference(rng, target, weights, epilogue, e_y, e_x):
    """A plain product on the array for an epilogue. If the epilogue makes one tile of two, both are stored."""
    design = small(target, weights, epilogue, e_y=e_y, e_x=e_x)
    case = gemm_case(design, 70, 130, design.plain().width + 32, rng, plain=True)
    case.check()
    assert case.plan.array == plan_of(design.program(1, 64, design.width)).array
    assert design.plain().width == design.gates * design.width


@pytest.mark.parametrize(("target", "weights"), KINDS)
def test_gemm_of_whole_array_equals_reference(rng, target, weights):
    design = Gemm(target, weights)
    gemm_case(design, 17, 300, design.width + 32, rng).check()
    gemm_case(Gemm(target, weights, e_y=2), 17, 300, 544, rng).check()
    gated_gemm_case(Gemm(target, weights, "geglu"), 17, 300, 576, rng).check()


@pytest.mark.parametrize(("target", "weights"), KINDS)
@pytest.mark.parametrize("e_x", [1, 2])
def test_gemm_narrower_than_megatile_equals_reference(rng, target, weights, e_x):
    """N of one column of tiles, of several columns, and of one column less than the array has."""
    design = small(target, weights, e_x=e_x)
    for n in (e_x * 32, 96, design.width - 32):
        gemm_case(design, 17, 130, n, rng).check()
    gated_gemm_case(small(target, weights, "geglu"), 17, 130, 96, rng).check()


@pytest.mark.parametrize(("m", "k", "n", "e_y"), [(1023, 256, 1024, 2), (257, 1152, 1536, 1)])
def test_gemm_of_gemma3_1b_equals_reference(rng, m, k, n, e_y):
    """The packed QKV projection, and (over part of K) as many rows as a prompt of 1023 tokens."""
    gemm_case(Gemm("npu2", "bfp16", e_y=e_y), m, k, n, rng).check()


@pytest.mark.parametrize(("target", "weights"), KINDS)
@pytest.mark.parametrize(
    ("picture", "channels", "windows"),
    [
        ((2, 9, 13), 18, {}),
        ((2, 8, 10), 22, {"stride": 2}),
        ((1, 7, 6), 34, {"pads": (0, 2, 1, 0)}),
        ((1, 1, 30), 24, {"kernel_height": 1, "pads": (0, 1, 0, 1)}),
        ((2, 4, 4), 8, {"kernel_height": 1, "kernel_width": 1, "pads": (0, 0, 0, 0)}),
    ],
    ids=["batch", "stride", "pads that differ", "one axis", "pixels alone"],
)
def test_convolution_equals_definition(rng, target, weights, picture, channels, windows):
    """Runs of taps that end in a channel tail, of less than k_mt and of more; borders of all sides."""
    batch, height, width = picture
    design = convolution(small(target, weights), channels, 64, height, width, batch, **windows)
    convolution_case(design, rng, whole_numbers=True).check()


@pytest.mark.parametrize(("target", "weights"), KINDS)
def test_convolution_of_long_sums_equals_definition(rng, target, weights):
    """K of 72 k_mt comes in by two tasks of B; numbers that are rounded in all places."""
    gemm = Gemm(target, weights, m=16, n=32, k=32, k_mt=32)
    convolution_case(convolution(gemm, 256, 64, 4, 4, 2), rng).check()


@pytest.mark.parametrize(("target", "weights"), KINDS)
@pytest.mark.parametrize(
    ("gating", "bias", "k"),
    [("none", 0, 300), ("none", 3, 300), ("none", 3, 256), ("geglu", 0, 300), ("swiglu", 0, 300)],
    ids=["plain", "bias", "bias in a block of its own", "geglu", "swiglu"],
)
def test_prefill_projections_equal_reference(rng, target, weights, gating, bias, k):
    """Q4NXMatMul as prefill runs it, dequantisation engine and GEMM, against the operator."""
    design = Gemm(target, weights, gating)
    projection_case(design, 17, k, design.width + 64, rng, gating=gating, with_bias_of=bias).check()


@pytest.mark.parametrize(("target", "weights"), KINDS)
@pytest.mark.parametrize("gating", ["none", "swiglu"])
def test_projections_of_rows_without_padding_equal_reference(rng, target, weights, gating):
    """Chunks of tokens that fill a megatile; each row's K ends where the next row begins."""
    design = Gemm(target, weights, gating, m=16)
    projection_case(design, 64, 352, 576, rng, gating=gating, unpadded=True).check()


# --- Attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", range(1, 9))
def test_attention_of_grouped_heads_equals_reference(rng, group):
    flow_kv_case(FlowKV("npu2", 2 * group, 2, 64), 100, 128, rng).check()
    flow_qkv_case(FlowQKV("npu2", group, 1, 64), 17, 30, 64, rng).check()


@pytest.mark.parametrize(("target", "d", "tokens"), pairwise(TARGETS, [64, 72, 128, 256], [1, 17, 1023]))
def test_flow_kv_equals_reference(rng, target, d, tokens):
    flow_kv_case(FlowKV(target, 4, 2, d), tokens, 1024, rng).check()
    flow_kv_case(FlowKV(target, 4, 1, d), tokens, 1024, rng, window=40).check()


@pytest.mark.parametrize(
    ("target", "heads", "kv_heads"), [("npu2", 9, 3), ("npu2", 32, 32), ("npu1", 16, 8), ("npu2", 18, 18)]
)
def test_flow_kv_of_more_heads_than_pairs_equals_reference(rng, target, heads, kv_heads):
    """Heads take turns. Each of six pairs takes three of 18 KV heads; two get their queries on a second stream."""
    flow_kv_case(FlowKV(target, heads, kv_heads, 64), 100, 128, rng).check()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(16, 2, 64), (5, 1, 72), (9, 3, 64)])
def test_attention_with_sinks_equals_reference(rng, target, heads, kv_heads, d):
    """One head's sink is far above its scores, and takes all of the weight; another's is far below them."""
    for window in (None, 40):
        flow_kv_case(FlowKV(target, heads, kv_heads, d, has_sinks=True), 100, 128, rng, window=window).check()
        design = FlowQKV(target, heads, kv_heads, d, has_sinks=True)
        flow_qkv_case(design, 17, 100, 128, rng, window=window).check()
    flow_qkv_case(design, 17, 0, 64, rng, causal=False).check()


@pytest.mark.parametrize("design", [FlowKV, FlowQKV])
def test_sinks_of_more_heads_than_fit_a_vector_are_refused(design):
    with pytest.raises(ValueError, match="expected 16 query heads or fewer to a KV head with sinks, got 17"):
        design("npu2", 17, 1, 64, has_sinks=True)


@pytest.mark.parametrize(("target", "d", "tokens"), pairwise(TARGETS, [64, 72, 128, 256], [1, 17]))
def test_flow_qkv_equals_reference(rng, target, d, tokens):
    design = FlowQKV(target, 4, 2, d)
    flow_qkv_case(design, tokens, 0, 64, rng).check()
    flow_qkv_case(design, tokens, 100, 128, rng).check()
    flow_qkv_case(design, tokens, 100, 128, rng, window=40).check()
    flow_qkv_case(design, tokens, 0, 64, rng, causal=False).check()


@pytest.mark.parametrize("window", [None, 40, 150], ids=["all", "shorter than the block", "longer"])
@pytest.mark.parametrize(("tokens", "past"), [(96, 0), (96, 101), (128, 128)])
def test_flow_qkv_of_block_equals_reference(rng, window, tokens, past):
    """Tokens that see one another, and the earlier keys within a window."""
    flow_qkv_case(FlowQKV("npu2", 4, 2, 64), tokens, past, 256, rng, window=window, block=True).check()


@pytest.mark.parametrize(
    ("d", "tokens", "window", "causal"), [(64, 1023, 40, True), (72, 400, None, False), (128, 400, None, True)]
)
def test_flow_qkv_of_many_tokens_equals_reference(rng, d, tokens, window, causal):
    flow_qkv_case(FlowQKV("npu2", 1, 1, d), tokens, 0, 1024, rng, window=window, causal=causal).check()


def test_attention_of_gemma3_1b_equals_reference(rng):
    flow_kv_case(FlowKV("npu2", 4, 1, 256), 1023, 1024, rng, window=512).check()
    flow_qkv_case(FlowQKV("npu2", 4, 1, 256), 300, 700, 1024, rng, window=512).check()


def test_flow_kv_of_llama3_1b_at_4096_tokens_equals_reference(rng):
    """There are more chunks than one task can repeat."""
    flow_kv_case(FlowKV("npu2", 32, 8, 64), 4095, 4096, rng).check()


# --- Operators on rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [1, 17, 1023])
def test_row_operators_equal_reference(rng, target, rows):
    """Fewer rows than cores, an odd number, and many."""
    rms_norm_case(RMSNorm(target, 96, 3), rows, rng).check()
    for design, output in ((False, "s"), (False, "y"), (True, "s")):
        residual_rms_norm_case(ResidualRMSNorm(target, 96, design, 3), rows, rng, output=output).check()


def test_row_operators_of_model_shapes_equal_reference(rng):
    """Gemma3-1B, SigLIP, Llama-3.1-8B: the widths that fill a compute tile's memory."""
    rms_norm_case(RMSNorm("npu2", 4096, 8), 1023, rng).check()
    residual_rms_norm_case(ResidualRMSNorm("npu2", 4096, cores=8), 257, rng, output="y").check()
    residual_rms_norm_case(ResidualRMSNorm("npu2", 1152, True, 8), 257, rng).check()

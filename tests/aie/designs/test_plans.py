# SPDX-License-Identifier: Apache-2.0
"""The designs at rare shapes: the plan passes the checker, and shapes do not change the array.

tests/cli/npu/test_build_model.py has programs of whole models; test_emulated.py has results.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from flownpu.aie.check import check
from flownpu.aie.designs.bias import with_bias
from flownpu.aie.designs.copy import Copy
from flownpu.aie.designs.dequant_engine import DequantEngine
from flownpu.aie.designs.flow_kv import FlowKV
from flownpu.aie.designs.flow_qkv import FlowQKV
from flownpu.aie.designs.fused_dqp import FusedDQP
from flownpu.aie.designs.gemm import Gemm, Walk
from flownpu.aie.designs.one_tile import KERNELS as KERNELS_ALONE
from flownpu.aie.designs.one_tile import OneTile
from flownpu.aie.designs.patch_pooling import PatchPooling
from flownpu.aie.designs.vector_operators import ResidualRMSNorm, RMSNorm
from flownpu.aie.iron.symbolic import RecordingError
from flownpu.npu.models import ENCODERS, MODELS
from tests.aie.designs.cases import convolution

KERNELS = Path(__file__).parents[3] / "aie" / "kernels" / "kernels.h"

# Models whose shapes differ in kind: one KV head and windows, groups of three, and an encoder with heads of 72.
DECODERS, ENCODER = ["gemma3-1b", "llama3.2-3b"], "siglip"


def plan_of(program):
    return program.resolve_program("design")


def violations(program):
    return [str(violation) for violation in check(plan_of(program))]


def projections(model):
    """(M, K, epilogue) of a layer's products: packed query, key and value; output; gate and up; down."""
    if model in ENCODERS.values():
        return [(part.columns, part.inner, "gelu" if part.gelu else "none") for part in model.projections]
    return [
        (part.rows, part.columns, model.shape.activation if part.gated else "none") for part in model.shape.projections
    ]


# --- Shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_fused_dqp_on_16_tiles_passes_checker(name):
    model = MODELS[name]
    k_max = -(-max(k for _, k, _ in projections(model)) // 256) * 256
    for m, k, epilogue in [*projections(model), (model.model.vocabulary, model.shape.hidden, "none")]:
        for planes in (1, 2):
            assert violations(FusedDQP("npu2", k_max, 16, epilogue).program(m, k, planes=planes)) == []


@pytest.mark.parametrize(("target", "weights"), [("npu1", "bf16"), ("npu2", "bf16"), ("npu2", "bfp16")])
@pytest.mark.parametrize("name", [*DECODERS, ENCODER])
def test_products_of_few_and_many_tokens_pass_checker(name, target, weights):
    """By supertiles, and by megatiles of two tiles of C, the most that L1 holds; a gated product always has two."""
    for m, k, epilogue in projections(MODELS[name]):
        gated = epilogue in {"geglu", "swiglu"}
        for planes in (1, 2) if gated else (2,):
            engine = DequantEngine(target, weights, planes)
            assert violations(engine.program(m, k, gated=gated, interleaved=gated)) == []
        for tokens, e_y, e_x in ((17, 1, 1), (1023, 2, 1), (1, 1, 2)):
            gemm = Gemm(target, weights, epilogue, **({} if gated else {"e_y": e_y, "e_x": e_x}))
            assert violations(gemm.program(tokens, k, -(-m // 32) * 32)) == []


@pytest.mark.parametrize(
    ("channels", "filters", "side", "stride"),
    [(4, 320, 64, 1), (960, 320, 64, 1), (320, 320, 64, 2), (2560, 1280, 8, 1), (512, 512, 128, 1), (128, 128, 512, 1)],
)
def test_convolutions_of_stable_diffusion_pass_checker(channels, filters, side, stride):
    """The least and most channels of its U-Net, a guided pair of latents; the decoder's longest lines."""
    gemm = Gemm("npu2", "bfp16", m=32, k=64, k_mt=320, e_y=2, e_x=2)
    batch = 2 if side < 128 else 1
    assert violations(convolution(gemm, channels, filters, side, side, batch, stride=stride).program()) == []


@pytest.mark.parametrize("name", ["npu1", "npu2"])
def test_gemm_of_one_column_of_tiles_passes_checker(name):
    """Lines of C are a tile's; several tiles down."""
    assert violations(Gemm(name, m=32, k=64, e_y=4).program(512, 256, 64)) == []


@pytest.mark.parametrize("tokens", [64, 256])
@pytest.mark.parametrize("name", DECODERS)
def test_gemm_of_a_chunk_adds_no_rows(name, tokens):
    """A chunk's rows fill a megatile; the rows themselves are not padded either."""
    for m, k, epilogue in projections(MODELS[name]):
        gemm = Gemm("npu2", epilogue=epilogue, m=tokens // 4)
        assert gemm.padded(tokens, k)[0] == tokens
        assert violations(gemm.program(tokens, k, m, line=k)) == []


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(("total", "capacity"), [(1, 1024), (17, 1024), (1023, 1024), (32768, 32768)])
def test_flow_kv_passes_checker(name, total, capacity):
    shape = MODELS[name].shape
    design = FlowKV("npu2", shape.heads, shape.kv_heads, shape.d)
    assert violations(design.program(total, capacity)) == []
    assert violations(design.program(total, capacity, window=512)) == []


@pytest.mark.parametrize("heads", [(4, 1, 256), (24, 8, 128), (16, 16, 72)], ids=str)
@pytest.mark.parametrize(
    ("tokens", "past", "capacity"), [(1, 0, 1024), (17, 1000, 1024), (1023, 0, 1024), (64, 4000, 8192)]
)
def test_flow_qkv_passes_checker(heads, tokens, past, capacity):
    design = FlowQKV("npu2", *heads)
    assert violations(design.program(tokens, past, capacity)) == []
    assert violations(design.program(tokens, past, capacity, window=512)) == []
    assert violations(design.program(tokens, past, capacity, causal=False)) == []


@pytest.mark.parametrize(
    ("heads", "d", "rows", "parts"),
    [(4, 64, 64, 1), (4, 72, 64, 1), (2, 128, 48, 2), (3, 128, 48, 2), (2, 256, 32, 16)],
)
def test_flow_qkv_takes_rows_that_tile_holds(heads, d, rows, parts):
    """Up to 64, in multiples of 16 and of a group: with more of them the checker finds too little memory.

    Outputs leave in parts only where so many rows need it.
    """
    design = FlowQKV("npu2", heads, 1, d)
    assert (design.rows, design.output_parts) == (rows, parts)
    more = FlowQKV("npu2", heads, 1, d, rows=rows + (24 if heads == 3 else 16), keys=design.keys)
    found = violations(more.program(1, 0, design.keys))
    assert not found if d == 64 else "memory" in found[0]


@pytest.mark.parametrize("target", ["npu1", "npu2"])
@pytest.mark.parametrize("n", [1152, 4096])
def test_norms_of_few_and_many_rows_pass_checker(n, target):
    for rows in (1, 17, 1023):
        assert violations(RMSNorm(target, n, 4).program(rows, 1e-6)) == []
        for norm_first in (False, True):
            design = ResidualRMSNorm(target, n, norm_first=norm_first, cores=4)
            assert violations(design.program(rows, 1e-6)) == []


def test_designs_on_xdna_pass_checker():
    """These designs fit XDNA's 4 columns; the tests above check the other designs on it."""
    programs = [
        FusedDQP("npu1", 6912, 16).program(1536, 1152),
        FusedDQP("npu1", 6912, 16, "geglu").program(6912, 1152),
        FlowKV("npu1", 4, 1, 256).program(1000, 1024),
        FlowKV("npu1", 8, 4, 256).program(1000, 1024, window=512),
        FlowQKV("npu1", 8, 4, 256).program(17, 0, 1024),
        FlowQKV("npu1", 32, 8, 128).program(17, 0, 1024),
        PatchPooling("npu1", 1152).program(64),
    ]
    for program in programs:
        assert violations(program) == []


# --- Array time and call time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "programs",
    [
        lambda: [FusedDQP("npu2", 6912).program(m, k) for m, k in ((1536, 1152), (1152, 6912), (262144, 1024))],
        lambda: [Gemm("npu2", e_y=2).program(*shape) for shape in ((1, 1152, 1536), (1023, 6912, 1152))],
        lambda: [
            DequantEngine("npu2").program(m, k, gated=gated)
            for m, k, gated in ((1536, 1152, False), (6912, 1152, True), (262144, 1152, False))
        ],
        lambda: [
            FlowKV("npu2", 8, 4, 256).program(t, 4096, window=w) for t, w in ((1, None), (4000, None), (4000, 512))
        ],
        lambda: [
            FlowQKV("npu2", 8, 4, 256).program(s, p, 4096, window=w, causal=c)
            for s, p, w, c in ((1, 0, None, True), (512, 3000, 1024, True), (512, 0, None, False))
        ],
        lambda: [RMSNorm("npu2", 1152, 4).program(rows, 1e-6) for rows in (1, 17, 1023)],
        lambda: [ResidualRMSNorm("npu2", 1152, cores=4).program(rows, 1e-6) for rows in (1, 17, 1023)],
        lambda: [PatchPooling("npu2", 1152).program(grid) for grid in (4, 64)],
    ],
)
def test_all_shapes_share_one_array(programs):
    arrays = [plan_of(program).array for program in programs()]
    assert all(array == arrays[0] for array in arrays)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FusedDQP("npu1", 6912, 32), "expected 16 tiles or, on npu2, 28 or 32, got 32 on npu1"),
        (lambda: FusedDQP("npu2", 1000), "k_max in multiples of 256, got 'none' and 1000"),
        (lambda: FusedDQP("npu2", 1024).program(1024, 2048), r"expected K of 1..1024 \(k_max\), got 2048"),
        (lambda: FusedDQP("npu2", 1024).program(96, 1024), "expected M in multiples of 32, 128 or more, got 96"),
        (lambda: Gemm("npu1", "bfp16"), "expected weights in bf16 or, on npu2, bfp16, got 'bfp16' on npu1"),
        (lambda: Gemm("npu2", epilogue="relu"), "expected an epilogue of none, gelu, geglu, swiglu, got 'relu'"),
        (lambda: Gemm("npu2").program(1, 64, 32), r"N in multiples of 32, 64 or more \(a column of tiles\), got 32"),
        (lambda: Gemm("npu2", epilogue="geglu").program(1, 64, 544), "N in multiples of 64, 64 or more"),
        (lambda: Gemm("npu2").program(1, 65537, 512), "expected K of 65536 or less, got 65537"),
        (lambda: Gemm("npu2").program(1, 768, 512, walk=Walk(64, 2)), r"in 2 runs of multiples of 256 .*, got 768"),
        (lambda: convolution(Gemm("npu2"), 3, 64, 8, 8), "expected even channels, and windows that fit"),
        (lambda: convolution(Gemm("npu2"), 4, 64, 8, 1, kernel_width=5), "windows that fit the padded picture"),
        (lambda: Gemm("npu2", e_y=2).program(1, 64, 16416), "expected N of 16384 or less with e_y of 2, got 16416"),
        (lambda: Gemm("npu2").program(1, 128, 512, line=96), "expected lines of K, 128, or more, got 96"),
        (lambda: Gemm("npu2", k=60), "expected m, n, k and k_mt in multiples"),
        (lambda: Gemm("npu2", e_x=-1), "e_y and e_x of 1 or more, got 64, 64, 32, 256, 1 and -1"),
        (lambda: DequantEngine("npu1", "bfp16"), "bf16 or, on npu2, bfp16, got 'bfp16' on npu1"),
        (lambda: DequantEngine("npu2").program(96, 256), "expected 4 blocks of 32 x 256 or more .*, got 96 x 256"),
        (lambda: DequantEngine("npu2").program(96, 256, gated=True), "M of a gate in multiples of 64, got 96 x 256"),
        (lambda: DequantEngine("npu2").program(128, 256, interleaved=True), "expected a gated weight if it is inter"),
        (lambda: PatchPooling("npu2", 64).program(6), "a grid in multiples of 4, 256 or less, got 6"),
        (lambda: RMSNorm("npu2", 64).program(0, 1e-6), "an item or more, got 1, 0"),
        (lambda: with_bias(np.zeros((1, 1, 5120), np.uint8), np.zeros(33), 64), r"expected blocks \(2, 1, 5120\)"),
        (lambda: FlowKV("npu2", 8, 4, 60), "d and keys in multiples of 8, got 60"),
        (lambda: FlowKV("npu2", 8, 4, 256).program(5, 1000), "in multiples of 32, got 5 of 1000"),
        (lambda: FlowQKV("npu2", 6, 4, 64), "got 4 of 6, 64"),
        (lambda: FlowQKV("npu2", 8, 4, 256, rows=12), "expected rows in multiples of 8"),
        (lambda: FlowQKV("npu2", 8, 4, 256).program(5, 1020, 1024), "got 1025 of 1024"),
        (lambda: RMSNorm("npu1", 64, 5).program(1, 1e-6), "expected 1..4 cores on npu1 and an item or more, got 5, 1"),
        (lambda: Copy("npu2", 64, 24), "expected one or two streams and parts in multiples of 16 of rows of 64 elem"),
        (lambda: Copy("npu2", 64, 64, streams=3), "expected one or two streams .*, got 3 and 64"),
        (lambda: OneTile("npu2", "conv"), "expected a kernel of q4nx_dequant_bf16, .*, got 'conv'"),
        (lambda: OneTile("npu1", "gemm_bfp16"), "expected a kernel of .*, got 'gemm_bfp16'"),
        (lambda: OneTile("npu2", "rope").program(0), "expected one call or more, got 0"),
        (lambda: RMSNorm("npu3", 64).program(1, 1e-6), "expected a target of npu1, npu2, got 'npu3'"),
    ],
)
def test_design_with_unfit_sizes_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- Kernels --------------------------------------------------------------------------------------------------------

_TYPES = {
    "bfloat16*": "bf16", "float*": "f32", "std::int32_t*": "i32", "std::uint8_t*": "u8", "bfp16ebs8*": "u8",
    "std::int32_t": "i32",
}  # fmt: skip


def prototypes():
    """By entry, (element type, is a buffer) of each argument, from the kernels' header."""
    text = re.sub(r"//.*", "", KERNELS.read_text(encoding="utf-8"))
    found = {}
    for name, arguments in re.findall(r"void (\w+)\(([^)]*)\)", text):
        kinds = [re.sub(r"\bconst\b|\s", "", " ".join(a.split()[:-1])) for a in arguments.split(",")]
        found[name] = [(_TYPES[kind], kind.endswith("*")) for kind in kinds]
    return found


ALL = {
    "copy": lambda: Copy("npu2", 1024, 1024).program(17),
    "copy of parts": lambda: Copy("npu2", 2048, 16, 8, 2).program(100),
    **{f"{kernel} alone": lambda kernel=kernel: OneTile("npu2", kernel).program(3) for kernel in KERNELS_ALONE},
    "fused_dqp": lambda: FusedDQP("npu2", 1280).program(1024, 1152),
    "fused_dqp 16": lambda: FusedDQP("npu2", 1280, 16).program(1024, 1152),
    "fused_dqp geglu": lambda: FusedDQP("npu2", 1280, 32, "geglu").program(1024, 1152),
    "fused_dqp swiglu": lambda: FusedDQP("npu2", 1280, 32, "swiglu").program(1024, 1152),
    "gemm": lambda: Gemm("npu2").program(17, 1152, 1536),
    "gemm bfp16": lambda: Gemm("npu2", "bfp16").program(17, 1152, 1536),
    "gemm gelu": lambda: Gemm("npu2", epilogue="gelu").program(17, 1152, 4320),
    "gemm geglu": lambda: Gemm("npu2", epilogue="geglu").program(17, 1152, 1536),
    "gemm megatile": lambda: Gemm("npu2", "bfp16", e_y=2).program(513, 1152, 1536),
    "dequant_engine": lambda: DequantEngine("npu2").program(1536, 1152),
    "dequant_engine gated": lambda: DequantEngine("npu2", "bfp16").program(1536, 1152, gated=True),
    "dequant_engine interleaved": lambda: DequantEngine("npu2").program(1536, 1152, gated=True, interleaved=True),
    "flow_kv": lambda: FlowKV("npu2", 8, 4, 256).program(17, 1024),
    "flow_qkv": lambda: FlowQKV("npu2", 8, 4, 256).program(17, 0, 1024),
    "rms_norm": lambda: RMSNorm("npu2", 1152, 4).program(17, 1e-6),
    "residual_rms_norm": lambda: ResidualRMSNorm("npu2", 1152, cores=4).program(17, 1e-6),
    "norm first": lambda: ResidualRMSNorm("npu2", 1152, True, 4).program(17, 1e-6),
    "patch_pooling": lambda: PatchPooling("npu2", 1152).program(64),
}


@pytest.mark.parametrize("design", ALL)
def test_design_kernels_are_declared_in_header(design):
    known = prototypes()
    for kernel in plan_of(ALL[design]()).array.kernels:
        assert known[kernel.entry] == [(kind.dtype, kind.shape != ()) for kind in kernel.arguments]
        assert (KERNELS.parent.parent / kernel.source).is_file()


def test_recording_errors_are_value_errors():
    assert issubclass(RecordingError, ValueError)

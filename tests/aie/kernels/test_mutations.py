# SPDX-License-Identifier: Apache-2.0
"""Mistakes planted in kernels, one at a time: each must fail its test.

A library is built of copies of the sources that make the mutation of a number, and the checks of the other test files
are run on it.
"""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.aie.host_kernels import ROOT, Kernels
from tests.aie.kernels import test_attention as attention
from tests.aie.kernels import test_decode_layer as layers
from tests.aie.kernels import test_equations as vectors
from tests.aie.kernels import test_flow_kv_split as shares

KERNELS = ROOT / "aie" / "kernels"
# Each mutation: the change, and the check that must fail. A change is a file, the expression «in» its text, and the one
# in its place.
MUTATIONS = {
    "the other half of a column": (
        ("q4nx_dequant.cc", "«half == 0» ? aie::filter_even", "half == 1"),
        lambda kernels, rng: vectors.test_dequantises_to_bf16_exactly(kernels, rng, "q4nx_dequant", 4),
    ),
    "the high plane twice": (
        ("q4nx_dequant.cc", "block + «plane» * q::kBlockBytes", "0"),
        lambda kernels, rng: vectors.test_dequantises_to_bf16_exactly(kernels, rng, "q4nx_dequant_planes", 8),
    ),
    "two planes of a weight that has one": (
        ("fused_dqp.cc", "j >>= «planes - 1»", "1"),
        lambda kernels, rng: vectors.test_fused_dqp_equals_float64(kernels, rng, 64, 768, 4),
    ),
    "a wrong stride of minima": (
        ("common/q4nx.h", "return scales(block) + «kScales»", "kScales / 2"),
        lambda kernels, rng: vectors.test_fused_dqp_equals_float64(kernels, rng, 32, 256, 4),
    ),
    "an off-by-one in the causal mask": (
        ("common/attention.h", "? «position + 1»\n", "position"),
        lambda kernels, rng: attention.test_flow_qkv_of_grouped_heads_equals_float64(kernels, rng, 2),
    ),
    "a soft cap of half the scores": (
        ("common/attention.h", "inside = «-2.0F»", "-1.0F"),
        lambda kernels, rng: attention.test_flow_qkv_with_soft_cap_equals_float64(kernels, rng, 16),
    ),
    "a soft cap without log2(e)": (
        ("common/attention.h", "outside = «1.44269504F» *", "1.0F"),
        attention.test_flow_kv_with_soft_cap_equals_float64,
    ),
    "scores of a share that are scaled, not capped": (
        ("flow_kv_split.cc", "«cap_of_scores.given» ? cap_of_scores.outside", "false"),
        shares.test_soft_cap_equals_float64,
    ),
    "sinks that lie in a line": (
        ("sinks.cc", "given[«i / 4 * step» + i % 4]", "i / 4 * 4"),
        lambda kernels, rng: attention.test_sinks_begin_rows_of_their_heads(kernels, rng, 32),
    ),
    "an off-by-one in the window": (
        ("common/attention.h", "«position - parameters.window + 1»", "position - parameters.window"),
        lambda kernels, rng: attention.test_flow_kv_with_window_equals_float64(kernels, rng, 16, 80),
    ),
    "no masks at the causal edge": (
        ("common/attention.h", "«key + keys - 1» <= parameters.first_query", "key"),
        lambda kernels, rng: attention.test_flow_qkv_of_grouped_heads_equals_float64(kernels, rng, 2),
    ),
    "no masks at the last key": (
        ("common/attention.h", "return «key + keys» <= parameters.key_end", "key"),
        lambda kernels, rng: attention.test_flow_qkv_without_causal_mask_equals_float64(kernels, rng, 100),
    ),
    "no masks at the window's edge": (
        ("common/attention.h", "key > «last_query» - parameters.window", "parameters.first_query"),
        lambda kernels, rng: attention.test_flow_qkv_with_window_equals_float64(kernels, rng, 36, 48),
    ),
    "a maximum that is forgotten": (
        ("common/attention.h", "if («!rescale») return", "true"),
        lambda kernels, rng: attention.test_flow_kv_of_grouped_heads_equals_float64(kernels, rng, 4),
    ),
    "a short exponential that is a line": (
        ("common/float_math.h", "«aie::mac(line, square, curve)»", "line"),
        lambda kernels, rng: attention.test_flow_qkv_of_prompt_equals_float64(kernels, rng, 64, 17),
    ),
    "saturation that is left on": (
        ("common/modes.h", "«aie::set_saturation(aie::saturation_mode::none)»;", "void()"),
        lambda kernels, rng: attention.test_flow_kv_with_window_equals_float64(kernels, rng, 16, 80),
    ),
    "a maximum that is the sub-tile's beside it": (
        ("common/attention.h", "aie::sub(t, m[«p»])", "0"),
        lambda kernels, rng: attention.test_flow_qkv_of_grouped_heads_equals_float64(kernels, rng, 2),
    ),
    "a correction that is the sub-tile's beside it": (
        ("common/attention.h", "aie::load_v<R>(correction_of_rows + «p * R»), y", "0"),
        lambda kernels, rng: attention.test_flow_qkv_of_grouped_heads_equals_float64(kernels, rng, 2),
    ),
    "values that are the sub-tile's beside it": (
        ("common/attention.h", "f + «(p * key_tiles + c)» * Mmul::size_A", "c"),
        lambda kernels, rng: attention.test_flow_qkv_of_grouped_heads_equals_float64(kernels, rng, 2),
    ),
    "a sub-tile of rows that is left alone": (
        ("flow_qkv.cc", "if («row < count») step", "row > count"),
        lambda kernels, rng: attention.test_flow_qkv_of_odd_sub_tile_counts_equals_float64(kernels, rng, 24, 8),
    ),
    "a part of the outputs that is the first": (
        ("flow_qkv.cc", "y + row * d + «part * columns * kRows»", "0"),
        attention.test_flow_qkv_outputs_in_parts_equal_float64,
    ),
    "a low part that is left out": (
        ("fused_dqp.cc", "total = «aie::mac(total, parts.low, scale)»;", "total"),
        lambda kernels, rng: vectors.test_fused_dqp_equals_float64(kernels, rng, 32, 256, 4),
    ),
    "heads that turn the other way": (
        (
            "norm_rope.cc",
            "first = «aie::msc(aie::msc(multiply(a, cosine), b.high, sine), b.low, sine)»",
            "aie::mac(aie::mac(multiply(a, cosine), b.high, sine), b.low, sine)",
        ),
        lambda kernels, rng: layers.test_rms_norm_rope_equals_float64(kernels, rng, 2, 256),
    ),
    "a norm of the last heads alone": (
        ("norm_rope.cc", "«batch == 0» ?", "batch >= 0"),
        layers.test_norm_of_all_heads_and_rope_equals_float64,
    ),
    "heads with the weights of the first": (
        ("norm_rope.cc", "weights + «first * d»", "0"),
        layers.test_norm_of_all_heads_and_rope_equals_float64,
    ),
    "a part's sums in the place of the first": (
        ("fused_dqp.cc", "sums + «j * 16», flownpu::group_sums(part)", "0"),
        layers.test_fused_dqp_with_x_in_parts_equals_float64,
    ),
    "an off-by-one in a share's window": (
        ("flow_kv_split.cc", "position - key < «window»", "window + 1"),
        lambda kernels, rng: shares.test_window_of_one_sweep_equals_float64(kernels, rng, 5, 190),
    ),
    "a share's maximum that is forgotten": (
        ("flow_kv_split.cc", "if («rescale») sum", "false"),
        shares.test_share_equals_attention_of_its_keys,
    ),
    "objects of a share that follow one another": (
        ("flow_kv_split.cc", "key + «parameters.step»", "kKeys"),
        lambda kernels, rng: shares.test_window_of_one_sweep_equals_float64(kernels, rng, 64, 130),
    ),
    "a bundle's head that has another's keys": (
        ("flow_kv_split.cc", "«(first * heads + head) * 2» + value", "first * heads + head"),
        lambda kernels, rng: shares.test_heads_side_by_side_equal_float64(kernels, rng, 4, 4, 64, 300),
    ),
    "a token's own keys that are the cache's": (
        ("flow_kv_split.cc", "== «position») rows[j] = own", "position - 1"),
        lambda kernels, rng: shares.test_heads_side_by_side_equal_float64(kernels, rng, 2, 3, 128, 300),
    ),
    "a token's own values that are another head's": (
        ("flow_kv_split.cc", "x + own + «(kv_head + head) * d»", "0"),
        lambda kernels, rng: shares.test_heads_side_by_side_equal_float64(kernels, rng, 2, 3, 128, 300),
    ),
    "dequantised rows that are the last": (
        ("flow_kv_split.cc", "dequantized + «static_cast<std::int32_t>(j) * d»", "0"),
        lambda kernels, rng: shares.test_int8_rows_equal_attention_of_dequantised_keys(kernels, rng, 2, 3, 128),
    ),
    "codes of magnitudes above zero alone": (
        ("int8_rows.cc", "«aie::max(above, below)»", "above"),
        lambda kernels, rng: shares.test_quantised_rows_equal_definition(kernels, rng, 128),
    ),
    "shares that weigh the same": (
        ("flow_kv_split.cc", "aie::sub(«sides[side]», m)", "m"),
        shares.test_merge_of_whole_numbers_is_exact,
    ),
    "a meeting that forgets the others before it": (
        ("flow_kv_split.cc", "kPowers + «other» * 2 * kMostRows", "0"),
        shares.test_merge_of_whole_numbers_is_exact,
    ),
    "a row that meets as another does": (
        ("flow_kv_split.cc", "of_rows.get(«row_of(index, d)»)", "0"),
        shares.test_merge_of_whole_numbers_is_exact,
    ),
    "a part that begins too early": (
        ("copy_part.cc", "whole += «index * n»", "index * n / 2"),
        lambda kernels, rng: layers.test_copy_part_copies_bytes(kernels, rng, 5, 256),
    ),
    "a part that goes to the place of the first": (
        ("copy_part.cc", "to + «to_index * n»", "0"),
        layers.test_copy_into_copies_bytes,
    ),
}
# By source, the entries that the checks call.
ENTRIES = {
    "rms_norm.cc": ["rms_norm"],
    "q4nx_dequant.cc": ["q4nx_dequant_bf16", "q4nx_dequant_planes_bf16"],
    "epilogue.cc": ["zero_f32"],
    "fused_dqp.cc": ["fused_dqp_group_sums", "fused_dqp_take", "fused_dqp"],
    "norm_rope.cc": ["rms_norm_rope", "square_sums", "all_norm_rope"],
    "copy_part.cc": ["copy_part", "copy_heads", "copy_into"],
    "flow_qkv.cc": ["flow_qkv_start", "flow_qkv_scores", "flow_qkv_values", "flow_qkv_finish"],
    "flow_kv.cc": ["flow_kv_start", "flow_kv_scores", "flow_kv_start_values", "flow_kv_values", "flow_kv_finish"],
    "flow_kv_split.cc": [
        "flow_kv_split_start", "flow_kv_split", "flow_kv_split_int8", "flow_kv_split_meet", "flow_kv_split_give",
        "flow_kv_split_store",
    ],
    "int8_rows.cc": ["int8_rows"],
    "sinks.cc": ["attention_sinks"],
}  # fmt: skip
# The check that floor rounding must fail, for every source that rounds. fused_dqp.cc is left out. It splits its sums in
# two parts, so floor errs by 2^-16 (rounding to nearest by 2^-18), within the tolerance, and its outputs are f32.
ROUNDED = {
    "q4nx_dequant.cc": lambda kernels, rng: vectors.test_dequantises_to_bf16_exactly(kernels, rng, "q4nx_dequant", 4),
    "gemm.cc": lambda kernels, rng: vectors.test_gemm_in_bf16_equals_float64(kernels, rng, 32, 256, 96),
    "epilogue.cc": vectors.test_plain_stores_equal_float64,
    "epilogue.cc, gelu": lambda kernels, rng: vectors.test_accumulator_gelu_equals_float64(kernels),  # noqa: ARG005
    "epilogue.cc, gated": lambda kernels, rng: vectors.test_accumulator_activations_equal_float64(kernels, rng, "silu"),
    "geglu.cc": lambda kernels, rng: vectors.test_gated_activations_equal_float64(kernels, rng, "geglu", "gelu"),
    "swiglu.cc": lambda kernels, rng: vectors.test_gated_activations_equal_float64(kernels, rng, "swiglu", "silu"),
    "flow_qkv.cc": lambda kernels, rng: attention.test_flow_qkv_of_prompt_equals_float64(kernels, rng, 64, 17),
    "flow_kv.cc": attention.test_flow_kv_has_no_bias,
    "flow_kv_split.cc": shares.test_shares_have_no_bias,
    "int8_rows.cc": lambda kernels, rng: shares.test_quantised_rows_equal_definition(kernels, rng, 128),
    "rms_norm.cc": lambda kernels, rng: vectors.test_rms_norm_equals_float64(kernels, rng, 3, 1152),
    "rms_norm.cc, with a residual": vectors.test_rms_norm_and_residual_equal_float64,
    "layer_norm.cc": lambda kernels, rng: vectors.test_layer_norm_of_sum_equals_reference(kernels, rng, 3, 1152, 0),
    "rope.cc": lambda kernels, rng: vectors.test_rope_equals_float64(kernels, rng, 8, 128),
    "norm_rope.cc": lambda kernels, rng: layers.test_rms_norm_rope_equals_float64(kernels, rng, 2, 256),
    "patch_pooling.cc": vectors.test_patch_pooling_equals_float64,
}
TABLE = """
#include "aie/host/make_kernel.h"
#include "aie/kernels/kernels.h"
static constexpr flownpu::aie_host::Kernel kKernels[] = {%s};
FLOWNPU_EXPORT_KERNELS(kKernels)
"""


# Precompiled, before each source: most of the compiler's input, and the number of the mutation that is made.
PLANTED = """
#include <aie_api/aie.hpp>
extern "C" __attribute__((visibility("default"))) inline int flownpu_planted = -1;
"""


def build(folder, architecture, sources):
    """The kernels of some sources, which include headers of the folder, compiled without optimisation."""
    options = ["-std=c++20", "-O0", "-fPIC", "-fvisibility=hidden", f"-D__AIE_ARCH__={architecture}"]
    options += ["-I", folder, "-I", ROOT / "aie" / "host", "-I", ROOT]
    header = folder / "planted.h"
    header.write_text(PLANTED, encoding="utf-8")
    run(*options, "-x", "c++-header", header, "-o", f"{header}.gch")
    for source in sources:
        run(*options, "-include", header, "-c", source, "-o", folder / f"{source.stem}.o")
    run("-shared", *(folder / f"{source.stem}.o" for source in sources), "-o", folder / "mutated.so")
    return folder / "mutated.so"


def run(*arguments):
    # Under the sanitizers LD_PRELOAD loads their run time into every process; the compiler does without it.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(["g++", *arguments], check=True, env=environment)


def with_change(text, number, place, new):
    """A source in which an expression has another value if `flownpu_planted` is the number."""
    before, old, after = re.split("[«»]", place)
    assert before + old + after in text, f"no longer there: {place}"
    return text.replace(before + old + after, f"{before}(flownpu_planted == {number} ? ({new}) : ({old})){after}")


@pytest.fixture(scope="module")
def mutated(tmp_path_factory):
    """The kernels that the checks call, with all mutations, for XDNA; and the number of the one that is made."""
    folder = tmp_path_factory.mktemp("mutated")
    copies = Path(shutil.copytree(KERNELS, folder / "aie" / "kernels"))
    for number, ((name, *change), _) in enumerate(MUTATIONS.values()):
        text = (copies / name).read_text(encoding="utf-8")
        (copies / name).write_text(with_change(text, number, *change), encoding="utf-8")
    entries = (entry for of_source in ENTRIES.values() for entry in of_source)
    table = folder / "table.cc"
    table.write_text(TABLE % ", ".join(f"FLOWNPU_KERNEL({entry})" for entry in entries), encoding="utf-8")
    file = build(folder, 20, [*(copies / source for source in ENTRIES), table])
    return Kernels(file), ctypes.c_int.in_dll(ctypes.CDLL(str(file)), "flownpu_planted")


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutated_kernel_is_caught(mutated, name):
    """The check passes before the mutation, and fails with it."""
    kernels, planted = mutated
    _, check = MUTATIONS[name]
    check(kernels, np.random.default_rng(1))
    planted.value = list(MUTATIONS).index(name)
    try:
        with pytest.raises(AssertionError):
            check(kernels, np.random.default_rng(1))
    finally:
        planted.value = -1


@pytest.fixture(scope="module")
def floor_kernels(tmp_path_factory):
    """All kernels, for XDNA2, with floor rounding (the mode at power up) wherever a kernel sets rounding to nearest."""
    folder = tmp_path_factory.mktemp("floor")
    copies = Path(shutil.copytree(KERNELS, folder / "aie" / "kernels"))
    for file in filter(Path.is_file, copies.rglob("*")):
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("rounding_mode::conv_even", "rounding_mode::floor"), encoding="utf-8")
    return Kernels(build(folder, 21, [ROOT / "aie" / "host" / "kernels.cc", *sorted(copies.glob("*.cc"))]))


@pytest.mark.parametrize("name", ROUNDED)
def test_floor_rounding_is_caught_in_every_kernel(floor_kernels, rng, name):
    with pytest.raises(AssertionError):
        ROUNDED[name](floor_kernels, rng)


def test_mutations_cover_all_rounding_kernels():
    sources = {file.name for file in KERNELS.glob("*.cc") if "set_conversion_modes" in file.read_text("utf-8")}
    assert sources - {"fused_dqp.cc"} == {name.partition(",")[0] for name in ROUNDED}

# SPDX-License-Identifier: Apache-2.0
"""Q4NXMatMul and FusedDQP on the CPU, for every instruction set of this machine, against float64."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest

from flownpu.ops import q4nx
from flownpu.ops.definitions import q4nx_matmul
from tests.ops.device import ISAS, Node, run, testing
from tests.pairwise import pairwise

EPSILON = 2.0**-24  # Half an ulp of 1 in float32: the relative error of one rounding.
# One block; rows and columns that fill no block; K that is no multiple of a group; the 1B model's odd half block.
SHAPES = [(32, 256), (40, 300), (7, 33), (96, 1152), (33, 257)]
HOW = list(product(ISAS, ["bf16", "int8"]))


EIGHT_BITS = [q4nx.EIGHT_BITS, q4nx.EIGHT_BITS_WITH_MINIMA, q4nx.TABLE]


def blocks_of(rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    return q4nx.pack(*q4nx.quantize(rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)))


def rounded(x: np.ndarray, activations: str, part: int = 32) -> np.ndarray:
    """The activations by definition: bf16, or integers up to 127 with one scale for each `part` columns."""
    if activations == "bf16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)
    scaled, step = steps_of(x, part)
    return unite(np.rint(scaled) * step, x.shape[-1])


def steps_of(x: np.ndarray, part: int) -> tuple[np.ndarray, np.ndarray]:
    """x in steps of integers up to 127, before rounding, and the steps: [rows, parts, part] and [rows, parts, 1]."""
    groups = np.pad(x, ((0, 0), (0, -x.shape[-1] % part))).reshape(len(x), -1, part)
    largest = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return groups * inverse.astype(np.float64), (largest / np.float32(127)).astype(np.float64)


def unite(groups: np.ndarray, columns: int) -> np.ndarray:
    return groups.reshape(len(groups), -1)[:, :columns]


def tie_error(x: np.ndarray, activations: str, part: int = 32) -> np.ndarray:
    """The error of an activation: one step, where it is so near the middle of two integers that the rounding
    of the product x * 127 / max (up to 127, so half an ulp is 2^-18) decides between them."""
    if activations == "bf16":
        return np.zeros(x.shape)
    scaled, step = steps_of(x, part)
    tie = np.abs(np.abs(scaled - np.trunc(scaled)) - 0.5) <= 2.0**-18
    return unite(np.where(tie, step, 0), x.shape[-1])


def largest_weights(blocks: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A bound of |weight| for each weight, and of what is added up for it: scale * 15 + |minimum|; of 8 bits, AVX-512
    adds up codes from 0 to 255, and takes off 128 scales."""
    found = q4nx.unpack(blocks, rows, columns)
    most = 15 if found.bits == 4 else 255 + 128
    largest = np.abs(found.scale.astype(np.float64)) * most + np.abs(found.minimum.astype(np.float64))
    return np.repeat(largest, 32, axis=1)[:, :columns]


def order_of(isa: str, activations: str, tokens: int, bits: int = 4) -> str:
    """The order of int8 activations in memory, which decides the rounding of weights.

    On AVX-512 up to 4 rows (of 8 bits: 16) have a scale for each 32 columns, and weights are as they are; more have one
    for each 256, and the scales of weights are multiples of a step (4 bits, up to 32 rows), or weights are rounded to 8
    bits.
    """
    if isa != "avx512" or activations != "int8" or tokens <= (4 if bits == 4 else 16):
        return "groups"
    return "panels" if tokens <= 32 and bits == 4 else "parts"


def weights_with_steps(blocks: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Weights as (codes - 8) scale + left. Scales are rounded to multiples of 2^-12 of the power of two of the largest
    scale that a row has in 256 columns; `left` is minimum + 8 scale, rounded to float32 only."""
    codes, scale, minimum = q4nx.unpack(blocks, rows, columns)
    scale, minimum = scale.astype(np.float64), minimum.astype(np.float64)
    left = (minimum + 8 * scale).astype(np.float32).astype(np.float64)
    for start in range(0, scale.shape[1], 8):
        part = slice(start, start + 8)
        largest = np.abs(scale[:, part]).max(1, keepdims=True)
        step = 2.0 ** (np.floor(np.log2(np.maximum(largest, 2.0**-100))) - 12)
        scale[:, part] = np.rint(scale[:, part] / step) * step
    each = [np.repeat(parameters, 32, axis=1)[:, :columns] for parameters in (scale, left)]
    return each[0] * (codes[:, :columns].astype(np.float64) - 8) + each[1]


def eight_bit_weights(blocks: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights rounded to 255 steps of the range that each row has in each 256 columns, and what they may be off by:
    one step, where a weight is so near the middle of two that the kernel's fixed point (8 fractional bits; factor and
    offset rounded, so off by 15 / 2 + 1 / 2 of 256 parts, and float32 before) decides between them. (Of 8 bits, the
    factor has 16 bits and the product is cut off: 1 / 2 + 1 + 1 / 2 of 256 parts.)"""
    weights = q4nx.dequantize(blocks, rows, columns).astype(np.float64)
    found = q4nx.unpack(blocks, rows, columns)
    scale, minimum = found.scale.astype(np.float32), found.minimum.astype(np.float32)
    lowest_code, highest_code = (0, 15) if found.bits == 4 else (-128, 127)
    if q4nx.layout_of(blocks).table:
        lowest_code, highest_code = int(found.codes.min()), int(found.codes.max())
    ends = np.stack([minimum + lowest_code * scale, minimum + highest_code * scale]).astype(np.float64)
    error = np.zeros_like(weights)
    for start in range(0, columns, 256):
        groups = slice(start // 32, (min(start + 256, columns) + 31) // 32)
        part = slice(start, start + 256)
        lowest, highest = ends[..., groups].min((0, 2)), ends[..., groups].max((0, 2))
        step = ((highest - lowest) / 255)[:, None]
        step = np.where(step > 0, step, 1)  # All weights are equal: any step will do.
        scaled = (weights[:, part] - lowest[:, None]) / step
        nearest = np.floor(scaled + 0.5)
        weights[:, part] = lowest[:, None] + step * nearest
        error[:, part] = np.where(np.abs(scaled - np.floor(scaled) - 0.5) <= 8.1 / 256, step, 0)
    return weights, error


def accumulation_error(x: np.ndarray, blocks: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Bound on float32 accumulation: at most K + 4 roundings (a product and a sum for each column, one of them fused;
    scale, minimum and the sum over the group), each relative to the sum of magnitudes."""
    return (columns + 4) * EPSILON * (np.abs(x) @ largest_weights(blocks, rows, columns).T)


def product_and_bound(
    x: np.ndarray, blocks: np.ndarray, rows: int, columns: int, isa: str, activations: str, tokens: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64 of inputs rounded as in a call of `tokens` rows (None: of x), and a bound of the error."""
    bits = q4nx.layout_of(blocks).unpacked_bits
    order = order_of(isa, activations, len(x) if tokens is None else tokens, bits)
    exact = rounded(x, activations, 32 if order == "groups" else 256)
    bound = tie_error(x, activations, 32 if order == "groups" else 256) @ largest_weights(blocks, rows, columns).T
    bound += accumulation_error(exact, blocks, rows, columns)
    if order == "panels":
        return exact @ weights_with_steps(blocks, rows, columns).T, bound
    if order == "parts":
        weights, error = eight_bit_weights(blocks, rows, columns)
        return exact @ weights.T, bound + np.abs(exact) @ error.T
    return q4nx_matmul.reference(exact, blocks, rows=rows, columns=columns), bound


@pytest.mark.parametrize(("how", "shape", "tokens"), pairwise(HOW, SHAPES, [1, 3, 5, 13, 200]))
def test_product_of_rounded_activations_equals_float64(
    how: tuple[str, str], shape: tuple[int, int], tokens: int
) -> None:
    isa, activations = how
    rng = np.random.default_rng(tokens)
    rows, columns = shape
    blocks = blocks_of(rows, columns, rng)
    x = rng.standard_normal((tokens, columns), dtype=np.float32)
    options = {"cpu_isa": isa, "activations": activations}
    (y,) = run("Q4NXMatMul", [x, blocks], constants=(1,), options=options, M=rows, K=columns)
    expected, bound = product_and_bound(x, blocks, rows, columns, isa, activations)
    assert np.all(np.abs(y - expected) <= bound)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("layout", [q4nx.NARROW, q4nx.SYMMETRIC, *EIGHT_BITS], ids=str)
def test_product_of_every_tile_of_rows_is_within_bound(isa: str, activations: str, layout: q4nx.Layout) -> None:
    """Each tile and what is left beside a whole one; more rows than a few are multiplied part by part."""
    rng = np.random.default_rng(17)
    rows, columns = 71, 641  # Three rows of blocks, the last one cut; 8, 8 and 5 groups, the last one of 1 column.
    blocks = q4nx.pack(*random_weight(rows, columns, layout, rng), layout)
    x = rng.standard_normal((65, columns), dtype=np.float32)
    options = {"cpu_isa": isa, "activations": activations}
    node = Node("Q4NXMatMul", [x, blocks], constants=(1,), options=options, M=rows, K=columns)
    expectations = {
        order_of(isa, activations, tokens, layout.unpacked_bits): product_and_bound(
            x, blocks, rows, columns, isa, activations, tokens
        )
        for tokens in (1, 16, 32, 65)
    }
    for tokens in (*range(1, 18), 31, 32, 33, 65):
        (y,) = node(x[:tokens], blocks)
        expected, bound = expectations[order_of(isa, activations, tokens, layout.unpacked_bits)]
        assert np.all(np.abs(y - expected[:tokens]) <= bound[:tokens]), f"{tokens} rows"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("largest", [15, 17])
@pytest.mark.parametrize("tokens", [1, 6])
def test_table_of_small_values_times_largest_activations_is_within_bound(isa: str, largest: int, tokens: int) -> None:
    """Values up to 15 are summed in 16 bits over a group: 32 products of 15 x 127, two sums a row, fit; those of 17 do
    not."""
    rng = np.random.default_rng(29)
    rows, columns = 32, 96
    signs = rng.choice(np.array([-1, 1], np.int8), columns)
    codes = np.tile(signs * np.int8(largest), (rows, 1))
    scale, minimum = (np.full((rows, columns // 32), value, ml_dtypes.bfloat16) for value in (1, 0))
    blocks = q4nx.pack(codes, scale, minimum, q4nx.TABLE)
    x = np.tile(signs.astype(np.float32), (tokens, 1))
    options = {"cpu_isa": isa, "activations": "int8"}
    (y,) = run("Q4NXMatMul", [x, blocks], constants=(1,), options=options, M=rows, K=columns)
    expected, bound = product_and_bound(x, blocks, rows, columns, isa, "int8")
    assert np.all(np.abs(y - expected) <= bound)


@pytest.mark.parametrize("tokens", [7, 32])
def test_activations_beyond_256_kb_are_within_bound(tokens: int) -> None:
    """On AVX-512 up to 256 KB of int8 activations are multiplied in the order of the weight, more part by part."""
    rng = np.random.default_rng(18)
    rows, columns = 65, 9000
    blocks = blocks_of(rows, columns, rng)
    x = rng.standard_normal((tokens, columns), dtype=np.float32)
    (y,) = run("Q4NXMatMul", [x, blocks], constants=(1,), options={"activations": "int8"}, M=rows, K=columns)
    expected, bound = product_and_bound(x, blocks, rows, columns, ISAS[0], "int8")
    assert np.all(np.abs(y - expected) <= bound)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("layout", "tokens"), [(q4nx.WIDE, 6), (q4nx.EIGHT_BITS, 6), (q4nx.EIGHT_BITS, 40), (q4nx.TABLE, 40)], ids=str
)
def test_scales_of_all_sizes_are_within_bound(isa: str, layout: q4nx.Layout, tokens: int) -> None:
    """Small scales are rounded to steps of the largest in their part, negative ones (which some quantisers write) like
    others; a part whose scales are all tiny or 0 has a step, too."""
    rng = np.random.default_rng(19)
    rows, columns = 32, 600
    codes, scale, minimum = random_weight(rows, columns, layout, rng)
    powers = 2.0 ** rng.integers(-20, 20, scale.shape) * rng.choice([-1, 1], scale.shape)
    scale = (scale.astype(np.float32) * powers).astype(ml_dtypes.bfloat16)
    scale[:4] = 0
    scale[4:8] = 1e-38
    blocks = q4nx.pack(codes, scale, minimum, layout)
    x = rng.standard_normal((tokens, columns), dtype=np.float32)
    options = {"cpu_isa": isa, "activations": "int8"}
    (y,) = run("Q4NXMatMul", [x, blocks], constants=(1,), options=options, M=rows, K=columns)
    expected, bound = product_and_bound(x, blocks, rows, columns, isa, "int8")
    # Weights of a range below 2^-100 may count as equal: the inverse of their step would be too large.
    bound += 2.0**-100 * np.abs(x).sum(1, keepdims=True)
    assert np.all(np.abs(y - expected) <= bound)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", ["bf16", "int8"])
def test_row_has_same_bits_in_every_batch(isa: str, activations: str) -> None:
    """Prefill in pieces gives the bits of prefill in one, and batches the bits of single rows; for int8, between
    numbers of rows that are computed in the same order."""
    rng = np.random.default_rng(1)
    rows, columns = 64, 1184
    blocks = blocks_of(rows, columns, rng)
    x = rng.standard_normal((80, columns), dtype=np.float32)
    node = Node(
        "Q4NXMatMul",
        [x, blocks],
        constants=(1,),
        options={"cpu_isa": isa, "activations": activations},
        M=rows,
        K=columns,
    )
    outputs: dict[str, list[np.ndarray]] = {}
    for split in (1, 2, 4, 8, 20, 40, 80):
        parts = [node(np.ascontiguousarray(x[i : i + split]), blocks)[0] for i in range(0, len(x), split)]
        outputs.setdefault(order_of(isa, activations, split), []).append(np.concatenate(parts))
    for side in outputs.values():
        for output in side[1:]:
            np.testing.assert_array_equal(output, side[0])


def symmetric_weight(rows: int, columns: int, rng: np.random.Generator) -> q4nx.Quantized:
    """Random codes and scales; each minimum is -8 times its scale, which bf16 holds exactly."""
    scale = rng.uniform(0.5, 2, (rows, -(-columns // 32))).astype(ml_dtypes.bfloat16)
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    return q4nx.Quantized(codes, scale, (-8 * scale.astype(np.float32)).astype(ml_dtypes.bfloat16))


def random_weight(rows: int, columns: int, layout: q4nx.Layout, rng: np.random.Generator) -> q4nx.Quantized:
    """`symmetric_weight`, or of 8 bits random codes of all values, with minima of the size of 20 scales; or those of a
    table that has no 0 in its middle."""
    four = symmetric_weight(rows, columns, rng)
    if layout.unpacked_bits == 4:
        return four
    values = [*range(-49, -34), 127] if layout.table else np.arange(-128, 128)
    codes = rng.choice(np.array(values, np.int8), (rows, columns))
    minimum = rng.uniform(-20, 20, four.scale.shape) * layout.minima
    return q4nx.Quantized(codes, four.scale, minimum.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("how", "shape", "tokens"), pairwise(HOW, SHAPES, [1, 3, 5, 13, 33]))
def test_layout_changes_no_bit(how: tuple[str, str], shape: tuple[int, int], tokens: int) -> None:
    """Wide blocks are compared with float64 above; the others hold the same weights."""
    isa, activations = how
    rng = np.random.default_rng(tokens)
    rows, columns = shape
    weight = symmetric_weight(rows, columns, rng)
    x = rng.standard_normal((tokens, columns), dtype=np.float32)
    options = {"cpu_isa": isa, "activations": activations}
    wide, narrow, symmetric = (
        run("Q4NXMatMul", [x, q4nx.pack(*weight, layout)], constants=(1,), options=options, M=rows, K=columns)[0]
        for layout in (q4nx.WIDE, q4nx.NARROW, q4nx.SYMMETRIC)
    )
    assert wide is not None
    assert np.abs(wide).max() > 0
    np.testing.assert_array_equal(narrow, wide)
    np.testing.assert_array_equal(symmetric, wide)


def test_eight_bit_weights_of_equal_and_of_falling_rows_are_exact() -> None:
    """A row whose weights are all equal has no range, and some quantisers write negative scales."""
    codes = np.tile(np.arange(256) % 16, (32, 1)).astype(np.uint8)
    scale = np.zeros((32, 8), np.float32)
    scale[16:] = -0.125
    minimum = np.full((32, 8), 0.5, np.float32)
    blocks = q4nx.pack(codes, scale.astype(ml_dtypes.bfloat16), minimum.astype(ml_dtypes.bfloat16))
    x = np.eye(256, dtype=np.float32)
    (y,) = run("Q4NXMatMul", [x, blocks], constants=(1,), options={"activations": "int8"}, M=32, K=256)
    # More than 32 rows: steps of 15 * 0.125 / 255, and the float32 of the sum of a minimum of up to 1.4 and what is
    # added to it.
    np.testing.assert_allclose(y.T, q4nx.dequantize(blocks, 32, 256), rtol=0, atol=15 * 0.125 / 255 / 2 + 4 * EPSILON)


def test_stored_bytes_of_one_scale_are_exact_for_many_rows() -> None:
    """A row whose groups of 256 columns share a scale keeps its codes, rising or falling, at both ends."""
    codes = np.tile(np.arange(-128, 128, dtype=np.int8), (32, 1))
    scale = np.full((32, 8), 0.125, ml_dtypes.bfloat16)
    scale[16:] *= ml_dtypes.bfloat16(-1)
    blocks = q4nx.pack(codes, scale, 0 * scale, q4nx.EIGHT_BITS)
    x = 127 * np.eye(256, dtype=np.float32)  # 127, so that the step of int8 is 1
    (y,) = run("Q4NXMatMul", [x, blocks], constants=(1,), options={"activations": "int8"}, M=32, K=256)
    # The step, 255 * 0.125 / 255, has two roundings, and so have the sums of up to 2 * 127 * 16 (with the minimum's).
    np.testing.assert_allclose(y.T, 127 * q4nx.dequantize(blocks, 32, 256), rtol=0, atol=4 * EPSILON * 2 * 127 * 32)


def test_weights_of_equal_and_of_falling_rows_are_exact_in_panels() -> None:
    """Rows whose weights are all equal, and negative scales."""
    codes = np.tile(np.arange(256) % 16, (32, 1)).astype(np.uint8)
    scale = np.zeros((32, 8), np.float32)
    scale[16:] = -0.125
    minimum = np.full((32, 8), 0.5, np.float32)
    blocks = q4nx.pack(codes, scale.astype(ml_dtypes.bfloat16), minimum.astype(ml_dtypes.bfloat16))
    # 127, so that the step of int8 is 1.
    x = 127 * np.eye(256, dtype=np.float32)
    node = Node("Q4NXMatMul", [x, blocks], constants=(1,), options={"activations": "int8"}, M=32, K=256)
    y = np.concatenate([node(x[i : i + 32], blocks)[0] for i in range(0, 256, 32)])
    np.testing.assert_array_equal(y.T, 127 * q4nx.dequantize(blocks, 32, 256))


def test_bias_and_residual_are_added_last() -> None:
    rng = np.random.default_rng(3)
    rows, columns = 48, 256
    blocks = blocks_of(rows, columns, rng)
    x = rng.standard_normal((2, 5, columns), dtype=np.float32)
    bias = rng.standard_normal(rows, dtype=np.float32)
    residual = rng.standard_normal((2, 5, rows), dtype=np.float32)
    (plain,) = run("Q4NXMatMul", [x, blocks], constants=(1,), M=rows, K=columns)
    (both,) = run("Q4NXMatMul", [x, blocks, bias, residual], constants=(1,), M=rows, K=columns)
    np.testing.assert_array_equal(both, (plain + bias) + residual)


def test_fused_dqp_equals_product_of_one_row() -> None:
    rng = np.random.default_rng(4)
    blocks = blocks_of(64, 512, rng)
    x = rng.standard_normal((1, 1, 512), dtype=np.float32)
    (product,) = run("Q4NXMatMul", [x, blocks], constants=(1,), M=64, K=512)
    (fused,) = run("FusedDQP", [x, blocks], constants=(1,), M=64, K=512)
    np.testing.assert_array_equal(fused, product)
    two = np.concatenate([x, x])
    with pytest.raises(ValueError, match=r"expected one row, got X of shape \[2,1,512\]"):
        run("FusedDQP", [two, blocks], constants=(1,), M=64, K=512)


@pytest.mark.parametrize("rows", [1, 4, 5, 256, 257, 1023, 99451])
@pytest.mark.parametrize("row_blocks", [1, 15, 216, 8192])
@pytest.mark.parametrize("threads", [1, 2, 12])
def test_tasks_cover_all_rows(rows: int, row_blocks: int, threads: int) -> None:
    """No task has more rows than its buffers hold, nor so few that they would be multiplied as in a decode step; and
    every thread has a task if there are enough rows of blocks."""
    row_parts, block_parts = testing.matmul_plan(rows, row_blocks, threads)
    shortest, longest = rows // row_parts, -(-rows // row_parts)
    assert longest <= 256
    assert shortest > 4 or row_parts == 1
    assert min(threads, row_blocks) <= block_parts <= row_blocks


@pytest.mark.parametrize(
    ("attributes", "constants", "message"),
    [
        ({"M": 32, "K": 300}, (1,), r"expected weight 'input1' of shape \[1,2,5120\], got \[1,1,5120\]"),
        ({"M": 64, "K": 256}, (1,), r"expected weight 'input1' of shape \[2,1,5120\]"),
        ({"M": 32, "K": 256}, (), "expected a constant of the model, got 'input1'"),
        ({"M": 0, "K": 256}, (1,), "attribute 'M': expected 1 to 2147483648, got 0"),
        ({"K": 256}, (1,), "expected the attribute 'M', got none"),
        ({"M": 32, "K": 256, "gating": "relu"}, (1,), "expected one of none.geglu.swiglu, got 'relu'"),
        ({"M": 32, "K": 256, "gating": "geglu"}, (1,), r"of shape \[2,1,5120\]"),
    ],
)
def test_weight_with_unfit_attributes_is_refused(
    attributes: dict[str, object], constants: tuple[int, ...], message: str
) -> None:
    x = np.zeros((1, 256), np.float32)
    blocks = blocks_of(32, 256, np.random.default_rng(6))
    with pytest.raises(ValueError, match=message):
        Node("Q4NXMatMul", [x, blocks], constants=constants, **attributes)


def test_unfit_activations_are_refused() -> None:
    blocks = blocks_of(32, 256, np.random.default_rng(7))
    x = np.zeros((1, 256), np.float32)
    node = Node("Q4NXMatMul", [x, blocks], constants=(1,), M=32, K=256)
    with pytest.raises(ValueError, match=r"expected X of shape \[.., 256\], got \[1,255\]"):
        node(np.zeros((1, 255), np.float32), blocks)


def test_unknown_instruction_set_lists_known_ones() -> None:
    blocks = blocks_of(32, 256, np.random.default_rng(8))
    with pytest.raises(ValueError, match=r"auto, .*generic.*got 'sse9'"):
        Node("Q4NXMatMul", [None, blocks], constants=(1,), options={"cpu_isa": "sse9"}, M=32, K=256)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", [q4nx.WIDE, q4nx.NARROW, q4nx.SYMMETRIC, *EIGHT_BITS], ids=str)
def test_gather_equals_reference(isa: str, layout: q4nx.Layout) -> None:
    rng = np.random.default_rng(9)
    weight = random_weight(100, 300, layout, rng)
    indices = rng.integers(0, 100, (2, 7))
    blocks = q4nx.pack(*weight, layout)
    (y,) = run("Q4NXGather", [blocks, indices], constants=(0,), options={"cpu_isa": isa}, M=100, K=300)
    np.testing.assert_array_equal(y, q4nx.dequantize_codes(weight)[indices])


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (q4nx.NARROW, r"expected weight 'input1' of shape \[1,10,640\], got \[1,8,640\]"),
        (q4nx.SYMMETRIC, r"expected weight 'input1' of shape \[1,10,576\], got \[1,8,576\]"),
    ],
)
def test_unfit_narrow_blocks_are_refused(layout: q4nx.Layout, message: str) -> None:
    blocks = q4nx.pack(*symmetric_weight(32, 256, np.random.default_rng(12)), layout)
    with pytest.raises(ValueError, match=message):
        Node("Q4NXMatMul", [np.zeros((1, 300), np.float32), blocks], constants=(1,), M=32, K=300)


@pytest.mark.parametrize("index", [-1, 100, 2**40])
def test_gather_refuses_index_outside_table(index: int) -> None:
    blocks = blocks_of(100, 256, np.random.default_rng(10))
    with pytest.raises(ValueError, match=rf"expected indices in \[0, 100\), got {index} at position 1"):
        run("Q4NXGather", [blocks, np.array([3, index])], constants=(0,), M=100, K=256)

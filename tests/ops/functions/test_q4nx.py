# SPDX-License-Identifier: Apache-2.0
"""Q4NX in Python: bytes against the format's description, errors against GGUF's, and messages for malformed input."""

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flownpu.ops import q4nx
from tests.ops.device import testing

FIXTURE = Path(__file__).parents[2] / "fixtures" / "gemma3-topics"
BFLOAT16 = ml_dtypes.bfloat16
shapes = st.tuples(st.integers(1, 80), st.integers(1, 600))
LAYOUTS = {"wide": q4nx.WIDE, "narrow": q4nx.NARROW, "symmetric": q4nx.SYMMETRIC}
EIGHT_BITS = {"eight bits": q4nx.EIGHT_BITS, "eight bits with minima": q4nx.EIGHT_BITS_WITH_MINIMA, "table": q4nx.TABLE}
each_layout = pytest.mark.parametrize("layout", (LAYOUTS | EIGHT_BITS).values(), ids=LAYOUTS | EIGHT_BITS)


def random_quantized(rows: int, columns: int, seed: int, layout: q4nx.Layout = q4nx.WIDE) -> q4nx.Quantized:
    """Random codes and parameters (magnitudes of 2^-8 to 2^8) that `layout` can hold, even if no weight has them."""
    rng = np.random.default_rng(seed)
    groups = -(-columns // 32)
    scale, minimum = np.exp2(rng.uniform(-8, 8, (2, rows, groups))) * rng.choice([-1, 1], (2, rows, groups))
    if layout.unpacked_bits == 8:
        values = rng.choice(256, 16, replace=False) - 128 if layout.table else np.arange(-128, 128)
        codes = rng.choice(values.astype(np.int8), (rows, columns))
        return q4nx.Quantized(codes, scale.astype(BFLOAT16), (minimum * layout.minima).astype(BFLOAT16) + BFLOAT16(0))
    if not layout.minima:
        scale = np.where(rng.random(scale.shape) < 0.1, 0, scale)
        scale[rng.random(scale.shape) < 0.5] *= -1  # GGUF's Q4_0 has negative scales
        scale = scale.astype(BFLOAT16)
        return q4nx.Quantized(rng.integers(0, 16, (rows, columns), dtype=np.uint8), scale, BFLOAT16(-8) * scale)
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    return q4nx.Quantized(codes, np.abs(scale).astype(BFLOAT16), minimum.astype(BFLOAT16))


def assert_same(actual: q4nx.Quantized, expected: q4nx.Quantized) -> None:
    np.testing.assert_array_equal(actual.codes, expected.codes)
    np.testing.assert_array_equal(actual.scale.view(np.uint16), expected.scale.view(np.uint16))
    np.testing.assert_array_equal(actual.minimum.view(np.uint16), expected.minimum.view(np.uint16))


def pack_by_the_description(quantized: q4nx.Quantized, layout: q4nx.Layout) -> np.ndarray:
    """One byte at a time, from the format's description: no layout code is shared with the packer."""
    rows, columns = quantized.codes.shape
    groups, block_bytes, minima_at, codes_at, strip_bytes = {
        q4nx.WIDE: (8, 5120, 512, 1024, 2048),
        q4nx.NARROW: (1, 640, 64, 128, 256),
        q4nx.SYMMETRIC: (1, 576, None, 64, 256),
        q4nx.EIGHT_BITS: (1, 1088, None, 64, None),
        q4nx.EIGHT_BITS_WITH_MINIMA: (1, 1152, 64, 128, None),
        q4nx.TABLE: (1, 592, None, 64, 256),
    }[layout]
    blocks = np.zeros((-(-rows // 32), -(-columns // (32 * groups)), block_bytes), np.uint8)
    codes = quantized.codes
    if layout.table:
        table = sorted(set(codes.ravel().tolist()))
        codes = np.array([[table.index(code) for code in row] for row in codes.tolist()], np.uint8)
        blocks[:, :, 576 : 576 + len(table)] = np.array(table, np.int8).view(np.uint8)
    for row in range(rows):
        for group in range(-(-columns // 32)):
            block = blocks[row // 32, group // groups]
            at = 2 * (group % groups * 32 + row % 32)
            block[at : at + 2] = np.frombuffer(quantized.scale[row, group].tobytes(), np.uint8)
            if minima_at is not None:
                at += minima_at
                block[at : at + 2] = np.frombuffer(quantized.minimum[row, group].tobytes(), np.uint8)
        for column in range(columns):
            if strip_bytes is None:
                at = codes_at + column % 32 // 4 * 128 + row % 2 * 64 + row % 32 // 2 * 4 + column % 4
                blocks[row // 32, column // 32, at] = quantized.codes[row, column].view(np.uint8)
                continue
            strip, row_in_strip = divmod(row % 32, 16)
            block, column_in_block = divmod(column, 32 * groups)
            at = codes_at + strip * strip_bytes + column_in_block * 8 + row_in_strip // 2
            blocks[row // 32, block, at] |= codes[row, column] << 4 * (row % 2)
    return blocks


def test_packed_bytes_equal_golden_ones() -> None:
    codes = np.zeros((18, 34), np.uint8)
    codes[0, 0], codes[1, 0], codes[17, 33], codes[16, 33] = 3, 10, 15, 1
    scale, minimum = np.zeros((2, 18, 2), BFLOAT16)
    scale[1, 0], scale[17, 1] = 1.0, 0.5  # 0x3F80, 0x3F00
    minimum[1, 0], minimum[17, 1] = -2.0, 1.5  # 0xC000, 0x3FC0
    expected = np.zeros(5120, np.uint8)
    expected[[2, 3]] = 0x80, 0x3F  # scale of group 0, row 1: byte 2 * (0 * 32 + 1)
    expected[[98, 99]] = 0x00, 0x3F  # group 1, row 17: 2 * (32 + 17)
    expected[[514, 515]] = 0x00, 0xC0
    expected[[610, 611]] = 0xC0, 0x3F
    expected[1024] = 0xA3  # strip 0, column 0, rows 0 and 1
    expected[1024 + 2048 + 33 * 8] = 0xF1  # strip 1, column 33, rows 16 and 17

    blocks = q4nx.pack(codes, scale, minimum)

    assert blocks.shape == (1, 1, 5120)
    np.testing.assert_array_equal(blocks[0, 0], expected)
    weight = q4nx.dequantize(blocks, 18, 34)
    assert weight[1, 0] == -2.0 + 1.0 * 10
    assert weight[17, 33] == 1.5 + 0.5 * 15


def test_narrow_blocks_equal_golden_bytes() -> None:
    """The same weight: its second group begins a block."""
    codes = np.zeros((18, 34), np.uint8)
    codes[0, 0], codes[1, 0], codes[17, 33], codes[16, 33] = 3, 10, 15, 1
    scale = np.zeros((18, 2), BFLOAT16)
    scale[1, 0], scale[17, 1] = 1.0, -0.5  # 0x3F80, 0xBF00; times -8: 0xC100, 0x4080
    minimum = BFLOAT16(-8) * scale
    scales_and_codes = np.zeros((2, 64 + 512), np.uint8)
    scales_and_codes[0, [2, 3]] = 0x80, 0x3F
    scales_and_codes[1, [34, 35]] = 0x00, 0xBF
    scales_and_codes[0, 64] = 0xA3  # strip 0, column 0, rows 0 and 1
    scales_and_codes[1, 64 + 256 + 8] = 0xF1  # strip 1, column 1 of the block, rows 16 and 17
    minima = np.zeros((2, 32, 2), np.uint8)
    minima[:, :18] = 0x00, 0x80  # -8 * 0 = -0
    minima[0, 1], minima[1, 17] = (0x00, 0xC1), (0x80, 0x40)

    symmetric = q4nx.pack(codes, scale, minimum, q4nx.SYMMETRIC)
    narrow = q4nx.pack(codes, scale, minimum, q4nx.NARROW)

    np.testing.assert_array_equal(symmetric, scales_and_codes[None])
    expected = np.concatenate([scales_and_codes[:, :64], minima.reshape(2, 64), scales_and_codes[:, 64:]], axis=1)
    np.testing.assert_array_equal(narrow, expected[None])


@each_layout
@given(shape=shapes, seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=15)
def test_pack_follows_description_and_unpack_inverts_it(layout: q4nx.Layout, shape: tuple[int, int], seed: int) -> None:
    quantized = random_quantized(*shape, seed, layout)
    blocks = q4nx.pack(*quantized, layout)
    assert blocks.shape == q4nx.blocks_shape(*shape, layout)
    assert q4nx.layout_of(blocks) == q4nx.layout_of(blocks.shape) == layout
    np.testing.assert_array_equal(blocks, pack_by_the_description(quantized, layout))
    assert_same(q4nx.unpack(blocks, *shape), quantized)


@each_layout
@given(shape=shapes, seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=15)
def test_dequantize_is_equation_in_float32(layout: q4nx.Layout, shape: tuple[int, int], seed: int) -> None:
    quantized = random_quantized(*shape, seed, layout)
    blocks = q4nx.pack(*quantized, layout)
    # In float64 the equation is exact (16 bits plus 8 bits, at most 24 binary places apart): one rounding is left.
    scale, minimum = (p.astype(np.float64).repeat(32, axis=1)[:, : shape[1]] for p in quantized[1:])
    expected = (minimum + scale * quantized.codes).astype(np.float32)
    np.testing.assert_array_equal(q4nx.dequantize(blocks, *shape), expected)
    indices = np.random.default_rng(seed).integers(0, shape[0], (2, 3))
    np.testing.assert_array_equal(q4nx.gather(blocks, indices, *shape), expected[indices])


@pytest.mark.parametrize("columns", [1, 256, 300])
def test_repacking_changes_no_bit_of_weight(columns: int) -> None:
    weight = random_quantized(40, columns, 0, q4nx.SYMMETRIC)
    for source in LAYOUTS.values():
        for layout in LAYOUTS.values():
            again = q4nx.repack(q4nx.pack(*weight, source)[:1], columns, layout)
            assert q4nx.layout_of(again) == layout
            assert_same(q4nx.unpack(again, 32, columns), q4nx.Quantized(*(field[:32] for field in weight)))


def test_symmetric_weights_are_told_by_bits_of_their_minima() -> None:
    symmetric = random_quantized(5, 96, 0, q4nx.SYMMETRIC)
    assert q4nx.is_symmetric(symmetric)
    assert q4nx.is_symmetric(symmetric._replace(scale=0 * symmetric.scale, minimum=BFLOAT16(-8) * 0 * symmetric.scale))
    minimum = symmetric.minimum.copy()
    minimum.view(np.uint16)[4, 2] ^= 1  # one of fifteen, by its last bit
    other = symmetric._replace(minimum=minimum)
    assert not q4nx.is_symmetric(other)
    with pytest.raises(ValueError, match="every minimum to be -8 times its scale for a layout without minima"):
        q4nx.pack(*other, q4nx.SYMMETRIC)


@given(shapes, st.integers(0, 2**32))
@settings(deadline=None, max_examples=15)
def test_eight_bit_codes_of_q8_0_are_kept(shape: tuple[int, int], seed: int) -> None:
    """GGUF's own package quantises; codes stay, and what its fp16 scales lose in bf16 is at most 2^-8 of a weight."""
    rows, groups = shape[0], -(-shape[1] // 32)
    weight = np.random.default_rng(seed).standard_normal((rows, 32 * groups), dtype=np.float32)
    stored = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0).reshape(rows, groups, 34)
    codes = stored[..., 2:].view(np.int8).reshape(rows, -1)
    scale = np.ascontiguousarray(stored[..., :2]).view(np.float16)[..., 0].astype(np.float32)

    kept = q4nx.from_affine(codes, scale, bits=8)
    again = q4nx.unpack(q4nx.pack(*kept, q4nx.EIGHT_BITS), *weight.shape)

    np.testing.assert_array_equal(again.codes, codes)
    exact = gguf.quants.dequantize(stored.reshape(rows, -1), gguf.GGMLQuantizationType.Q8_0)
    assert np.all(np.abs(q4nx.dequantize_codes(again) - exact) <= 2.0**-8 * np.abs(exact))


@pytest.mark.parametrize("magnitude", [1.0, 2.0**-130, 2.0**120])
def test_bytes_of_floats_are_within_half_a_step(magnitude: float) -> None:
    weight = np.random.default_rng(0).standard_normal((40, 100)) * magnitude
    weight[3, :32] = 0
    found = q4nx.quantize_bytes(weight.astype(np.float32))
    assert q4nx.is_symmetric(found)
    step = found.scale.astype(np.float64).repeat(32, axis=1)[:, :100]
    # d is max|w| / 127 rounded to bf16; a group below 2^-120 becomes 0.
    grouped = np.abs(np.pad(weight, ((0, 0), (0, 28)))).reshape(40, 4, 32).max(-1).repeat(32, axis=1)[:, :100]
    assert np.all(np.abs(q4nx.dequantize_codes(found) - weight) <= np.maximum(step / 2, (step == 0) * 2.0**-120))
    assert np.all(step <= grouped / 127 * (1 + 2.0**-8))


def test_codes_of_other_bits_than_layout_are_refused() -> None:
    codes, scale, minimum = q4nx.quantize_bytes(np.ones((2, 32), np.float32))
    with pytest.raises(ValueError, match=r"codes of 4 bits for this layout, got int8 \(8 bits\)"):
        q4nx.pack(codes, scale, minimum, q4nx.NARROW)
    with pytest.raises(ValueError, match=r"codes of 8 bits for this layout, got uint8 \(4 bits\)"):
        q4nx.pack(codes.view(np.uint8), scale, minimum, q4nx.EIGHT_BITS)
    with pytest.raises(ValueError, match="every minimum to be 0 times its scale"):
        q4nx.pack(codes, scale, scale, q4nx.EIGHT_BITS)
    with pytest.raises(ValueError, match="codes of 4 bits"):
        q4nx.repack(q4nx.pack(codes, scale, minimum, q4nx.EIGHT_BITS), 32, q4nx.WIDE)
    with pytest.raises(ValueError, match="at most 16 codes for a layout with a table, got 17"):
        q4nx.pack(np.tile(np.arange(17, dtype=np.int8), (2, 2))[:, :32], scale, minimum, q4nx.TABLE)
    with pytest.raises(ValueError, match=r"equally many bits, got \[4, 8\]"):
        q4nx.stack(q4nx.quantize(np.ones((2, 32), np.float32)), q4nx.Quantized(codes, scale, minimum))


@given(shapes, st.integers(0, 2**32))
@settings(deadline=None, max_examples=15)
def test_quantised_weight_quantises_to_itself(shape: tuple[int, int], seed: int) -> None:
    codes = random_quantized(*shape, seed).codes
    # Both ends in every group, so that its scale can be told from its values.
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scale = np.full((shape[0], -(-shape[1] // 32)), 0.015625, BFLOAT16)
    exact = q4nx.dequantize_codes(q4nx.Quantized(codes, scale, -8 * scale))
    again = q4nx.dequantize_codes(q4nx.quantize(exact))
    if shape[1] % 32 == 1:  # a last group of one column is its minimum alone
        exact, again = exact[:, :-1], again[:, :-1]
    np.testing.assert_array_equal(again, exact)


def test_codes_are_nearest_for_rounded_parameters() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    quantized = q4nx.quantize(weight)
    scale, minimum = (p.astype(np.float64).repeat(32, axis=1) for p in quantized[1:])
    error = np.abs(minimum + scale * quantized.codes - weight)
    best = np.min([np.abs(minimum + scale * code - weight) for code in range(16)], axis=0)
    # Ties between two codes: (w - m) / d is computed in float32, three roundings of a value of at most 16.
    assert np.all(error <= best + 16 * 3 * 2.0**-24 * scale)


def distribution(name: str) -> np.ndarray:
    rng = np.random.default_rng(1)
    match name:
        case "normal":
            return rng.standard_normal((256, 1024)).astype(np.float32)
        case "heavy-tailed":
            return rng.standard_t(3, (256, 1024)).astype(np.float32)
        case "uniform":
            return rng.uniform(-1, 1, (256, 1024)).astype(np.float32)
        case "offset":
            return (rng.standard_normal((256, 1024)) + 10).astype(np.float32)
        case "bfloat16":
            return rng.standard_normal((256, 1024)).astype(BFLOAT16).astype(np.float32)
    raise AssertionError(name)


def gguf_round_trip(weight: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)


@pytest.mark.parametrize("name", ["normal", "heavy-tailed", "uniform", "bfloat16"])
def test_error_is_below_q4_1s(name: str) -> None:
    weight = distribution(name)
    ours = q4nx.relative_error(weight, q4nx.dequantize_codes(q4nx.quantize(weight)))
    theirs = q4nx.relative_error(weight, gguf_round_trip(weight, gguf.GGMLQuantizationType.Q4_1))
    assert ours < theirs


def test_error_is_below_q4_1s_on_trained_model() -> None:
    from safetensors import safe_open

    files = sorted(FIXTURE.glob("*.safetensors"))
    assert files, f"expected the fixture model in {FIXTURE}"
    compared = 0
    for file in files:
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                weight = tensors.get_tensor(name)
                if weight.ndim != 2:
                    continue
                # GGUF quantises whole groups of 32 columns only.
                weight = weight[:512, : weight.shape[1] // 32 * 32].astype(np.float32)
                ours = q4nx.relative_error(weight, q4nx.dequantize_codes(q4nx.quantize(weight)))
                theirs = q4nx.relative_error(weight, gguf_round_trip(weight, gguf.GGMLQuantizationType.Q4_1))
                assert ours < theirs, name
                compared += 1
    assert compared


@pytest.mark.parametrize("name", ["normal", "heavy-tailed", "uniform", "offset"])
def test_error_is_below_that_of_smallest_and_largest_with_parameters_rounded_last(name: str) -> None:
    """Compared with choosing codes before the parameters are rounded, and without a search."""
    weight = distribution(name)
    groups = weight.reshape(256, -1, 32)
    minimum, step = groups.min(axis=2), np.ptp(groups, axis=2) / 15
    codes = np.rint((groups - minimum[..., None]) / step[..., None]).astype(np.uint8).reshape(weight.shape)
    naive = q4nx.dequantize_codes(q4nx.from_affine(codes, step, minimum))
    ours = q4nx.dequantize_codes(q4nx.quantize(weight))
    assert q4nx.relative_error(weight, ours) < q4nx.relative_error(weight, naive)


def test_search_comes_close_to_much_wider_one() -> None:
    """24 x 24 starts, in float64, one group after another: the search comes within 3 percent of its squared error."""
    weight = np.random.default_rng(0).standard_normal((4, 1024)).astype(np.float32)
    starts = np.arange(24) * 0.125 - 0.5  # in 15ths of the range, from either of its ends
    best = 0.0
    for group in weight.reshape(-1, 32).astype(np.float64):
        low, high = (a.reshape(-1, 1) for a in np.meshgrid(starts, starts))
        step = np.ptp(group) / 15
        minimum, scale = group.min() + low * step, step * (15 - low - high) / 15
        errors = []
        for _ in range(5):
            scale, minimum = (p.astype(BFLOAT16).astype(np.float64) for p in (scale, minimum))
            codes = np.clip(np.rint((group - minimum) / scale), 0, 15)
            errors.append(((minimum + scale * codes - group) ** 2).sum(axis=1).min())
            centred = codes - codes.mean(axis=1, keepdims=True)
            scale = (centred * group).sum(axis=1, keepdims=True) / (centred**2).sum(axis=1, keepdims=True)
            minimum = (group - scale * codes).mean(axis=1, keepdims=True)
        best += min(errors)
    ours = ((q4nx.dequantize_codes(q4nx.quantize(weight)).astype(np.float64) - weight) ** 2).sum()
    assert best <= ours <= 1.03 * best


def test_constant_groups_are_exact_where_bf16_is() -> None:
    weight = np.zeros((3, 64), np.float32)
    weight[1], weight[2] = -0.375, 3.0
    quantized = q4nx.quantize(weight)
    np.testing.assert_array_equal(q4nx.dequantize_codes(quantized), weight)
    assert not q4nx.pack(*quantized)[0, 0, :512].any(), "a constant group needs no scale"


def test_groups_side_by_side_are_as_each_alone() -> None:
    """Several groups are searched at once in a vector: different magnitudes, a constant one, a short one at the end."""
    weight = np.random.default_rng(9).standard_normal((2, 32 * 9 + 5)).astype(np.float32)
    weight *= np.repeat(np.exp2(np.arange(-140, 150, 29, dtype=np.float64)), 32)[: weight.shape[1]].astype(np.float32)
    weight[:, 64:96] = 0.3
    whole = q4nx.quantize(weight)
    for row, column in np.ndindex(2, 10):
        group = slice(32 * column, 32 * (column + 1))
        part = q4nx.Quantized(
            whole.codes[row : row + 1, group], *(p[row : row + 1, column : column + 1] for p in whole[1:])
        )
        assert_same(part, q4nx.quantize(weight[row : row + 1, group]))


@pytest.mark.parametrize("width", testing.search_widths()[1:])
@pytest.mark.parametrize("size", [32, 5])
def test_vector_widths_find_same_bits(width: int, size: int) -> None:
    """A fused multiply-add, which rounds once, would change one group in 80,000."""
    groups = np.random.default_rng(1).standard_normal((240_007, size), dtype=np.float32)
    assert testing.quantize_groups(groups, width) == testing.quantize_groups(groups, 4)


def test_last_group_is_fitted_to_its_weights_alone() -> None:
    weight = np.random.default_rng(0).standard_normal((7, 72)).astype(np.float32) + 5
    whole, alone = q4nx.quantize(weight), q4nx.quantize(weight[:, 64:])
    np.testing.assert_array_equal(whole.scale[:, -1:], alone.scale)
    np.testing.assert_array_equal(whole.minimum[:, -1:], alone.minimum)
    np.testing.assert_array_equal(whole.codes[:, 64:], alone.codes)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_narrow_types_are_quantised_as_their_float32_values(dtype: Any) -> None:
    weight = np.random.default_rng(0).standard_normal((5, 96)).astype(dtype)
    assert_same(q4nx.quantize(weight), q4nx.quantize(weight.astype(np.float32)))


@pytest.mark.parametrize("magnitude", [1e-45, 1e-39, 1e-30, 1e30, 1.7e38])
def test_extreme_magnitudes_stay_finite(magnitude: float) -> None:
    weight = (np.random.default_rng(0).uniform(-1, 1, (4, 64)) * magnitude).astype(np.float32)
    with np.errstate(all="raise", under="ignore"):
        result = q4nx.dequantize_codes(q4nx.quantize(weight)).astype(np.float64)
    # A step is at most 2/15 of the magnitude; it and the minimum are rounded by 2^-8, or by half of 2^-133, bf16's
    # smallest number. Below 2^-126 a scale is not used at all: then the error is that of a constant group.
    bound = magnitude * (1 / 15 + 3 * 2.0**-8) + 16 * 2.0**-134 if magnitude > 2.0**-120 else 2 * magnitude
    assert np.all(np.abs(result - weight) <= bound)


def test_codes_of_gguf_are_kept() -> None:
    weight = distribution("normal")
    stored = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_1).reshape(256, 32, 20)
    parameters = np.ascontiguousarray(stored[..., :4]).view(np.float16).astype(np.float32)
    nibbles = stored[..., 4:]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).reshape(weight.shape)
    quantized = q4nx.from_affine(codes, parameters[..., 0], parameters[..., 1])
    np.testing.assert_array_equal(quantized.codes, codes)
    exact = gguf_round_trip(weight, gguf.GGMLQuantizationType.Q4_1)
    # Scale and minimum are rounded to 8 significant bits, by 2^-8 of them at most.
    bound = 2.0**-8 * (np.abs(parameters[..., :1]) * 15 + np.abs(parameters[..., 1:]))
    difference = np.abs(q4nx.dequantize_codes(quantized) - exact).reshape(256, 32, 32)
    assert np.all(difference <= bound * (1 + 1e-6))


def test_stack_does_not_align_its_parts() -> None:
    parts = [random_quantized(rows, 96, rows) for rows in (20, 13, 13)]
    stacked = q4nx.unpack(q4nx.pack(*q4nx.stack(*parts)), 46, 96)
    for first, part in zip((0, 20, 33), parts, strict=True):
        assert_same(q4nx.Quantized(*(a[first : first + len(part.codes)] for a in stacked)), part)


@each_layout
def test_gated_pair_unpacks_to_both_weights(layout: q4nx.Layout) -> None:
    gate, up = random_quantized(40, 96, 0, layout), random_quantized(40, 96, 1, layout)
    blocks = q4nx.pack_gated(gate, up, layout)
    shape = (4, 1, 5120) if layout == q4nx.WIDE else (4, 3, layout.block_bytes)
    assert blocks.shape == q4nx.blocks_shape(40, 96, layout, gated=True) == shape
    assert_same(q4nx.unpack(blocks[:2], 40, 96), gate)
    assert_same(q4nx.unpack(blocks[2:], 40, 96), up)


def test_relative_error_equals_numpy() -> None:
    weight = np.array([[3.0, 4.0]], np.float32)
    assert q4nx.relative_error(weight, weight) == 0
    assert q4nx.relative_error(weight, 0 * weight) == 1
    assert q4nx.relative_error(0 * weight, 0 * weight) == 0
    assert q4nx.relative_error(0 * weight, weight) == np.inf


def with_value(value: float) -> np.ndarray:
    weight = np.ones((40, 64), np.float32)
    weight[37, 5] = value
    return weight


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.ones((2, 2)), "float32, float16 or bfloat16, got float64"),
        (np.ones(4, np.float32), r"\[rows, columns\].* got \[4\]"),
        (np.ones((0, 4), np.float32), r"got \[0, 4\]"),
        (with_value(np.nan), "got nan in row 37, column 5"),
        (with_value(-np.inf), "got -inf in row 37, column 5"),
        (with_value(np.finfo(np.float32).max), "at most 1.70141e.38, got 3.40282e.38 in row 37, column 5"),
    ],
)
def test_quantize_refuses_unfit_weights(weight: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        q4nx.quantize(weight)


def test_malformed_arguments_are_refused() -> None:
    codes, scale, minimum = random_quantized(3, 40, 0)
    blocks = q4nx.pack(codes, scale, minimum)
    with pytest.raises(ValueError, match=r"codes in 0\.\.15, got 16"):
        q4nx.pack(codes + np.uint8(16 - codes.max()), scale, minimum)
    with pytest.raises(ValueError, match=r"scale bfloat16 \[3, 2\] .* got float32 \[3, 2\]"):
        q4nx.pack(codes, scale.astype(np.float32), minimum)
    with pytest.raises(ValueError, match=r"minimum bfloat16 \[3, 2\] .* got bfloat16 \[3, 1\]"):
        q4nx.pack(codes, scale, minimum[:, :1])
    with pytest.raises(ValueError, match="integer codes, got float32"):
        q4nx.from_affine(codes.astype(np.float32), scale, minimum)
    with pytest.raises(ValueError, match=r"0..15, got -1..\d+"):
        q4nx.from_affine(codes.astype(np.int8) - (codes == codes.min()) * (1 + codes.min()), scale, minimum)
    with pytest.raises(ValueError, match="every minimum to be finite"):
        q4nx.from_affine(codes, scale, np.full((3, 2), 3.4e38))
    with pytest.raises(ValueError, match=r"\[1, 2, 5120\] for 3 rows and 300 columns, got uint8 \[1, 1, 5120\]"):
        q4nx.unpack(blocks, 3, 300)
    with pytest.raises(ValueError, match=r"\[1, 2, 640\] for 3 rows and 40 columns, got uint8 \[1, 1, 640\]"):
        q4nx.unpack(q4nx.pack(codes[:, :32], scale[:, :1], minimum[:, :1], q4nx.NARROW), 3, 40)
    with pytest.raises(
        ValueError,
        match=r"ceil\(columns/256\), 5120\], .*/32\), 640\], .*/32\), 1152\], .*/32\), 592\], got \[1, 1, 512\]",
    ):
        q4nx.unpack(blocks[..., :512], 3, 40)
    with pytest.raises(ValueError, match=r"got \[4, 5120\]"):
        q4nx.layout_of((4, 5120))
    with pytest.raises(ValueError, match="got int8"):
        q4nx.dequantize(blocks.view(np.int8), 3, 40)
    with pytest.raises(ValueError, match="at least 1, got 0 and 40"):
        q4nx.unpack(blocks, 0, 40)
    with pytest.raises(IndexError, match=r"0\.\.2, got 3"):
        q4nx.gather(blocks, np.array([0, 3]), 3, 40)
    with pytest.raises(IndexError, match=r"0\.\.2, got -1"):
        q4nx.gather(blocks, np.array([-1]), 3, 40)
    with pytest.raises(ValueError, match="integer indices"):
        q4nx.gather(blocks, np.array([0.0]), 3, 40)
    with pytest.raises(ValueError, match="equal columns"):
        q4nx.stack(random_quantized(3, 40, 0), random_quantized(3, 64, 0))
    with pytest.raises(ValueError, match="one shape"):
        q4nx.pack_gated(random_quantized(3, 40, 0), random_quantized(4, 40, 0))

# SPDX-License-Identifier: Apache-2.0
"""Kernels against their equations in float64: projections, norms, positions, activations, pooling.

Inputs are bf16 numbers, which a reference reads without rounding. Tolerances are sums of the errors that the
arithmetic makes (their bounds: flownpu/selftest/reference/numbers.py): an output's rounding, products of f32 numbers
split in two, f32 additions.
"""

import numpy as np
import pytest

from flownpu.ops import q4nx
from flownpu.ops.q4nx import as_read
from flownpu.selftest.reference.projections import (
    ACTIVATIONS,
    activation_tolerance,
    projection_tolerance,
    random_weight,
)
from tests.aie.host_kernels import (
    BF16_ROUNDING,
    BFLOAT16,
    F32_ROUNDING,
    INVERSE,
    PRODUCT,
    assert_within,
    bf16,
    bits,
    blocks_of,
    load,
    panels,
    tiled,
    untiled,
    wide,
)

KERNELS = {"geglu": "gelu", "swiglu": "silu"}


DEQUANT = pytest.mark.parametrize(("name", "bits"), [("q4nx_dequant", 4), ("q4nx_dequant_planes", 8)])


@DEQUANT
def test_dequantises_to_bf16_exactly(kernels, rng, name, bits):
    blocks, _ = random_weight(rng, 32, 256, bits)
    tile = np.zeros(8192, BFLOAT16)
    kernels.call(f"{name}_bf16", as_read(blocks).reshape(-1), tile)
    # One rounding to f32 (q4nx.dequantize), one to bf16, as in the kernel.
    expected = panels(bf16(q4nx.dequantize(blocks, 32, 256)).T)
    np.testing.assert_array_equal(tile.view(np.uint16), expected.view(np.uint16))


@DEQUANT
def test_dequantises_to_bfp16_exactly(rng, name, bits):
    blocks, _ = random_weight(rng, 32, 256, bits)
    tile = np.zeros(9216, np.uint8)
    load("xdna2").call(f"{name}_bfp16", as_read(blocks).reshape(-1), tile)
    weight = bf16(q4nx.dequantize(blocks, 32, 256))  # [feature][k]
    coded, _ = blocks_of(weight.reshape(4, 8, 32, 8).transpose(2, 0, 1, 3))  # [k/8][feature/8][feature][k]
    np.testing.assert_array_equal(tile, coded.reshape(-1))


@pytest.mark.parametrize(("m", "k", "n"), [(8, 8, 32), (16, 72, 64), (64, 104, 64), (32, 256, 96)])
def test_gemm_in_bf16_equals_float64(kernels, rng, m, k, n):
    a, b, c = bf16(rng.normal(size=(m, k))), bf16(rng.normal(size=(k, n))), rng.normal(size=(m, n)).astype(np.float32)
    result = tiled(c)
    kernels.call("gemm_bf16", tiled(a), panels(b), result, m, k, n)
    left, right = wide(a), wide(b)
    if kernels.architecture == "xdna2":  # in block floating point: blocks along k
        left, right = blocks_of(a)[1], blocks_of(b.T)[1].T
    magnitude = np.abs(left) @ np.abs(right) + np.abs(c)
    assert_within(untiled(result, m, n), wide(c) + left @ right, (k + 1) * F32_ROUNDING * magnitude)


@pytest.mark.parametrize(("m", "k", "n"), [(8, 256, 32), (32, 64, 96)])
def test_gemm_in_bfp16_equals_float64(rng, m, k, n):
    a, b, c = bf16(rng.normal(size=(m, k))), bf16(rng.normal(size=(k, n))), rng.normal(size=(m, n)).astype(np.float32)
    coded, right = blocks_of(np.ascontiguousarray(b.T))  # [n][k/8][9]
    operand = coded.reshape(n // 32, 4, 8, k // 8, 9).transpose(0, 3, 1, 2, 4)  # [n/32][k/8][4][8 n][9]
    result = tiled(c)
    load("xdna2").call("gemm_bfp16", tiled(a), np.ascontiguousarray(operand).reshape(-1), result, m, k, n)
    left, right = blocks_of(a)[1], right.T
    magnitude = np.abs(left) @ np.abs(right) + np.abs(c)
    assert_within(untiled(result, m, n), wide(c) + left @ right, (k + 1) * F32_ROUNDING * magnitude)
    # And against the product of unrounded operands: rounding a mantissa errs by half of 2^-6 of its block's power of
    # two, by all of 2^-6 where it saturates; the power of two is at most the largest of the block's 8 numbers.
    largest_a = np.repeat(np.abs(wide(a)).reshape(m, -1, 8).max(-1), 8, 1)
    largest_b = np.repeat(np.abs(wide(b)).reshape(-1, 8, n).max(1), 8, 0)
    tolerance = 2.0**-6 * (largest_a @ np.abs(wide(b)) + np.abs(wide(a)) @ largest_b + 2.0**-6 * largest_a @ largest_b)
    assert_within(untiled(result, m, n), wide(c) + wide(a) @ wide(b), tolerance + k * F32_ROUNDING * magnitude)


def test_dequantised_blocks_multiply_as_gemm_operand(kernels, rng):
    blocks, _ = random_weight(rng, 64, 512)
    weight = wide(q4nx.dequantize(blocks, 64, 512))
    operand = np.zeros((2, 2, 8192), BFLOAT16)
    for place in np.ndindex(2, 2):
        kernels.call("q4nx_dequant_bf16", blocks[place], operand[place])
    a, result = bf16(np.eye(8, 512, 77)), np.zeros(8 * 64, np.float32)
    kernels.call("gemm_bf16", tiled(a), operand.reshape(-1), result, 8, 512, 64)
    columns = weight[:, 77:85].T
    # Rounding to bf16, and on XDNA2 to a mantissa of 8 bits relative to the largest of 8 weights.
    tolerance = BF16_ROUNDING * np.abs(columns)
    if kernels.architecture == "xdna2":
        tolerance = tolerance + 2.0**-6 * np.abs(weight).max()
    assert_within(untiled(result, 8, 64), columns, tolerance)


def test_first_values_equal_float64(kernels):
    zeros = np.ones(64, np.float32)
    kernels.call("zero_f32", zeros, 64)
    assert not zeros.any()


def test_plain_stores_equal_float64(kernels, rng):
    c, y = rng.normal(size=96).astype(np.float32), np.zeros(96, BFLOAT16)
    kernels.call("store_bf16", c, y, 96)
    np.testing.assert_array_equal(y.view(np.uint16), bf16(c).view(np.uint16))


ARGUMENTS = np.concatenate([np.linspace(-12, 12, 480), [0, -0.0, 1e-6, -1e-6, 60, -60, 1000, -1000], np.zeros(8)])


@pytest.mark.parametrize("gating", ["geglu", "swiglu"])
def test_gated_activations_equal_float64(kernels, rng, gating):
    gate, up, y = ARGUMENTS.astype(np.float32), rng.normal(size=496).astype(np.float32), np.zeros(496, BFLOAT16)
    kernels.call(f"store_{KERNELS[gating]}_mul", gate, up, y, 496)
    act = ACTIVATIONS[gating](wide(gate))
    expected = act * wide(up)
    tolerance = activation_tolerance(wide(gate), act) * np.abs(wide(up)) + (PRODUCT + BF16_ROUNDING) * np.abs(expected)
    assert_within(y, expected, tolerance)


def test_gated_part_equals_float64(kernels, rng):
    """The second of two parts. exp2 errs by 5.2e-5, 1 / x by 1e-4 (kernels/common/float_math.h), their product less."""
    x, part = rng.normal(size=2 * 496).astype(BFLOAT16), np.zeros(496, BFLOAT16)
    gates = np.concatenate([ARGUMENTS[::-1], ARGUMENTS]).astype(BFLOAT16)
    kernels.call("gated_part", x, gates, part, 1, 496)
    expected = wide(x)[496:] / (1 + np.exp(-np.maximum(wide(gates)[496:], -60)))
    # A gate is no smaller than 2^-60.
    tolerance = (2e-4 + PRODUCT + BF16_ROUNDING) * np.abs(expected) + 2.0**-59 * np.abs(wide(x)[496:])
    assert_within(part, expected, tolerance)


def test_accumulator_gelu_equals_float64(kernels):
    c, y = ARGUMENTS.astype(np.float32), np.zeros(496, BFLOAT16)
    kernels.call("store_gelu", c, y, 496)
    expected = ACTIVATIONS["geglu"](wide(c))
    assert_within(y, expected, activation_tolerance(wide(c), expected) + BF16_ROUNDING * np.abs(expected))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("m", "k"), [(32, 256), (64, 768), (40, 300), (32, 2560)])
def test_fused_dqp_equals_float64(kernels, rng, m, k, bits):
    given, quantized = random_weight(rng, m, k, bits)
    blocks, planes = as_read(given), bits // 4
    rows, columns = blocks.shape[0], blocks.shape[1] // planes
    # Any finite numbers may follow the last group of 32 columns: scales and minima are 0 there.
    x = bf16(rng.normal(size=columns * 256) * 1e6)
    x[:k], x[k : -(-k // 32) * 32] = bf16(rng.normal(size=k)), 0
    sums, y = np.zeros(columns * 16, BFLOAT16), np.zeros((rows, 32), np.float32)
    kernels.call("fused_dqp_group_sums", x, sums, columns * 256)
    for row in range(rows):
        kernels.call("zero_f32", y[row], 32)
        for j in range(columns * planes):
            kernels.call("fused_dqp", blocks[row, j], x, sums, y[row], j, planes)
    weight = wide(q4nx.dequantize(given, m, k))
    assert_within(y.reshape(-1)[:m], weight @ wide(x[:k]), projection_tolerance(quantized, x[:k]))


def rms(x, weight, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def norm_tolerance(expected, n):
    """Rounding the output, 1/n, the inverse root (half its argument's error counts), f32 sums, two split products."""
    return (BF16_ROUNDING + 2 * INVERSE + n * F32_ROUNDING + 2 * PRODUCT) * np.abs(expected)


@pytest.mark.parametrize(("rows", "n"), [(1, 64), (3, 1152), (2, 2560), (4, 128), (1, 256)])
def test_rms_norm_equals_float64(kernels, rng, rows, n):
    x, weight, y = bf16(rng.normal(size=(rows, n)) * 3), bf16(rng.normal(size=n)), np.zeros((rows, n), BFLOAT16)
    kernels.call("rms_norm", x, weight, y, rows, n, bits(1e-6))
    expected = rms(wide(x), wide(weight), 1e-6)
    assert_within(y, expected, norm_tolerance(expected, n))
    in_place = x.copy()
    kernels.call("rms_norm", in_place, weight, in_place, rows, n, bits(1e-6))
    np.testing.assert_array_equal(in_place.view(np.uint16), y.view(np.uint16))


def test_rms_norm_of_values_near_epsilon_equals_float64(kernels, rng):
    x, weight, y = bf16(rng.normal(size=(1, 64)) * 1e-3), bf16(np.ones(64)), np.zeros((1, 64), BFLOAT16)
    kernels.call("rms_norm", x, weight, y, 1, 64, bits(1e-5))
    expected = rms(wide(x), 1, 1e-5)
    assert_within(y, expected, norm_tolerance(expected, 64))


def test_rms_norm_and_residual_equal_float64(kernels, rng):
    rows, n = 2, 640
    x, residual = bf16(rng.normal(size=(rows, n))), bf16(rng.normal(size=(rows, n)))
    weight, y, total = bf16(rng.normal(size=n)), np.zeros((rows, n), BFLOAT16), np.zeros((rows, n), BFLOAT16)
    kernels.call("rms_norm_add", x, weight, residual, y, rows, n, bits(1e-6))
    normal = rms(wide(x), wide(weight), 1e-6)
    expected = wide(residual) + normal
    tolerance = norm_tolerance(normal, n) - BF16_ROUNDING * np.abs(normal) + BF16_ROUNDING * np.abs(expected)
    assert_within(y, expected, tolerance + 2.0**-20)
    kernels.call("add_rms_norm", x, residual, weight, total, y, rows, n, bits(1e-6))
    summed = bf16(x.astype(np.float32) + residual.astype(np.float32))
    np.testing.assert_array_equal(total.view(np.uint16), summed.view(np.uint16))
    expected = rms(wide(summed), wide(weight), 1e-6)
    assert_within(y, expected, norm_tolerance(expected, n))


@pytest.mark.parametrize(("heads", "d"), [(1, 64), (8, 128), (4, 256)])
def test_rope_equals_float64(kernels, rng, heads, d):
    angle = 1023 * 10000.0 ** (-2 * np.arange(d // 2) / d)
    table = bf16(np.concatenate([np.cos(angle), np.sin(angle)]))
    x, y = bf16(rng.normal(size=(heads, d))), np.zeros((heads, d), BFLOAT16)
    kernels.call("rope", x, table, y, heads, d)
    (cosine, sine), (a, b) = wide(table).reshape(2, -1), np.split(wide(x), 2, axis=1)
    expected = np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=1)
    # Products are exact, their difference is rounded to f32 and to bf16.
    magnitude = np.tile(np.abs(a) + np.abs(b), 2)
    assert_within(y, expected, BF16_ROUNDING * np.abs(expected) + 2 * F32_ROUNDING * magnitude)
    in_place = x.copy()
    kernels.call("rope", in_place, table, in_place, heads, d)
    np.testing.assert_array_equal(in_place.view(np.uint16), y.view(np.uint16))

# SPDX-License-Identifier: Apache-2.0
"""Kernels that only the decode layer uses, against their equations in float64 and the kernels that they combine."""

import numpy as np
import pytest

from flownpu.selftest.reference.layer import rotary_table
from tests.aie.host_kernels import (
    BF16_ROUNDING,
    BFLOAT16,
    F32_ROUNDING,
    INVERSE,
    PRODUCT,
    assert_within,
    bf16,
    bits,
    wide,
)


@pytest.mark.parametrize(("heads", "d"), [(1, 64), (4, 32), (4, 128), (2, 256)])
def test_rms_norm_rope_equals_float64(kernels, rng, heads, d):
    x, weight, y = bf16(rng.normal(size=(heads, d)) * 3), bf16(rng.normal(size=d)), np.zeros((heads, d), BFLOAT16)
    table = rotary_table(1024, d)[1023]
    kernels.call("rms_norm_rope", x, weight, table, y, heads, d, bits(1e-6))
    normal = wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-6) * wide(weight)
    (a, b), (cosine, sine) = np.split(normal, 2, axis=1), np.split(wide(table), 2)
    expected = np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=1)
    size = np.tile(np.abs(a) + np.abs(b), 2)
    # One rounding to bf16. The error of each operand: the norm's (1/n and the inverse root, f32 sums, two split
    # products), that of splitting it, and that of the sums.
    operand = 2 * INVERSE + d * F32_ROUNDING + 3 * PRODUCT + 4 * F32_ROUNDING
    assert_within(y, expected, BF16_ROUNDING * np.abs(expected) + (1 + BF16_ROUNDING) * operand * size)
    in_place = x.copy()
    kernels.call("rms_norm_rope", in_place, weight, table, in_place, heads, d, bits(1e-6))
    np.testing.assert_array_equal(in_place.view(np.uint16), y.view(np.uint16))


def test_norm_of_all_heads_and_rope_equals_float64(kernels, rng):
    """Three batches of heads share a norm, whose weights lie behind those of another."""
    batches, heads, d = 3, 4, 64
    n = batches * heads * d
    x, weight = bf16(rng.normal(size=(batches, heads, d)) * 3), bf16(rng.normal(size=(batches, heads, d)))
    weights = np.concatenate([np.ones(2 * d, BFLOAT16), weight.reshape(-1)])
    sums, y, table = np.full(16, np.nan, np.float32), np.zeros_like(x), rotary_table(1024, d)[1023]
    for batch in range(batches):
        kernels.call("square_sums", x[batch].copy(), sums, heads * d, batch)
    assert_within(sums.sum(), (wide(x) ** 2).sum(), n * F32_ROUNDING * (wide(x) ** 2).sum())
    for batch in range(batches):
        made = np.zeros((heads, d), BFLOAT16)
        first = 2 + batch * heads
        kernels.call("all_norm_rope", x[batch].copy(), weights, table, sums, made, heads, d, first, n, bits(1e-6))
        y[batch] = made
    normal = wide(x) / np.sqrt((wide(x) ** 2).mean() + 1e-6) * wide(weight)
    (a, b), (cosine, sine) = np.split(normal, 2, axis=-1), np.split(wide(table), 2)
    expected = np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
    # As for one head; the sum has more terms.
    operand = 2 * INVERSE + n * F32_ROUNDING + 3 * PRODUCT + 4 * F32_ROUNDING
    size = np.tile(np.abs(a) + np.abs(b), 2)
    assert_within(y, expected, BF16_ROUNDING * np.abs(expected) + (1 + BF16_ROUNDING) * operand * size)


def test_rms_norm_rope_rounds_once(kernels, rng):
    """The norm and RoPE as two kernels round a head twice: its root mean square error is larger by the root of two."""
    heads, d = 64, 128
    x, weight, table = bf16(rng.normal(size=(heads, d))), bf16(np.ones(d)), rotary_table(1024, d)[700]
    once, twice = np.zeros((heads, d), BFLOAT16), np.zeros((heads, d), BFLOAT16)
    kernels.call("rms_norm_rope", x, weight, table, once, heads, d, bits(0.0))
    kernels.call("rms_norm", x, weight, twice, heads, d, bits(0.0))
    kernels.call("rope", twice, table, twice, heads, d)
    (a, b), (cosine, sine) = np.split(wide(x), 2, axis=1), np.split(wide(table), 2)
    scale = 1 / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True))
    expected = scale * np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=1)
    errors = [np.sqrt(np.mean((wide(y) - expected) ** 2)) for y in (once, twice)]
    assert errors[0] * 1.2 < errors[1]


@pytest.mark.parametrize(("parts", "n"), [(5, 256), (3, 32)])
def test_copy_part_copies_bytes(kernels, rng, parts, n):
    whole, part = bf16(rng.normal(size=parts * n)), np.zeros(n, BFLOAT16)
    for index in range(parts):
        kernels.call("copy_part", whole, part, index, n)
        np.testing.assert_array_equal(part.view(np.uint16), whole[index * n :][:n].view(np.uint16))


def test_copy_into_copies_bytes(kernels, rng):
    """One part goes to its place, and its neighbours stay."""
    whole, others = bf16(rng.normal(size=5 * 64)), bf16(rng.normal(size=4 * 64))
    found = others.copy()
    kernels.call("copy_into", whole, found, 3, 1, 64)
    expected = np.concatenate([others[:64], whole[3 * 64 : 4 * 64], others[128:]])
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def test_fused_dqp_with_x_in_parts_equals_float64(kernels, rng):
    """The same x and sums as fused_dqp_group_sums makes of the whole vector, in any order of the parts."""
    blocks = 5
    x = bf16(rng.normal(size=blocks * 256))
    sums, taken, taken_sums = np.zeros(blocks * 16, BFLOAT16), np.zeros_like(x), np.ones(blocks * 16, BFLOAT16)
    kernels.call("fused_dqp_group_sums", x, sums, blocks * 256)
    for j in rng.permutation(blocks):
        kernels.call("fused_dqp_take", x[256 * j :][:256].copy(), taken, taken_sums, int(j))
    np.testing.assert_array_equal(taken.view(np.uint16), x.view(np.uint16))
    np.testing.assert_array_equal(taken_sums.view(np.uint16), sums.view(np.uint16))

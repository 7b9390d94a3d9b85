# SPDX-License-Identifier: Apache-2.0
"""Attention in shares, as the split decode layer's tiles make it, against the operator's float64 reference."""

import numpy as np
import pytest

from flownpu.ops.definitions import flow_kv_attention
from flownpu.selftest.reference.attention import expectation, make_sweep
from tests.aie.host_kernels import BF16_ROUNDING, BFLOAT16, F32_ROUNDING, PRODUCT, assert_within, bf16, wide

STATE, ROWS, LINE = 16 + 2 * 8 * 16, 8, 32
HALF = 1280  # bf16 of half an object


def objects_of(sweep, tile, tiles):
    """The objects of a tile's share: every `tiles`-th, [keys, values][keys of an object][d], and its first key."""
    keys = HALF // sweep.d
    for first in range(sweep.first_key + tile * keys, sweep.key_end, tiles * keys):
        both = [np.zeros((keys, sweep.d), BFLOAT16) for _ in range(2)]
        for part, cache in zip(both, (sweep.k, sweep.v), strict=True):
            read = cache[first : first + keys]
            part[: len(read)] = read
        yield np.concatenate([part.reshape(-1) for part in both]).view(np.uint8)


def attend(kernels, sweep, tile, tiles, turn=0):
    """A tile's share: its outputs [heads, d] and [m, l][8]."""
    heads, _, d = sweep.q.shape
    rtp = sweep.rtp()
    keys = HALF // d
    rtp[2], rtp[8] = sweep.first_key + tile * keys, tiles * keys
    x = np.concatenate([bf16(np.ones(turn * heads * d)), sweep.q.reshape(-1)])
    state, y = np.full(STATE, np.nan, np.float32), np.full(heads * d, np.nan, np.float32)
    shares, part = np.zeros((turn + 1) * 2 * ROWS, np.float32), np.zeros(LINE, BFLOAT16)
    kernels.call("flow_kv_split_start", rtp, state, y, heads, d)
    for block in objects_of(sweep, tile, tiles):
        kernels.call("flow_kv_split", block, x, rtp, state, y, turn, heads, d)
    outputs = np.zeros((heads * d // LINE, LINE), BFLOAT16)
    for index in range(len(outputs)):
        kernels.call("flow_kv_split_store", state, y, outputs[index], index, d)
    kernels.call("flow_kv_split_share", state, shares, turn)
    kernels.call("flow_kv_split_give", shares, part, turn)
    return outputs.reshape(heads, d), part.view(np.float32).reshape(2, ROWS)


def merge(kernels, outputs, shares):
    """Shares [tiles] put together, [heads, d]; objects of four tiles' outputs."""
    tiles, heads, d = outputs.shape
    taken, weights = np.zeros(tiles * LINE, BFLOAT16), np.zeros(heads * 32, np.float32)
    parts = shares.astype(np.float32).view(BFLOAT16).reshape(-1, d)
    for index, part in enumerate(parts):
        kernels.call("flow_kv_merge_take", part.copy(), taken, index, d)
    kernels.call("flow_kv_merge_weights", taken, weights, 1, heads, tiles)
    result = np.zeros((heads, d), BFLOAT16)
    for head in range(heads):
        total = np.full(d, np.nan, np.float32)
        for first in range(0, tiles, 4):
            some = np.ascontiguousarray(outputs[first : first + 4, head])
            kernels.call("flow_kv_merge", some, weights, total, head, first, 4, d)
        kernels.call("flow_kv_merge_store", total, result, head, d)
    return result, weights.reshape(heads, 32)


def probabilities(sweep):
    """Attention's probabilities of the keys, float64 [heads, keys]."""
    position, key = sweep.first_query, np.arange(sweep.key_end)
    seen = (key > position - sweep.window) & (key <= position)
    t = np.where(seen, sweep.factor * (wide(sweep.q[:, 0]) @ wide(sweep.k[: sweep.key_end]).T), -np.inf)
    p = np.exp(t - t.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def check_shares(kernels, sweep, tiles):
    found = [attend(kernels, sweep, tile, tiles) for tile in range(tiles)]
    outputs, shares = (np.stack(parts) for parts in zip(*found, strict=True))
    o, _ = merge(kernels, outputs, shares)
    expected, tolerance = expectation(sweep, operator=flow_kv_attention)
    # Each share's outputs were rounded once; their weights err by a split product, their sums are f32.
    values = probabilities(sweep) @ np.abs(wide(sweep.v[: sweep.key_end]))
    tolerance = tolerance[:, 0] + (1.02 * BF16_ROUNDING + 4 * PRODUCT + tiles * F32_ROUNDING) * values
    assert_within(o, expected[:, 0], tolerance)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("keys", [1, 17, 1023])
def test_shares_are_attention(kernels, rng, d, keys):
    check_shares(kernels, make_sweep(rng, 2, 1, d, keys, HALF // d, first_query=keys - 1), 24)


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_grouped_heads(kernels, rng, heads):
    check_shares(kernels, make_sweep(rng, heads, 1, 128, 100, 10, first_query=99), 24)


@pytest.mark.parametrize(("window", "first_key"), [(1, 200), (5, 190), (64, 130)])
def test_a_window(kernels, rng, window, first_key):
    sweep = make_sweep(rng, 2, 1, 128, 201, 10, first_query=200, first_key=first_key, window=window)
    check_shares(kernels, sweep, 4)


def test_large_scores(kernels, rng):
    """Scores of hundreds: maxima of the shares, and of a share's objects, differ by many powers of 2."""
    for tiles in (4, 24):  # several objects a tile, one
        check_shares(kernels, make_sweep(rng, 2, 1, 64, 300, 20, first_query=299, scale=0.7, strength=2.0), tiles)


def test_a_share_is_its_own_attention(kernels, rng):
    """With one tile nothing is put together: m is a whole power, l the sum of the numerators."""
    sweep = make_sweep(rng, 4, 1, 128, 77, 10, first_query=76)
    outputs, (maxima, sums) = attend(kernels, sweep, 0, 1, turn=2)
    m, total = maxima[:4], sums[:4]
    expected, tolerance = expectation(sweep, operator=flow_kv_attention)
    assert_within(outputs, expected[:, 0], tolerance[:, 0])
    t = sweep.factor / np.log(2) * (wide(sweep.q[:, 0]) @ wide(sweep.k[:77]).T)
    np.testing.assert_array_equal(m, np.rint(m))
    assert (m >= t.max(-1) - 1e-3).all()
    assert (m <= t.max(-1) + 2).all()
    # F is rounded to bf16, each by up to 2^-8 of it.
    assert_within(total, np.exp2(t - m[:, None]).sum(-1), 1.1 * BF16_ROUNDING * total)


def bias(found, expected):
    """The mean error in units of the last place: 0 to the nearest, -1/2 with floor.

    As in test_attention.py: over 512 numbers its own deviation is 0.033, and 0.2 are six of them.
    """
    _, exponent = np.frexp(expected)
    assert expected.size >= 512
    return np.sum(wide(found) - expected) / np.sum(np.exp2(exponent - 8.0))


def test_shares_have_no_bias(kernels, rng):
    sweep = make_sweep(rng, 4, 1, 256, 64, 5, first_query=63)
    outputs, _ = attend(kernels, sweep, 0, 1)
    assert abs(bias(outputs, expectation(sweep, operator=flow_kv_attention)[0][:, 0])) < 0.2


def test_merging_has_no_bias(kernels, rng):
    tiles, heads, d = 24, 4, 256
    outputs = bf16(rng.normal(size=(tiles, heads, d)))
    shares = np.zeros((tiles, 2, ROWS), np.float32)
    shares[:, 0, :heads], shares[:, 1, :heads] = (
        rng.integers(-3, 4, (tiles, heads)),
        rng.uniform(0.5, 9, (tiles, heads)),
    )
    o, _ = merge(kernels, outputs, shares)
    weights = wide(shares[:, 1, :heads]) * np.exp2(shares[:, 0, :heads])
    weights /= weights.sum(0)
    expected = np.einsum("th,thd->hd", weights, wide(outputs))
    size = np.einsum("th,thd->hd", weights, np.abs(wide(outputs)))
    # One rounding; the weights' reciprocal (1e-4) and split products, f32 sums.
    assert_within(o, expected, BF16_ROUNDING * np.abs(expected) + (1e-4 + 4 * PRODUCT + tiles * F32_ROUNDING) * size)
    assert abs(bias(o, expected)) < 0.2


def test_a_share_without_keys_counts_nothing(kernels, rng):
    sweep = make_sweep(rng, 2, 1, 128, 5, 10, first_query=4)
    alone, empty = attend(kernels, sweep, 0, 4), attend(kernels, sweep, 3, 4)
    assert not wide(empty[0]).any()
    assert not empty[1][1].any()
    outputs, shares = (np.stack([a, b, b, b]) for a, b in zip(alone, empty, strict=True))
    o, weights = merge(kernels, outputs, shares)
    # The weight is l / l, by a reciprocal and split products.
    assert_within(weights[:2, 0], np.ones(2), 1e-4 + 4 * PRODUCT)
    assert_within(o, wide(alone[0]), (BF16_ROUNDING + 2e-4) * np.abs(wide(alone[0])))


def test_keys_beyond_the_end_do_not_matter(kernels, rng):
    sweep = make_sweep(rng, 2, 1, 64, 33, 20, first_query=32)
    before = attend(kernels, sweep, 1, 2)
    sweep.k[33:], sweep.v[33:] = bf16(100.0), bf16(-100.0)
    after = attend(kernels, sweep, 1, 2)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))

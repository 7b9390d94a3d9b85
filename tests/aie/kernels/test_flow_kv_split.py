# SPDX-License-Identifier: Apache-2.0
"""Attention in shares, as the decode layer's tiles make it with split keys, against the float64 reference."""

import numpy as np
import pytest

from flownpu.ops.definitions import flow_kv_attention
from flownpu.ops.definitions.int8_cache import SCALE_BYTES, dequantise_rows, quantise_rows
from flownpu.selftest.reference.attention import expectation, make_sweep
from tests.aie.host_kernels import BF16_ROUNDING, BFLOAT16, F32_ROUNDING, assert_within, bf16, wide

PART = 32
FIRST_PART = 16 + 3 * 2 * PART  # floats of a share before its parts: the next key's position, powers for merging
HALF, INT8_HALF = 1280, 2048  # numbers of keys in an object, in bf16 and in int8; it has as many of values


def int8_rows(lines):
    """Rows of codes, each with its scale behind it and padding of ones up to 5/4 of a byte an element."""
    d = lines.shape[-1]
    padding = np.full((*lines.shape[:-1], d // 4 - SCALE_BYTES), -1, np.int8)
    return np.concatenate([quantise_rows(wide(lines)), padding], axis=-1)


def objects_of(sweeps, tile, tiles, half):
    """The objects of a tile's share of a bundle: every `tiles`-th, [position][KV head of the bundle][key, value][row].

    Zeros follow the last position. The token's own position holds NaN: its key and value must be taken from x.
    """
    bundle, d = len(sweeps), sweeps[0].d
    keys = half // (bundle * d)
    for first in range(sweeps[0].first_key + tile * keys, sweeps[0].key_end, tiles * keys):
        lines = np.zeros((keys, bundle, 2, d), BFLOAT16)
        for head, sweep in enumerate(sweeps):
            for value, cache in enumerate((sweep.k, sweep.v)):
                read = cache[first : first + keys]
                lines[: len(read), head, value] = read
                if 0 <= sweep.first_query - first < keys:
                    lines[sweep.first_query - first, head, value] = np.nan
        yield (int8_rows(lines) if half == INT8_HALF else lines).reshape(-1).view(np.uint8)


def parts(share):
    """m, l and Y of a share, [2 + parts of Y][32]."""
    return share[FIRST_PART:].reshape(-1, PART)


def attend(kernels, sweeps, tile, tiles, turn=0, head=0, half=HALF):
    """A tile's share of KV heads that lie side by side.

    The bundle is the `turn`-th of those from `head` on; x has ones in place of the queries before it.
    """
    rows, _, d = sweeps[0].q.shape
    bundle, rtp = len(sweeps), sweeps[0].rtp()
    keys = half // (bundle * d)
    rtp[2], rtp[8], rtp[11] = sweeps[0].first_key + tile * keys, tiles * keys, head
    others = head + turn * bundle
    parts_of_x = [bf16(np.ones(others * rows * d)), *(sweep.q.reshape(-1) for sweep in sweeps)]
    for word, cache in ((12, "k"), (13, "v")):
        rtp[word] = sum(map(len, parts_of_x))
        own = [getattr(sweep, cache)[sweep.first_query] for sweep in sweeps]
        parts_of_x += [bf16(np.ones(others * d)), *own]
    x = np.concatenate(parts_of_x)
    share = np.full(FIRST_PART + 2 * PART + bundle * rows * d, np.nan, np.float32)
    kernels.call("flow_kv_split_start", rtp, share, bundle * rows, d)
    int8 = half == INT8_HALF
    name, scratch = "flow_kv_split" + "_int8" * int8, [np.full(4 * d, np.nan, BFLOAT16)] * int8
    for block in objects_of(sweeps, tile, tiles, half):
        kernels.call(name, block, x, rtp, share, *scratch, turn, bundle, rows, d, sweeps[0].cap)
    return share


def meet(kernels, share, others, d):
    """A tile's share, merged part by part with the shares of up to three other tiles."""
    together, given = share.copy(), np.zeros(PART, np.float32)
    for index in range(len(parts(share))):
        for number, other in enumerate(others):
            kernels.call("flow_kv_split_give", other, given, index)
            kernels.call("flow_kv_split_meet", given, together, index, number, d)
    return together


def all_together(kernels, shares, d):
    """All shares merged, one to three others at a time, as they meet in a column and then from column to column."""
    *others, share = shares
    while others:
        count = len(others) % 3
        share = meet(kernels, others.pop(), [share, *(others.pop() for _ in range(min(count, len(others))))], d)
    return share


def outputs_of(kernels, share, d):
    """Y / l, [rows, d]."""
    outputs = np.zeros((len(parts(share)) - 2, PART), BFLOAT16)
    for index, output in enumerate(outputs):
        kernels.call("flow_kv_split_store", share, output, 2 + index, d)
    return outputs.reshape(-1, d)


def probabilities(sweep):
    """Attention's probabilities of the keys, float64 [heads, keys]."""
    position, key = sweep.first_query, np.arange(sweep.key_end)
    seen = (key > position - sweep.window) & (key <= position)
    t = np.where(seen, sweep.capped(sweep.factor * (wide(sweep.q[:, 0]) @ wide(sweep.k[: sweep.key_end]).T)), -np.inf)
    p = np.exp(t - t.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def check_shares(kernels, sweeps, tiles, turn=0, head=0, half=HALF):
    """Asserts that the shares of neighbouring KV heads, merged, are attention."""
    d = sweeps[0].d
    shares = [attend(kernels, sweeps, tile, tiles, turn, head, half) for tile in range(tiles)]
    share = all_together(kernels, shares, d)
    for sweep in sweeps if half == INT8_HALF else []:
        for cache in (sweep.k, sweep.v):
            own = cache[sweep.first_query].copy()
            cache[:] = bf16(dequantise_rows(quantise_rows(wide(cache))))
            cache[sweep.first_query] = own
    outputs = outputs_of(kernels, share, d)
    for sweep, o in zip(sweeps, outputs.reshape(len(sweeps), -1, d), strict=True):
        expected, tolerance = expectation(sweep, operator=flow_kv_attention)
        # Each merge is exact except for one f32 sum of Y and one of l.
        values = probabilities(sweep) @ np.abs(wide(sweep.v[: sweep.key_end]))
        assert_within(o, expected[:, 0], tolerance[:, 0] + 2 * tiles * F32_ROUNDING * values)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("keys", [1, 17, 1023])
def test_merged_shares_equal_attention(kernels, rng, d, keys):
    check_shares(kernels, [make_sweep(rng, 2, 1, d, keys, HALF // d, first_query=keys - 1)], 24)


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_grouped_heads_equal_float64(kernels, rng, heads):
    check_shares(kernels, [make_sweep(rng, heads, 1, 128, 100, 10, first_query=99)], 24)


@pytest.mark.parametrize(("bundle", "rows", "d"), [(4, 4, 64), (2, 3, 128), (4, 8, 64), (2, 8, 32), (8, 2, 32)])
@pytest.mark.parametrize("keys", [3, 300])
def test_heads_side_by_side_equal_float64(kernels, rng, bundle, rows, d, keys):
    """KV heads of one object, each with separate rows, after other heads and another bundle of the class."""
    sweeps = [make_sweep(rng, rows, 1, d, keys, 20, first_query=keys - 1) for _ in range(bundle)]
    check_shares(kernels, sweeps, 14, turn=1, head=3)


@pytest.mark.parametrize(("bundle", "rows", "d"), [(1, 3, 256), (2, 3, 128), (4, 4, 64), (1, 8, 64)])
def test_int8_rows_equal_attention_of_dequantised_keys(kernels, rng, bundle, rows, d):
    """The kernel rounds the product of a code and its scale to bf16; the token's own key and value have no codes."""
    sweeps = [make_sweep(rng, rows, 1, d, 300, 40, first_query=299, window=250, first_key=49) for _ in range(bundle)]
    check_shares(kernels, sweeps, 14, turn=1, head=3, half=INT8_HALF)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_quantised_rows_equal_definition(kernels, rng, d):
    """Scales are rounded to nearest; a code may be the second nearest by 127e-4 of a step (kernels/int8_rows.cc).

    The last row's scale is rounded down most of all: 190 / 127 to 191 / 128.
    """
    x = bf16(rng.normal(size=(11, d)) * np.exp2(np.arange(-5, 6))[:, None])
    x[8:] = 0
    x[9, 3] = -1
    x[10, 5] = 190
    rows = np.full((11, 5 * d // 4), 255, np.uint8)
    kernels.call("int8_rows", x.reshape(-1), rows.reshape(-1), 11, d)
    found = rows[:, : d + SCALE_BYTES].view(np.int8)
    scale = found[:, d:].copy().view(np.float32)
    exact = np.abs(wide(x)).max(-1, keepdims=True) / 127
    np.testing.assert_array_equal(scale, bf16(scale).astype(np.float32))
    # Half a step of 8 bits, and the roundings of the product with 1 / 127 before.
    half = np.exp2(np.floor(np.log2(np.maximum(exact, 2.0**-60))) - 8)
    assert_within(scale, exact, half + 2.0**-13 * exact + 2.0**-60)
    assert np.abs(found[:, :d].astype(int)).max(-1).tolist() == [127] * 8 + [0, 127, 127]
    assert_within(dequantise_rows(found), wide(x), (0.5 + 127e-4) * scale)


@pytest.mark.parametrize(("window", "first_key"), [(1, 200), (5, 190), (64, 130)])
def test_window_of_one_sweep_equals_float64(kernels, rng, window, first_key):
    sweep = make_sweep(rng, 2, 1, 128, 201, 10, first_query=200, first_key=first_key, window=window)
    check_shares(kernels, [sweep], 4)


def test_large_scores_equal_float64(kernels, rng):
    """Scores of hundreds: maxima of the shares, and of a share's objects, differ by many powers of 2."""
    for tiles in (4, 24):  # several objects a tile, then one
        check_shares(kernels, [make_sweep(rng, 2, 1, 64, 300, 20, first_query=299, scale=0.7, strength=2.0)], tiles)


def test_soft_cap_equals_float64(kernels, rng):
    sweeps = [
        make_sweep(rng, 3, 1, 64, 90, 20, first_query=89, scale=0.7, strength=2.0, softcap=20.0) for _ in range(2)
    ]
    check_shares(kernels, sweeps, 4)


def test_share_equals_attention_of_its_keys(kernels, rng):
    """With one tile nothing is merged: m is a whole exponent, l the sum of the numerators."""
    sweep = make_sweep(rng, 4, 1, 128, 77, 10, first_query=76)
    share = attend(kernels, [sweep], 0, 1, turn=2)
    m, total = parts(share)[:2, :4]
    expected, tolerance = expectation(sweep, operator=flow_kv_attention)
    assert_within(outputs_of(kernels, share, 128), expected[:, 0], tolerance[:, 0])
    t = sweep.factor / np.log(2) * (wide(sweep.q[:, 0]) @ wide(sweep.k[:77]).T)
    np.testing.assert_array_equal(m, np.rint(m))
    assert (m >= t.max(-1) - 1e-3).all()
    assert (m <= t.max(-1) + 2).all()
    # F's numbers are rounded to bf16, each by up to 2^-8 of itself.
    assert_within(total, np.exp2(t - m[:, None]).sum(-1), 1.1 * BF16_ROUNDING * total)


def bias(found, expected):
    """The mean error in units of the last place: 0 if rounded to nearest, -1/2 if rounded by floor.

    As in test_attention.py its deviation over 512 numbers is 0.033; the bound of 0.2 is six of these.
    """
    _, exponent = np.frexp(expected)
    assert expected.size >= 512
    return np.sum(wide(found) - expected) / np.sum(np.exp2(exponent - 8.0))


def test_shares_have_no_bias(kernels, rng):
    sweep = make_sweep(rng, 4, 1, 256, 64, 5, first_query=63)
    outputs = outputs_of(kernels, attend(kernels, [sweep], 0, 1), 256)
    assert abs(bias(outputs, expectation(sweep, operator=flow_kv_attention)[0][:, 0])) < 0.2


def test_merge_of_whole_numbers_is_exact(kernels, rng):
    """Sums of whole numbers of up to 8 bits are exact in f32: any order gives the same bytes, those of float64."""
    tiles, rows, d = 9, 6, 128
    m = rng.integers(-3, 4, (tiles, PART))
    sums, y = rng.integers(0, 256, (tiles, PART)), rng.integers(-255, 256, (tiles, rows, d))
    shares = np.full((tiles, FIRST_PART), np.nan, np.float32)
    shares = np.concatenate([shares, m, sums, y.reshape(tiles, -1)], axis=1).astype(np.float32)
    found = [all_together(kernels, list(shares[rng.permutation(tiles)]), d) for _ in range(3)]
    largest = m.max(0)
    power = np.exp2(m - largest)
    expected = [largest, (power * sums).sum(0), (power[:, :rows, None] * y).sum(0).reshape(-1)]
    for share in found:
        np.testing.assert_array_equal(parts(share).reshape(-1), np.concatenate(expected))


def test_share_without_keys_adds_nothing(kernels, rng):
    sweep = make_sweep(rng, 2, 1, 128, 5, 10, first_query=4)
    alone, empty = attend(kernels, [sweep], 0, 4), attend(kernels, [sweep], 3, 4)
    assert not parts(empty)[1:].any()
    assert not wide(outputs_of(kernels, empty, 128)).any()
    for share, others in ((alone, [empty] * 3), (empty, [empty, alone])):
        np.testing.assert_array_equal(parts(meet(kernels, share, others, 128)), parts(alone))


def test_keys_beyond_end_change_no_result(kernels, rng):
    sweep = make_sweep(rng, 2, 1, 64, 33, 20, first_query=32)
    before = attend(kernels, [sweep], 1, 2)
    sweep.k[33:], sweep.v[33:] = bf16(100.0), bf16(-100.0)
    np.testing.assert_array_equal(parts(attend(kernels, [sweep], 1, 2)), parts(before))

# SPDX-License-Identifier: Apache-2.0
"""FlowQKV and FlowKV kernels, driven as a core program drives them, against the operators' float64 references."""

import numpy as np
import pytest

from flownpu.ops.definitions import flow_kv_attention, flow_qkv_attention
from flownpu.selftest.reference.attention import expectation, make_sweep
from tests.aie.host_kernels import BFLOAT16, assert_within, tiled, untiled, wide


def run_flow_qkv(kernels, sweep, parts=1):
    heads, queries, d = sweep.q.shape
    rows, keys = heads * queries, sweep.chunk
    q, rtp = tiled(sweep.q.reshape(rows, d)), sweep.rtp()
    state, y = np.full(2 * rows + 16, np.nan, np.float32), np.full(rows * d, np.nan, np.float32)
    correction, f = np.zeros(rows, np.float32), np.zeros(rows * keys, BFLOAT16)
    scores, columns = np.zeros(16 * keys, np.float32), d // parts
    kernels.call("flow_qkv_start", rtp, state, y, rows, d)
    for start in sweep.starts:
        k, v = (tiled(cache[start : start + keys]) for cache in (sweep.k, sweep.v))
        kernels.call("flow_qkv_scores", q, k, rtp, state, correction, f, scores, rows, keys, d, sweep.cap)
        kernels.call("flow_qkv_values", f, v, correction, y, rows, keys, d)
    outputs = [np.zeros(rows * columns, BFLOAT16) for _ in range(parts)]
    for part, o in enumerate(outputs):
        kernels.call("flow_qkv_finish", state, y, o, part, columns, rows, d)
    return np.concatenate([untiled(o, rows, columns) for o in outputs], -1).reshape(heads, queries, d)


def run_flow_kv(kernels, sweep):
    heads, _, d = sweep.q.shape
    rows, keys = -(-heads // 4) * 4, sweep.chunk
    rtp, q_tile = sweep.rtp(), np.ones(rows * d, BFLOAT16)
    state, y = np.full(2 * rows + 16, np.nan, np.float32), np.full(rows * d + rows, np.nan, np.float32)
    handoff, scores = np.zeros(rows * keys + 4 * rows, BFLOAT16), np.zeros(4 * keys, np.float32)
    o = np.zeros(heads * d, BFLOAT16)
    kernels.call("flow_kv_start", sweep.q.reshape(-1), rtp, q_tile, state, heads, rows, d)
    kernels.call("flow_kv_start_values", y, rows, d)
    for start in sweep.starts:
        k, v = (tiled(cache[start : start + keys]) for cache in (sweep.k, sweep.v))
        kernels.call("flow_kv_scores", q_tile, k, rtp, state, handoff, scores, rows, keys, d, sweep.cap)
        kernels.call("flow_kv_values", handoff, v, y, rows, keys, d)
    kernels.call("flow_kv_finish", y, o, heads, rows, d)
    return o.reshape(heads, 1, d)


def assert_is_attention(o, sweep, *, in_blocks=False, operator=flow_qkv_attention, unbiased=False):
    """Compares with the operator's reference on the numbers that the matrix unit reads.

    unbiased: Also asserts that errors have no preferred sign.
    """
    expected, tolerance = expectation(sweep, in_blocks=in_blocks, operator=operator)
    o = o[:, : expected.shape[1]]  # the rows after them are padding
    if unbiased:
        # In units of the last place, on average: rounding to nearest errs by 0, floor by -1/2. One error has a
        # deviation of about 3/4 of a unit (by its own rounding and F's), the mean of 512 one of 0.033; the bound is six
        # of these.
        _, exponent = np.frexp(expected)
        assert expected.size >= 512
        assert abs(np.sum(wide(o) - expected) / np.sum(np.exp2(exponent - 8.0))) < 0.2
    assert_within(o, expected, tolerance)


def check_flow_qkv(kernels, sweep):
    assert_is_attention(run_flow_qkv(kernels, sweep), sweep, in_blocks=kernels.architecture == "xdna2")


def check_flow_kv(kernels, sweep, *, unbiased=False):
    assert_is_attention(run_flow_kv(kernels, sweep), sweep, operator=flow_kv_attention, unbiased=unbiased)


@pytest.mark.parametrize("d", [64, 72, 128, 256])
@pytest.mark.parametrize("keys", [1, 17, 64])
def test_flow_qkv_of_prompt_equals_float64(kernels, rng, d, keys):
    queries = -(-keys // 8) * 8
    check_flow_qkv(kernels, make_sweep(rng, 1, queries, d, keys, 16))


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_flow_qkv_of_grouped_heads_equals_float64(kernels, rng, heads):
    check_flow_qkv(kernels, make_sweep(rng, heads, 16, 64, 48, 16, first_query=32))


def test_flow_qkv_outputs_in_parts_equal_float64(kernels, rng):
    sweep = make_sweep(rng, 1, 24, 128, 24, 8)
    np.testing.assert_array_equal(run_flow_qkv(kernels, sweep, parts=4), run_flow_qkv(kernels, sweep))


@pytest.mark.parametrize("rows", [8, 24, 32])
@pytest.mark.parametrize("chunk", [8, 24])
def test_flow_qkv_of_odd_sub_tile_counts_equals_float64(kernels, rng, rows, chunk):
    """Sub-tiles of rows and of keys are taken in pairs; here one is left over."""
    check_flow_qkv(kernels, make_sweep(rng, 1, rows, 64, 100 + rows, chunk, first_query=100))


@pytest.mark.parametrize("chunk", [8, 32, 64])
def test_flow_qkv_of_chunks_equals_float64(kernels, rng, chunk):
    check_flow_qkv(kernels, make_sweep(rng, 1, 16, 64, 1023, chunk, first_query=1008))


@pytest.mark.parametrize(("window", "first_key"), [(1, 88), (5, 80), (16, 80), (36, 48), (40, 48), (512, 0)])
def test_flow_qkv_with_window_equals_float64(kernels, rng, window, first_key):
    """Chunks that no query of the sweep sees are not sent; chunks that only some queries see are masked."""
    check_flow_qkv(kernels, make_sweep(rng, 2, 8, 64, 101, 16, first_query=96, first_key=first_key, window=window))


# Scores of 0.7 x 4 x N(0, 64) reach from where the cap changes nothing to where it is all that is left of them.
CAPPED = {"scale": 0.7, "strength": 2.0, "softcap": 20.0}


@pytest.mark.parametrize("queries", [8, 16])
def test_flow_qkv_with_soft_cap_equals_float64(kernels, rng, queries):
    """Sub-tiles of rows by themselves and in pairs, chunks with masks and without."""
    check_flow_qkv(kernels, make_sweep(rng, 2, queries, 64, 90, 16, first_query=74, **CAPPED))


def test_flow_kv_with_soft_cap_equals_float64(kernels, rng):
    check_flow_kv(kernels, make_sweep(rng, 5, 1, 64, 100, 16, first_query=99, **CAPPED))


@pytest.mark.parametrize("keys", [7, 100])
def test_flow_qkv_without_causal_mask_equals_float64(kernels, rng, keys):
    check_flow_qkv(kernels, make_sweep(rng, 1, 16, 72, keys, 32, causal=0))


def test_flow_qkv_of_large_scores_equals_float64(kernels, rng):
    """Scores of hundreds: the maximum moves by many powers of 2 from chunk to chunk."""
    check_flow_qkv(kernels, make_sweep(rng, 1, 8, 64, 200, 16, first_query=192, scale=0.7, strength=2.0))


def test_flow_qkv_rows_that_see_no_key_give_zero(kernels, rng):
    sweep = make_sweep(rng, 1, 16, 64, 16, 16, window=4, first_query=16)
    o = run_flow_qkv(kernels, sweep)  # queries at 16 .. 31, keys to 15: the queries from 19 on see none
    assert wide(o[:, :3]).any(-1).all()
    assert not wide(o[:, 3:]).any()


def test_flow_qkv_state_is_exact_between_calls(kernels, rng):
    """The correction is a power of 2 for any scores."""
    sweep = make_sweep(rng, 1, 8, 64, 32, 16, strength=3.0)
    rtp, state, y = sweep.rtp(), np.zeros(32, np.float32), np.zeros(512, np.float32)
    correction, f, scores = np.zeros(8, np.float32), np.zeros(128, BFLOAT16), np.zeros(256, np.float32)
    kernels.call("flow_qkv_start", rtp, state, y, 8, 64)
    for start in sweep.starts:
        q, k = tiled(sweep.q[0]), tiled(sweep.k[start : start + 16])
        kernels.call("flow_qkv_scores", q, k, rtp, state, correction, f, scores, 8, 16, 64, 0)
        mantissa, _ = np.frexp(correction)
        np.testing.assert_array_equal(mantissa, 0.5)
        assert np.rint(state[16:24]).tolist() == state[16:24].tolist()
        assert wide(f).max() <= 1


@pytest.mark.parametrize("d", [64, 72, 128, 256])
@pytest.mark.parametrize("keys", [1, 17, 1023])
def test_flow_kv_equals_float64(kernels, rng, d, keys):
    check_flow_kv(kernels, make_sweep(rng, 2, 1, d, keys, 32, first_query=keys - 1))


@pytest.mark.parametrize("heads", [1, 3, 4, 5, 8])
def test_flow_kv_of_grouped_heads_equals_float64(kernels, rng, heads):
    check_flow_kv(kernels, make_sweep(rng, heads, 1, 128, 100, 16, first_query=99))


def test_flow_kv_has_no_bias(kernels, rng):
    """F's rounding cancels in O = Y / l, so the tolerance alone would not reveal floor."""
    check_flow_kv(kernels, make_sweep(rng, 4, 1, 256, 64, 16, first_query=63), unbiased=True)


@pytest.mark.parametrize(("window", "first_key"), [(1, 96), (16, 80), (33, 64), (512, 0)])
def test_flow_kv_with_window_equals_float64(kernels, rng, window, first_key):
    check_flow_kv(kernels, make_sweep(rng, 4, 1, 64, 101, 16, first_query=100, first_key=first_key, window=window))


@pytest.mark.parametrize("queries", [0, -1])
def test_rows_of_no_queries_equal_rows_of_one(kernels, rng, queries):
    """An unwritten word, 0 or all ones, must not keep a core in a loop forever."""
    sweep = make_sweep(rng, 4, 1, 64, 40, 16, first_query=39)
    expected, words = run_flow_kv(kernels, sweep), sweep.rtp()
    words[7] = queries
    sweep.rtp = lambda: words
    np.testing.assert_array_equal(run_flow_kv(kernels, sweep), expected)


@pytest.mark.parametrize("step", [4, 32], ids=["a line", "the first row of sub-tiles"])
def test_sinks_begin_rows_of_their_heads(kernels, rng, step):
    """m and l of five heads with three queries each; a sixteenth row has none and stays as it is."""
    heads, queries, rows, element = 5, 3, 16, 64
    line = rng.normal(size=32).astype(np.float32)
    x = np.full((line.size // 4, step), np.nan, np.float32)
    x[:, :4] = line.reshape(-1, 4)
    given = np.concatenate([np.full(element, np.nan, BFLOAT16), x.reshape(-1).view(BFLOAT16)])
    state = np.full(16 + 2 * rows, -1, np.float32)
    kernels.call("attention_sinks", given, state, element, step, 16, 16 + rows, heads, queries)
    for first, numbers in ((16, line[:heads]), (16 + rows, line[heads : 2 * heads])):
        np.testing.assert_array_equal(state[first : first + rows], [*np.repeat(numbers, queries), -1])
    assert (state[:16] == -1).all()

# SPDX-License-Identifier: Apache-2.0
"""Attention of prompts by AMX's tiles, on any processor: the kernel, compiled for a double of the matrix unit.

test_matrix_units.py and test_numbers.py run the real one where there is one.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.ops.device import testing

LANES: int = testing.tile_lanes
BF16 = ml_dtypes.bfloat16
# Half an ulp, relative, of f32 and of bf16.
EPSILON, BF16_EPSILON = 2.0**-24, 2.0**-8


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.astype(BF16)).view(np.uint16)


def tile_dots(dots: np.ndarray, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """dots [16, lanes] + x [16, 32] weights [32, lanes], as TDPBF16PS adds."""
    found = dots.copy()
    pairs = weights.reshape(16, 2, LANES).swapaxes(1, 2)
    testing.tile_dots(found, bits(x), bits(pairs))
    return found


def flushed(x: np.ndarray) -> np.ndarray:
    """f32; denormal numbers become zero."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


def test_stand_in_of_tile_instruction_adds_in_published_order(rng: np.random.Generator) -> None:
    """Even and odd products have a sum each, which are added to each other, then to what was there before.

    A product of two bf16 is exact in f32, so that numpy's addition rounds as the fused one does.
    """
    x, weights = (rng.standard_normal(shape).astype(BF16).astype(np.float32) for shape in ((16, 32), (32, LANES)))
    before = rng.standard_normal((16, LANES), np.float32)
    sums = np.zeros((2, 16, LANES), np.float32)
    for k in range(32):
        sums[k % 2] += x[:, k : k + 1] * weights[k]
    np.testing.assert_array_equal(tile_dots(before, x, weights), before + (sums[0] + sums[1]))


@pytest.mark.parametrize(
    ("before", "factor", "weight", "expected"),
    [
        (0.0, 1.0, 2.0**-127, 0.0),  # a denormal factor is zero
        (0.0, 2.0**-100, 2.0**-30, 0.0),  # a denormal result is zero
        (2.0**-130, 1.0, 0.0, 0.0),  # a denormal sum is zero
        (0.0, 2.0**-100, 2.0**-26, 2.0**-126),  # the smallest normal number stays
        (1.0, 2.0**-12, 2.0**-12, 1.0),  # half an ulp: to even
        (1.0 + 2.0**-23, 2.0**-12, 2.0**-12, 1.0 + 2.0**-22),  # half an ulp: to even
        (0.0, np.inf, 1.0, np.inf),
    ],
)
def test_double_flushes_and_rounds_as_instruction_is_published(
    before: float, factor: float, weight: float, expected: float
) -> None:
    x, weights = np.zeros((16, 32)), np.zeros((32, LANES))
    x[3, 8], weights[8, 1] = factor, weight
    dots = np.full((16, LANES), before, np.float32)
    assert tile_dots(dots, x, weights)[3, 1] == np.float32(expected)


class Sweep:
    """Rows of queries over a cache in bf16; row r sees keys first[r] to last[r]."""

    def __init__(self, rng: np.random.Generator, rows: int, keys: int, d: int, window: int = 0) -> None:
        self.query = rng.standard_normal((rows, d), np.float32) / np.float32(d**0.5)
        self.key, self.value = rng.standard_normal((2, keys, d)).astype(BF16)
        self.last = np.sort(rng.integers(1, keys + 1, rows)).astype(np.int32)
        self.first = np.maximum(self.last - window, 0).astype(np.int32) if window else np.zeros(rows, np.int32)
        self.options: dict[str, Any] = {"bias": None, "softcap": 0.0, "chunk_keys": 48, "table": None, "block_rows": 0}

    def run(self, rows: slice = slice(None), begin: int = 0, keys: int = 0) -> tuple[np.ndarray, ...]:
        """Maximum, denominator and numerator of some rows."""
        query, first, last = self.query[rows], self.first[rows], self.last[rows]
        state = [np.full(len(query), np.nan, np.float32) for _ in range(2)]
        numerator = np.full_like(query, np.nan)
        keys = keys or int(last.max())
        options = dict(self.options)
        if options["bias"] is not None:
            options["bias"] = np.ascontiguousarray(options["bias"][rows])
        testing.attend_by_tiles(
            query,
            *(x.reshape(-1, query.shape[1]).view(np.uint16) for x in (self.key, self.value)),
            first,
            last,
            begin=begin,
            keys=keys,
            maximum=state[0],
            denominator=state[1],
            numerator=numerator,
            **options,
        )
        return (*state, numerator)

    def assert_is_attention(self) -> None:
        """Against float64, on queries as they are rounded.

        A factor F is off by its rounding to bf16, by that of its score, a sum of d products in f32 whose error is at
        most d ulps of the sum of their magnitudes, and by that of exp, below 2^-20. The output is a mean of values,
        so that relative errors of the factors change it by at most as much of the mean of |v| and of itself; sums of
        f32 over all keys add one ulp a key.
        """
        maximum, denominator, numerator = self.run()
        d = self.query.shape[1]
        log2e = np.float32(1.44269504)
        query = (self.query * log2e).astype(BF16).astype(np.float64)
        key, value = self.key.astype(np.float64), self.value.astype(np.float64)
        scores, magnitudes = query @ key.T, np.abs(query) @ np.abs(key.T)
        cap = self.options["softcap"]
        if cap:
            scores = float(log2e) * cap * np.tanh(scores / float(log2e) / cap)
        if self.options["bias"] is not None:
            scores = scores + float(log2e) * self.options["bias"]
        positions = np.arange(len(key))
        seen = (positions >= self.first[:, None]) & (positions < self.last[:, None])
        scores = np.where(seen, scores, -np.inf)
        factors = np.exp2(scores - scores.max(1, keepdims=True))
        shares = factors / factors.sum(1, keepdims=True)
        # Softcap and bias are computed in f32 as well: a few ulps of scores of at most 32.
        score_error = (d + 4) * EPSILON * magnitudes.max(1) + 64 * 8 * EPSILON
        error = BF16_EPSILON + np.log(2) * 2 * score_error + 2.0**-20 + len(key) * EPSILON
        expected, spread = shares @ value, shares @ np.abs(value)
        bound = error[:, None] * (spread + np.abs(expected))
        assert (np.abs(numerator / denominator[:, None] - expected) <= bound).all()
        np.testing.assert_allclose(maximum, scores.max(1) / float(log2e), atol=float(score_error.max()), rtol=2.0**-22)


@pytest.mark.parametrize("d", [8, 40, 64, 72, 256])
@pytest.mark.parametrize("rows", [LANES, 2 * LANES + 1, 3 * LANES, 64, 100])
def test_rows_of_one_to_four_vectors_equal_float64(rng: np.random.Generator, rows: int, d: int) -> None:
    Sweep(rng, rows, 150, d).assert_is_attention()


@pytest.mark.parametrize("chunk_keys", [16, 48, 112, 128])
@pytest.mark.parametrize("window", [0, 1, 37])
def test_chunks_of_no_whole_tiles_and_windows_equal_float64(
    rng: np.random.Generator, chunk_keys: int, window: int
) -> None:
    sweep = Sweep(rng, 70, 211, 64, window)
    sweep.options["chunk_keys"] = chunk_keys
    sweep.assert_is_attention()


def test_softcap_and_bias_equal_float64(rng: np.random.Generator) -> None:
    sweep = Sweep(rng, 66, 97, 40)
    sweep.options |= {"softcap": 2.0, "bias": rng.standard_normal((66, 97), np.float32)}
    sweep.assert_is_attention()


def test_bits_of_row_do_not_depend_on_other_rows_or_blocks(rng: np.random.Generator) -> None:
    """One vector, then more, rows that see other keys, a later begin; a cache in blocks, in another order."""
    sweep = Sweep(rng, 100, 210, 72, window=60)
    whole = sweep.run()
    for rows in (slice(90, 100), slice(0, 7), slice(40, 81)):
        begin = int(sweep.first[rows].min()) // 48 * 48
        for part, all_rows in zip(sweep.run(rows, begin), whole, strict=True):
            np.testing.assert_array_equal(part, all_rows[rows])
    order = rng.permutation(14)
    for name in ("key", "value"):
        padded = np.zeros((14, 15, 72), BF16)
        padded[order] = getattr(sweep, name).reshape(14, 15, 72)
        setattr(sweep, name, padded)
    sweep.options |= {"table": order.astype(np.int32), "block_rows": 15}
    for found, expected in zip(sweep.run(), whole, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_row_that_sees_nothing_is_empty(rng: np.random.Generator) -> None:
    sweep = Sweep(rng, 20, 60, 32)
    sweep.last[0] = sweep.first[0] = 0
    maximum, denominator, numerator = sweep.run()
    assert maximum[0] == -np.inf
    assert denominator[0] == 0
    assert (numerator[0] == 0).all()
    assert (denominator[1:] >= 0.99).all()

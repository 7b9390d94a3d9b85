# SPDX-License-Identifier: Apache-2.0
"""NaN, infinities and numbers at the ends of float32 in products and attention, on every instruction set.

Each is compared with the same computation of finite numbers. Other operators' are in random graphs (tests/fuzz).
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flownpu.ops import q4nx
from tests.ops.cpu.attention.conversation import (
    CACHE_TYPES,
    PAIRS_EPSILON,
    WORDS_EPSILON,
    multiplies_pairs,
    stored,
)
from tests.ops.device import ISAS, one
from tests.pairwise import pairwise

EPSILON = 2.0**-24
NAN, INF = np.float32(np.nan), np.float32(np.inf)


def weight_blocks(rows: int, columns: int) -> np.ndarray:
    weights = np.random.default_rng(1).standard_normal((rows, columns), dtype=np.float32)
    return q4nx.pack(*q4nx.quantize(weights))


def product(
    x: np.ndarray, blocks: np.ndarray, isa: str, activations: str, rows: int, gating: str = "none"
) -> np.ndarray:
    options = {"cpu_isa": isa, "activations": activations}
    return one("Q4NXMatMul", [x, blocks], constants=(1,), options=options, M=rows, K=x.shape[-1], gating=gating)


@pytest.mark.parametrize(
    ("isa", "activations", "gating", "tokens"),
    pairwise(ISAS, ["bf16", "int8"], ["none", "geglu", "swiglu"], [1, 4, 13, 33]),
)
def test_q4nx_activations_keep_nan(isa: str, activations: str, gating: str, tokens: int) -> None:
    """A NaN makes its row NaN, an infinity makes it NaN or infinite (a gate may close on it); other rows stay."""
    m, k = 40, 300
    x = np.random.default_rng(0).standard_normal((tokens, k), dtype=np.float32)
    blocks = weight_blocks(m if gating == "none" else 128, k)
    finite = product(x, blocks, isa, activations, m, gating)
    assert np.all(np.isfinite(finite))
    for value in (NAN, INF, -INF):
        for column in (0, 5, 31, 255, 256, 299):
            spoilt = x.copy()
            row = column % tokens
            spoilt[row, column] = value
            y = product(spoilt, blocks, isa, activations, m, gating)
            if np.isnan(value):
                assert np.all(np.isnan(y[row]))
            elif gating == "none":
                assert not np.any(np.isfinite(y[row]))
            np.testing.assert_array_equal(np.delete(y, row, 0), np.delete(finite, row, 0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("gating", ["geglu", "swiglu"])
@pytest.mark.parametrize("tokens", [1, 13, 33])
def test_closed_gates_keep_nan(isa: str, activations: str, gating: str, tokens: int) -> None:
    """A closed gate gives 0, whatever the size of its value."""
    weights = np.zeros((64, 32), np.float32)
    weights[:32, 0], weights[32:, 0] = -1, 1
    x = np.zeros((tokens, 32), np.float32)
    x[:, 0] = 1e36
    y = product(x, q4nx.pack(*q4nx.quantize(weights)), isa, activations, 32, gating)
    assert np.all(y == 0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("tokens", [1, 13, 33])
@pytest.mark.parametrize("field", ["scale", "minimum"])
def test_q4nx_weights_keep_nan(isa: str, activations: str, tokens: int, field: str) -> None:
    """A scale or minimum that is not finite makes its row's outputs not finite, and no other row's."""
    m, k = 40, 600
    x = np.random.default_rng(0).standard_normal((tokens, k), dtype=np.float32)
    codes, scale, minimum = q4nx.quantize(np.random.default_rng(1).standard_normal((m, k), dtype=np.float32))
    finite = product(x, q4nx.pack(codes, scale, minimum), isa, activations, m)
    for value in (NAN, INF, -INF):
        for row in (0, 1, 17, 30, 31, 38):
            group = row % scale.shape[1]
            parameters = {"scale": scale.copy(), "minimum": minimum.copy()}
            parameters[field][row, group] = value
            y = product(x, q4nx.pack(codes, parameters["scale"], parameters["minimum"]), isa, activations, m)
            assert not np.any(np.isfinite(y[:, row]))
            if np.isnan(value):
                assert np.all(np.isnan(y[:, row]))
            np.testing.assert_array_equal(np.delete(y, row, 1), np.delete(finite, row, 1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 13, 33])
def test_negligible_activations_are_finite(isa: str, tokens: int) -> None:
    """An int8 step so small that its inverse is no float."""
    x = np.full((tokens, 64), 1e-37, np.float32)
    y = product(x, weight_blocks(32, 64), isa, "int8", 32)
    # 64 products with weights of a standard normal distribution.
    assert np.all(np.abs(y) <= 64 * 1e-37 * 6)
    options = {"cpu_isa": isa, "activations": "int8"}
    y = one("DenseMatMul", [x, np.ones((64, 5), np.float32)], constants=(1,), options=options)
    assert np.all(np.abs(y) <= 64 * 1.1e-37)


DENSE = {"float": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "int8": np.int8}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", DENSE)
@pytest.mark.parametrize("rows", [1, 13])
def test_dense_activations_and_weights_keep_nan(isa: str, activations: str, dtype: str, rows: int) -> None:
    """NaN and infinities in a row of X make that row of Y not finite; in a column of W (or its scale), that column;
    and nothing else."""
    k, m = 300, 40
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, k), dtype=np.float32)
    weight = (rng.standard_normal((k, m)) * (20 if dtype == "int8" else 1)).astype(DENSE[dtype])
    scale = rng.uniform(0.5, 2, m).astype(np.float32) if dtype == "int8" else None

    def multiply(x: np.ndarray, weight: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
        options = {"cpu_isa": isa, "activations": activations}
        return one("DenseMatMul", [x, weight, scale], constants=(1, 2), options=options)

    finite = multiply(x, weight, scale)
    assert np.all(np.isfinite(finite))
    for value in (NAN, INF, -INF):
        for place in (0, 3, 30, 255, 256, 299):
            spoilt = x.copy()
            row, column = place % rows, place % m
            spoilt[row, place] = value
            y = multiply(spoilt, weight, scale)
            assert not np.any(np.isfinite(y[row]))
            np.testing.assert_array_equal(np.delete(y, row, 0), np.delete(finite, row, 0))
            if scale is None:
                bad = weight.copy()
                bad[place, column] = value
                y = multiply(x, bad, None)
            else:
                bad = scale.copy()
                bad[column] = value
                y = multiply(x, weight, bad)
            assert not np.any(np.isfinite(y[:, column]))
            assert np.isinf(value) or np.all(np.isnan(y[:, column]))
            np.testing.assert_array_equal(np.delete(y, column, 1), np.delete(finite, column, 1))


# --- Attention ------------------------------------------------------------------------------------

HEADS = {"num_heads": 4, "kv_num_heads": 2, "head_size": 40}
PAST, NEW = 70, {"few": 2, "many": 45}


def attend(
    isa: str, cache: str, query: np.ndarray, keys: list[np.ndarray], bias: np.ndarray | None = None, **attributes: Any
) -> np.ndarray:
    """Attention [tokens, 4, 40] of new tokens [1, tokens, 160], the last of keys and values [1, 2, all tokens, 40]."""
    tokens, total = query.shape[1], keys[0].shape[2]
    new = [np.ascontiguousarray(k[0, :, -tokens:].transpose(1, 0, 2)).reshape(1, tokens, -1) for k in keys]
    past = [np.ascontiguousarray(stored(k[:, :, :-tokens], cache)) for k in keys]
    lengths = [np.array([total - 1], np.int32), np.array(total, np.int32)]
    y = one("FlowQKVAttention", [query, *new, *past, *lengths, None, None, None, bias],
            options={"cpu_isa": isa, "threads": "1"}, **HEADS, **attributes)  # fmt: skip
    return y[0].reshape(tokens, 4, 40)


def random_attention(tokens: int) -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, tokens, 160), dtype=np.float32)
    return query, [rng.standard_normal((1, 2, PAST + tokens, 40), dtype=np.float32) for _ in range(2)]


@pytest.mark.parametrize(
    ("isa", "cache", "tokens", "window"), pairwise(ISAS, list(CACHE_TYPES), list(NEW.values()), [-1, 20])
)
def test_attention_keeps_nan(isa: str, cache: str, tokens: int, window: int) -> None:
    """A NaN in a key makes NaN of every query of its group that sees the key, one in a query of its own output; a value
    that is not finite makes only its element of them not finite. Queries that do not see it, for a mask or a window,
    are as without it. A row of an int8 cache is NaN if one of its elements is not finite."""
    query, caches = random_attention(tokens)
    finite = attend(isa, cache, query, caches, local_window_size=window)
    position = PAST + np.arange(tokens)
    bound = 10 * EPSILON * (PAST + tokens)
    if multiplies_pairs(cache, isa):
        # Rows that are computed again one by one are not rounded to bf16, unlike others' queries and probabilities. The
        # error of a score moves the output by twice that share of the largest value.
        scores = (np.abs(query).reshape(-1, 40) @ np.abs(caches[0]).reshape(-1, 40).T).max() / 40**0.5
        bound += 2 * (scores + 1) * PAIRS_EPSILON * np.abs(caches[1]).max()
        if cache == "int8":
            bound += 2 * (scores + 0.5) * PAIRS_EPSILON * np.abs(caches[1]).max()
    elif cache == "int8":
        # Rows that are computed again one by one have factors in other steps, and few rows are rounded where many are
        # not.
        scores = (np.abs(query).reshape(-1, 40) @ np.abs(caches[0]).reshape(-1, 40).T).max()
        bound += (2 * scores + PAST + tokens) * WORDS_EPSILON * np.abs(caches[1]).max()
    for value in (NAN, INF, -INF):
        for at in (3, PAST - 5, PAST, PAST + tokens - 1):
            sees = (position >= at) & ((position - at < window) | (window < 0))
            for which in (0, 1):
                spoilt = [array.copy() for array in caches]
                spoilt[which][0, 1, at, 7] = value
                y = attend(isa, cache, query, spoilt, local_window_size=window)
                np.testing.assert_array_equal(y[:, :2], finite[:, :2])  # the other group
                assert np.abs(y[~sees] - finite[~sees]).max(initial=0) <= bound
                if cache == "int8" or (which == 0 and np.isnan(value)):
                    assert np.all(np.isnan(y[sees, 2:]))
                elif which == 1:
                    assert not np.any(np.isfinite(y[sees, 2:, 7]))
                    assert np.abs(np.delete(y - finite, 7, 2)).max(initial=0) <= bound
    spoilt_query = query.copy()
    spoilt_query[0, tokens // 2, 45] = NAN  # head 1
    y = attend(isa, cache, spoilt_query, caches, local_window_size=window)
    assert np.all(np.isnan(y[tokens // 2, 1]))
    y[tokens // 2, 1] = finite[tokens // 2, 1]
    np.testing.assert_array_equal(y, finite)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize("tokens", NEW.values(), ids=NEW)
def test_attention_bias_keeps_nan(isa: str, cache: str, tokens: int) -> None:
    """A NaN bias makes NaN of a query that sees its key; a query whose keys all have minus infinity gives 0."""
    query, caches = random_attention(tokens)
    plain = attend(isa, cache, query, caches, np.zeros((1, 1, tokens, PAST + tokens), np.float32))
    bias = np.zeros((1, 1, tokens, PAST + tokens), np.float32)
    bias[0, 0, 0, 5] = NAN
    bias[0, 0, -1, :] = -np.inf
    if tokens > 2:
        bias[0, 0, 1, PAST + 2 :] = NAN  # behind the causal mask
    y = attend(isa, cache, query, caches, bias)
    assert np.all(np.isnan(y[0]))
    assert np.all(y[-1] == 0)
    np.testing.assert_array_equal(y[1:-1], plain[1:-1])
    # A key of NaN makes NaN, though minus infinity masks it.
    caches[0][0, :, 5, 0] = NAN
    assert np.all(np.isnan(attend(isa, cache, query, caches, bias)[-1]))

# SPDX-License-Identifier: Apache-2.0
"""NaN, infinities and numbers at the ends of float32, on every instruction set: against ONNX Runtime's CPU provider,
and against the same computation with finite numbers.
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
from tests.ops.cpu.test_standard_operators import ort
from tests.ops.device import ISAS, NAMES, one

EPSILON = 2.0**-24
NAN, INF = np.float32(np.nan), np.float32(np.inf)
SPECIAL = np.array([NAN, INF, -INF, 3e38, -3e38, 1, -1, 0], np.float32)


def standard(
    op_type: str, inputs: list[np.ndarray], *, isa: str = ISAS[0], output: str = "float", **attributes: Any
) -> np.ndarray:
    return one(op_type, inputs, outputs=(output,), domain="", options={"cpu_isa": isa}, **attributes)


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """All pairs of special numbers, as two arrays."""
    return np.repeat(SPECIAL, len(SPECIAL)), np.tile(SPECIAL, len(SPECIAL))


@pytest.mark.parametrize("op_type", ["Max", "Min", "Add", "Sub", "Mul", "Div"])
def test_arithmetic_keeps_nan_and_infinity(op_type: str) -> None:
    for inputs in ([*pairs()], [SPECIAL, SPECIAL[:1]], [SPECIAL[1:2], SPECIAL]):
        (expected,) = ort(op_type, inputs, ("float",), "")
        np.testing.assert_array_equal(standard(op_type, inputs), expected)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean"])
def test_reductions_keep_nan(op_type: str, axis: int) -> None:
    """NaN is the result in any position, as in numpy; in ONNX Runtime a maximum is NaN only if the first element is."""
    function = {"ReduceMax": np.max, "ReduceMin": np.min, "ReduceSum": np.sum, "ReduceMean": np.mean}[op_type]
    for place in range(5):
        x = np.arange(15, dtype=np.float32).reshape(3, 5)
        x[place % 3, place] = NAN
        x[(place + 1) % 3, place] = (INF, -INF)[place % 2]
        found = standard(op_type, [x, np.array([axis])], keepdims=0)
        np.testing.assert_array_equal(found, function(x, axis))


@pytest.mark.parametrize("last", [0, 1])
def test_arg_max_takes_nan(last: int) -> None:
    """NaN is the largest where it is the first, as in ONNX Runtime."""
    for place in range(5):
        x = np.array([[3, 1, 3, 2, 0], [-INF, -INF, INF, INF, 1]], np.float32)
        x[:, place] = NAN
        (expected,) = ort("ArgMax", [x], ("int64",), "", axis=1, select_last_index=last)
        found = standard("ArgMax", [x], output="int64", axis=1, select_last_index=last)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("columns", [4, 33])
def test_softmax_keeps_nan(isa: str, columns: int) -> None:
    rows = [np.arange(columns), *(np.full(columns, value) for value in SPECIAL)]
    for value in (*SPECIAL, np.finfo(np.float32).min):
        for place in (0, columns // 2, columns - 1):
            rows.append(np.arange(columns))
            rows[-1] = rows[-1].astype(np.float32)
            rows[-1][place] = value
    x = np.stack(rows).astype(np.float32)
    # Not ONNX Runtime's: for a row of -infinity its kernels for Arm give infinity, those for x86 NaN.
    exact = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        exact = np.exp(exact - exact.max(axis=1, keepdims=True))
        expected = exact / exact.sum(axis=1, keepdims=True)
    found = standard("Softmax", [x], isa=isa)
    # e^x to some ten roundings; sums of 33.
    np.testing.assert_allclose(found, expected, rtol=(10 + columns) * EPSILON, atol=1e-37)


@pytest.mark.parametrize("isa", ISAS)
def test_exponential_keeps_nan(isa: str) -> None:
    """The softmax of 0 and x is 1 and e^x, over 1 + e^x: over all x whose e^x is a normal number, and beyond."""
    x = np.linspace(-100, 0, 40_001, dtype=np.float32)
    found = standard("Softmax", [np.stack([np.zeros_like(x), x], 1)], isa=isa)[:, 1]
    exact = np.exp(x.astype(np.float64))
    expected = exact / (1 + exact)
    # A polynomial of degree 7 leaves out 5e-9 of e^x; some ten roundings. Results that are not normal may be 0.
    assert np.all(np.abs(found - expected) <= (5e-9 + 12 * EPSILON) * expected + np.where(exact < 2.0**-126, exact, 0))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_keeps_nan(isa: str, approximate: str) -> None:
    # Around where e^x becomes 0 and infinite, and all magnitudes.
    magnitudes = np.geomspace(1, 3.4e38, 999).astype(np.float32)
    x = np.concatenate([SPECIAL, np.linspace(-100, 100, 4001, dtype=np.float32), magnitudes, -magnitudes])
    (expected,) = ort("Gelu", [x], ("float",), "", approximate=approximate)
    identity = np.eye(1, dtype=np.float32)
    fused = one("DenseMatMul", [x[:, None], identity], constants=(1,), options={"cpu_isa": isa, "activations": "bf16"},
                activation="gelu" if approximate == "none" else "gelu_tanh")  # fmt: skip
    # As in test_standard_operators.py.
    bound = 16 * EPSILON * (np.abs(x.astype(np.float64)) + 1)
    found = standard("Gelu", [x], isa=isa, approximate=approximate)
    usual = np.isfinite(expected)
    assert np.all(np.abs(found[usual] - expected[usual]) <= bound[usual])
    np.testing.assert_array_equal(found[~usual], expected[~usual])
    # The activation after a product with 1, which rounds nothing: it has few columns.
    np.testing.assert_array_equal(fused[:, 0], standard("Gelu", [x], isa=isa, approximate=approximate))


def test_is_nan_equals_numpy_for_other_payloads_and_signs() -> None:
    """Also NaNs with another payload or sign."""
    others = np.array([0x7F800001, 0xFFC00000, 0xFFFFFFFF], np.uint32).view(np.float32)
    x = np.concatenate([SPECIAL, others, np.float32([1e-45, -0.0])])[None]
    found = standard("IsNaN", [x], output="bool")
    np.testing.assert_array_equal(found, np.isnan(x))


@pytest.mark.parametrize("op_type", ["Sigmoid", "Tanh", "Exp", "Sqrt", "Reciprocal", "Neg", "Erf"])
def test_functions_keep_nan(op_type: str) -> None:
    x = np.concatenate([SPECIAL, np.array([-90, -20, 20, 90, -0.0], np.float32)])
    (expected,) = ort(op_type, [x], ("float",), "")
    # ONNX Runtime's own functions are approximations, to some ulps of 1.
    np.testing.assert_allclose(standard(op_type, [x]), expected, rtol=4 * 2.0**-23, atol=4 * 2.0**-23)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op_type", ["SimplifiedLayerNormalization", "LayerNormalization"])
def test_norms_keep_nan(isa: str, op_type: str) -> None:
    columns = 37
    rows = np.random.default_rng(0).standard_normal((4 * len(SPECIAL), columns), dtype=np.float32)
    rows[np.arange(len(rows)), np.arange(len(rows))] = np.repeat(SPECIAL, 4)
    rows = np.concatenate([rows, np.ones((1, columns), np.float32)])
    weight = np.linspace(0.5, 1.5, columns).astype(np.float32)
    (expected,) = ort(op_type, [rows, weight], ("float",), "", epsilon=1e-6)
    found = standard(op_type, [rows, weight], isa=isa, epsilon=1e-6)
    # A sum of 37, twice for the variance, and some 8 roundings, on each side.
    np.testing.assert_allclose(found, expected, rtol=2 * 90 * EPSILON, atol=2 * 90 * EPSILON)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_rounding_to_16_bits_keeps_nan(isa: str, dtype: Any) -> None:
    """The KV cache's elements are rounded by the same code."""
    x = np.concatenate([SPECIAL, np.float32([65519, 65520, -70000, 1e-7, 3.3961775e38, 3.4e38])]).repeat(5)
    with np.errstate(over="ignore"):
        expected = x.astype(dtype)
    found = standard("Cast", [x], isa=isa, output=NAMES[np.dtype(dtype)])
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


# --- Products -------------------------------------------------------------------------------------


def weight_blocks(rows: int, columns: int) -> np.ndarray:
    weights = np.random.default_rng(1).standard_normal((rows, columns), dtype=np.float32)
    return q4nx.pack(*q4nx.quantize(weights))


def product(
    x: np.ndarray, blocks: np.ndarray, isa: str, activations: str, rows: int, gating: str = "none"
) -> np.ndarray:
    options = {"cpu_isa": isa, "activations": activations}
    return one("Q4NXMatMul", [x, blocks], constants=(1,), options=options, M=rows, K=x.shape[-1], gating=gating)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("gating", ["none", "geglu", "swiglu"])
@pytest.mark.parametrize("tokens", [1, 4, 13, 33])
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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache", CACHE_TYPES)
@pytest.mark.parametrize("tokens", NEW.values(), ids=NEW)
@pytest.mark.parametrize("window", [-1, 20])
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

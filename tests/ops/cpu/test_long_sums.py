# SPDX-License-Identifier: Apache-2.0
"""Sums of millions of numbers, against float64: float32 sums of one number after another would stop growing."""

import numpy as np
import pytest

from tests.ops.device import ISAS, one

# Half an ulp of 1 in float32 and in float64: the relative error of one rounding.
EPSILON, DOUBLE_EPSILON = 2.0**-24, 2.0**-53
# Beyond 2^24, to which float32 counts.
MANY = 20_000_000
# A row of a norm, of a softmax, of a running sum.
LONG = 1 << 22
# Vectors' kernels add up blocks of 4096 in lanes of float32, no fewer than 4, and blocks in float64: no term of a sum
# takes part in more than 4096 / 4 + 4 additions, whatever their number.
BLOCK_BOUND = (4096 / 4 + 4) * EPSILON
# Not exact in binary: each sum of it is rounded, and sums of equal numbers are rounded the same way again and again.
TENTH = np.float32(0.1)


@pytest.mark.parametrize(("shape", "axes"), [((MANY,), [0]), ((MANY, 1), [0]), ((MANY, 2), [0]), ((2, MANY), [0, 1])])
def test_reduce_sum_of_ones_counts_them(shape: tuple[int, ...], axes: list[int]) -> None:
    found = one("ReduceSum", [np.ones(shape, np.float32), np.array(axes)], domain="", keepdims=0)
    assert np.all(found == np.prod(shape) / found.size)


def test_reduce_mean_is_within_bound() -> None:
    x = np.random.default_rng(0).uniform(1, 2, 30_000_000).astype(np.float32)
    found = one("ReduceMean", [x], domain="", keepdims=0)
    expected = x.mean(dtype=np.float64)
    # A rounding in float64 for each number, and one of the result; numpy sums pairwise, which is more exact.
    assert abs(found - expected) <= (x.size * DOUBLE_EPSILON + EPSILON) * expected


def test_reduce_mean_of_integers_is_exact() -> None:
    """As in ONNX Runtime: the mean of the exact sum, which the type need not hold, rounded towards zero."""
    for dtype, name in ((np.int32, "int32"), (np.int64, "int64")):
        largest = np.iinfo(dtype).max
        for values in ([largest] * 4, [-largest, -largest, -2], [-7, 2, 1], [7, -2, -1]):
            x = np.array(values, dtype)
            found = one("ReduceMean", [x], outputs=(name,), domain="", keepdims=0)
            assert int(found) == int(abs(sum(values)) // len(values)) * (1 if sum(values) > 0 else -1)


def test_reduce_sum_of_integers_is_exact() -> None:
    """As in ONNX Runtime: the nearest number that the type holds."""
    for dtype, name in ((np.int32, "int32"), (np.int64, "int64")):
        lowest, largest = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        for values in ([largest, 1], [lowest, -1, -5], [largest, 5, -7], [largest] * 3, [lowest] * 3):
            found = one("ReduceSum", [np.array(values, dtype)], outputs=(name,), domain="", keepdims=0)
            assert int(found) == min(max(sum(values), lowest), largest)


@pytest.mark.parametrize(("reverse", "exclusive"), [(0, 0), (1, 1)])
def test_cumulative_sum_is_within_bound(reverse: int, exclusive: int) -> None:
    x = np.full(LONG, TENTH)
    x[::2] = 1
    found = one("CumSum", [x, np.array(0)], domain="", reverse=reverse, exclusive=exclusive)
    expected = x[:: 1 - 2 * reverse].cumsum(dtype=np.float64)
    if exclusive:
        expected = np.concatenate([[0], expected[:-1]])
    # numpy's running sum rounds as often.
    assert np.all(np.abs(found[:: 1 - 2 * reverse] - expected) <= (2 * LONG * DOUBLE_EPSILON + EPSILON) * expected)


def test_average_pool_is_within_bound() -> None:
    x = np.full((1, 1, 2048, 2048), TENTH)
    y = one("AveragePool", [x], domain="", kernel_shape=[2048, 2048], strides=[2048, 2048])
    assert abs(y.item() - float(TENTH)) <= (x.size * DOUBLE_EPSILON + 2 * EPSILON) * float(TENTH)


@pytest.mark.parametrize("isa", ISAS)
def test_root_mean_square_is_within_bound(isa: str) -> None:
    y = one("SimplifiedLayerNormalization", [np.full(LONG, TENTH)[None], np.ones(LONG, np.float32)],
            domain="", options={"cpu_isa": isa}, epsilon=1e-9)  # fmt: skip
    # The root halves the sum's error; six roundings: of squares, the quotient, the root, its inverse and two products.
    expected = float(TENTH) / (float(TENTH) ** 2 + 1e-9) ** 0.5
    assert np.abs(y - expected).max() <= (BLOCK_BOUND / 2 + 6 * EPSILON) * expected


@pytest.mark.parametrize("isa", ISAS)
def test_layer_norm_of_long_row_is_within_bound(isa: str) -> None:
    x = np.full(LONG, TENTH)[None]
    x[:, ::2] = np.float32(0.3)
    y = one("LayerNormalization", [x, np.ones(LONG, np.float32)], domain="", options={"cpu_isa": isa}, epsilon=1e-9)
    mean, variance = x.mean(dtype=np.float64), x.var(dtype=np.float64)
    expected = (x - mean) / np.sqrt(variance + 1e-9)
    # The mean may be off by its bound; all differences from it, and so their mean of squares, change with it.
    shift = (BLOCK_BOUND + 2 * EPSILON) * mean / np.sqrt(variance)
    assert np.abs(y - expected).max() <= 2 * shift + BLOCK_BOUND / 2 + 8 * EPSILON


@pytest.mark.parametrize("isa", ISAS)
def test_softmax_is_within_bound(isa: str) -> None:
    x = np.zeros(LONG, np.float32)[None]
    x[:, 1::2] = np.log(TENTH)
    y = one("Softmax", [x], domain="", options={"cpu_isa": isa})
    expected = np.exp(x.astype(np.float64))
    expected /= expected.sum()
    # Besides the sum: e^x to a few roundings, the inverse and the product.
    assert np.all(np.abs(y - expected) <= (BLOCK_BOUND + 10 * EPSILON) * expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 40])
def test_attention_over_long_context_is_within_bound(isa: str, tokens: int) -> None:
    """The first key has the score 0, all others log 0.1. The output's first element is the first key's weight, its
    second the sum of all weights, 1."""
    context, d = 1 << 17, 16
    key = np.zeros((1, 1, context, d), np.float32)
    key[..., 1:, 0] = np.log(TENTH)
    value = np.zeros_like(key)
    value[..., 0, 0] = value[..., 1] = 1
    query = np.zeros((1, tokens, 1, d), np.float32)
    query[..., 0] = 1
    new = [cache[:, :, -tokens:].reshape(1, tokens, d) for cache in (key, value)]
    lengths = [np.array([context - 1], np.int32), np.array(context, np.int32)]
    operator = "FlowKVAttention" if tokens == 1 else "FlowQKVAttention"
    inputs = [query.reshape(1, tokens, d), *new, key, value, *lengths]
    sizes = {"num_heads": 1, "kv_num_heads": 1, "head_size": d, "scale": 1.0}
    y = one(operator, inputs, options={"cpu_isa": isa, "threads": "1"}, **sizes)
    seen = np.arange(context - tokens, context)
    # In the numerator and the denominator, chunks of 32 to 256 keys are added up, one by one, then their sums. e^x and
    # the division have some ten roundings more.
    bound = 2 * (256 + context / 32 + 10) * EPSILON
    assert np.all(np.abs(y[0, :, 1] - 1) <= bound)
    expected = 1 / (1 + seen * float(TENTH))
    assert np.all(np.abs(y[0, :, 0] - expected) <= bound * expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("rows", [1, 6])
def test_product_is_within_bound(isa: str, activations: str, rows: int) -> None:
    """Ones times equal weights, which bf16 and 8-bit codes hold exactly."""
    k = 1 << 18
    weight = np.full((k, 3), np.float32(0.10009765625))
    options = {"cpu_isa": isa, "activations": activations}
    y = one("DenseMatMul", [np.ones((rows, k), np.float32), weight], constants=(1,), options=options)
    # At most 512 of K are added up at once, and then their sums.
    assert np.abs(y - k * 0.10009765625).max() <= (512 + k / 256 + 4) * EPSILON * k * 0.10009765625

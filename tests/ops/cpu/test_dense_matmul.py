# SPDX-License-Identifier: Apache-2.0
"""DenseMatMul, MatMul and Gemm on the CPU, for every instruction set of this machine, against float64."""

import math
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flownpu.ops.definitions import dense_matmul
from tests.ops.cpu.test_q4nx_matmul import EPSILON, rounded, tie_error
from tests.ops.device import ISAS, Node, one, run
from tests.pairwise import pairwise

# (rows, K, M): few rows, few columns, both; columns and K that fill no block of 32 or 128; SigLIP's patch of 588; two
# stretches of 1024 K.
SHAPES = [
    (1, 33, 7),
    (3, 600, 16),
    (4, 256, 72),
    (5, 40, 97),
    (13, 588, 96),
    (300, 72, 40),
    (300, 72, 72),
    (7, 2080, 80),
]
TYPES = {"float": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "int8": np.int8}
HOW = list(product(ISAS, ["bf16", "int8"], TYPES))
FEW_ROWS, FEW_COLUMNS = 4, 64
# The most columns of K that share a scale in int8: of weights that are rounded, and of int8 ones.
MOST_COLUMNS = {"avx512": (128, 384), "avx2": (256, 384)}
# The largest codes of activations on AVX2, with rounded and with int8 weights.
UNSIGNED_CODES = (150, 127)


def weight_of(rng: np.random.Generator, k: int, m: int, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """A weight and, for int8, its scales."""
    if dtype == "int8":
        return rng.integers(-128, 128, (k, m)).astype(np.int8), rng.uniform(0.5, 2, m).astype(np.float32) / 128
    # A mean other than 0: the range of 8-bit codes is not symmetric.
    return (rng.standard_normal((k, m), dtype=np.float32) + 0.25).astype(TYPES[dtype]), None


def rounding(isa: str, rows: int, activations: str, weight: np.ndarray) -> str:
    """The type that inputs are rounded to, where it has dot products. Few rows or columns are not, unless of int8."""
    rounds = isa == "avx512" or (isa == "avx2" and activations == "int8")
    stores_int8 = weight.dtype == np.int8
    few_rows = rows <= FEW_ROWS and not (stores_int8 and activations == "int8")
    few_columns = weight.shape[1] <= FEW_COLUMNS and not stores_int8
    return activations if rounds and not few_rows and not few_columns else "none"


def part_columns(isa: str, k: int, weight: np.ndarray) -> int:
    """The columns of a part: all parts are alike, of a multiple of 64."""
    parts = math.ceil(k / MOST_COLUMNS[isa][weight.dtype == np.int8])
    return math.ceil(math.ceil(k / parts) / 64) * 64


def largest_sums(weight: np.ndarray) -> np.ndarray:
    """The largest sums [M] of weights of one sign that AVX2 adds up in 16 bits: of 16 of K, eight each."""
    runs = np.pad(weight.astype(np.float64), ((0, -len(weight) % 16), (0, 0))).reshape(-1, 4, 2, 2, weight.shape[1])
    return np.asarray(np.maximum(np.maximum(runs, 0).sum((1, 3)), np.maximum(-runs, 0).sum((1, 3))).max((0, 1)))


def signed_step(weight: np.ndarray, stored: bool) -> np.ndarray:
    """The steps [M] of codes up to 127 whose largest sums, each rounded by a half, do not pass 16 bits on AVX2."""
    sums, most = largest_sums(weight), 32767 // UNSIGNED_CODES[stored]
    step = np.maximum(sums / (most - 4), np.abs(weight).max(0) / 127)
    return np.where(sums > most, step, 1) if stored else step


def near_ties(scaled: np.ndarray, step: np.ndarray) -> np.ndarray:
    """A step, where float32 decides between two codes; else 0.

    There are four roundings of a number up to 255, or twelve, of a sum of eight and what follows, of one up to 127.
    """
    return np.where(np.abs(scaled - np.floor(scaled) - 0.5) <= 127 * 12 * EPSILON, step, 0)


def unsigned_activations(x: np.ndarray, part: int, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """x in codes from the least of a part upwards, in float64, and the error of those that are near a tie.

    Zeros fill up a group of 32, and belong to the last part.
    """
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, -x.shape[1] % 32)))
    found, error = np.empty_like(padded), np.zeros_like(padded)
    for start in range(0, padded.shape[1], part):
        of_part = padded[:, start : start + part]
        lowest = of_part.min(1, keepdims=True)
        step = (of_part.max(1, keepdims=True) - lowest) / largest
        scaled = (of_part - lowest) / step
        found[:, start : start + part] = lowest + step * np.rint(scaled)
        error[:, start : start + part] = near_ties(scaled, step)
    return found[:, : x.shape[1]], error[:, : x.shape[1]]


def rounded_weight(
    weight: np.ndarray, scale: np.ndarray | None, activations: str, part: int, signed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The weight as multiplied, [K, M] in float64, and its error where float32 decides between two codes."""
    exact = weight.astype(np.float64) * (1 if scale is None else scale.astype(np.float64))
    if activations == "bf16":
        products = weight.astype(np.float32) * (1 if scale is None else scale)
        return products.astype(ml_dtypes.bfloat16).astype(np.float64), np.zeros_like(exact)
    stored = weight.dtype == np.int8
    if stored and not signed:
        return exact, np.zeros_like(exact)
    found, error = np.empty_like(exact), np.zeros_like(exact)
    for start in range(0, len(exact), part):
        of_part = exact[start : start + part]
        lowest = np.zeros(exact.shape[1]) if signed else of_part.min(0)
        step = (of_part.max(0) - lowest) / 255
        if signed:
            of_codes = weight[start : start + part].astype(np.float64)
            step = signed_step(of_codes, stored) * (1 if scale is None else scale.astype(np.float64))
        scaled = (of_part - lowest) / np.where(step > 0, step, 1)
        found[start : start + part] = lowest + step * np.floor(scaled + 0.5)
        error[start : start + part] = near_ties(scaled, step)
    return found, error


@pytest.mark.parametrize(("how", "transposed", "shape"), pairwise(HOW, [0, 1], SHAPES))
def test_product_equals_float64(how: tuple[str, str, str], transposed: int, shape: tuple[int, int, int]) -> None:
    isa, activations, dtype = how
    rows, k, m = shape
    rng = np.random.default_rng(rows)
    weight, scale = weight_of(rng, k, m, dtype)
    x = rng.standard_normal((rows, k), dtype=np.float32)
    given = np.ascontiguousarray(weight.T) if transposed else weight
    y = one(
        "DenseMatMul",
        [x, given, scale],
        constants=(1, 2),
        options={"cpu_isa": isa, "activations": activations},
        transposed=transposed,
    )
    exact_x, exact_w = x.astype(np.float64), dense_matmul.reference(np.eye(k), weight, scale)
    slack = np.zeros((rows, m))
    if rounding(isa, rows, activations, weight) != "none":
        part, avx2 = part_columns(isa, k, weight), isa == "avx2"
        if avx2:
            exact_x, of_x = unsigned_activations(x, part, UNSIGNED_CODES[dtype == "int8"])
        else:
            exact_x, of_x = rounded(x, activations, part), tie_error(x, activations, part)
        exact_w, error = rounded_weight(weight, scale, activations, part, signed=avx2)
        slack = of_x @ np.abs(exact_w) + np.abs(exact_x) @ error
    # At most K + 8 float32 roundings (a product and a sum for each of K, one of them fused; scale, minimum and the sums
    # over a group of 32 and over a part), relative to the sum of magnitudes: an 8-bit weight is the sum of a
    # minimum and steps, whose magnitudes are up to three times the largest weight.
    magnitudes = np.abs(exact_x).sum(1)[:, None] * 3 * np.abs(exact_w).max()
    assert np.all(np.abs(y - exact_x @ exact_w) <= (k + 8) * EPSILON * magnitudes + slack)


@pytest.mark.skipif("avx2" not in ISAS, reason="the processor has no AVX2, whose sums of 16 bits these weights fill")
@pytest.mark.parametrize("dtype", ["float", "int8"])
@pytest.mark.parametrize("sign", [1, -1])
def test_equal_weights_and_largest_activations_pass_no_sum(dtype: str, sign: int) -> None:
    rng = np.random.default_rng(5)
    k, m = 192, 96
    x = np.ones((5, k), np.float32)
    x[:, 0] = 0  # All others are the largest code.
    floats = sign * rng.uniform(0.9, 1, (k, m)).astype(np.float32)
    weight = np.rint(127 * floats).astype(np.int8) if dtype == "int8" else floats
    y = one("DenseMatMul", [x, weight], constants=(1,), options={"cpu_isa": "avx2", "activations": "int8"})
    exact, error = rounded_weight(weight, None, "int8", k, signed=True)
    # K + 8 roundings, as above. A sum that passes 16 bits is wrong by 65536 steps of both, more than the result.
    bound = (k + 8) * EPSILON * k * np.abs(exact).max() + error.sum(0)
    assert np.all(np.abs(y - exact[1:].sum(0)) <= bound)


@pytest.mark.parametrize(
    ("isa", "activations", "dtype", "sizes"),
    pairwise(ISAS, ["bf16", "int8"], list(TYPES), [(3, 0, 40), (300, 0, 40), (3, 8, 0), (0, 8, 40), (0, 0, 0)]),
)
def test_empty_sum_is_zero(isa: str, activations: str, dtype: str, sizes: tuple[int, int, int]) -> None:
    """An empty sum is 0, to which bias, activation and residual are applied."""
    rows, k, m = sizes
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1, rows, k), dtype=np.float32)
    weight, bias = np.zeros((k, m), TYPES[dtype]), rng.standard_normal(m, dtype=np.float32)
    options = {"cpu_isa": isa, "activations": activations}
    for shape in [(1, rows, m), (m,), (2, rows, 1)]:
        residual = rng.standard_normal(shape, dtype=np.float32)
        inputs = [x, weight, None, bias, residual]
        y = one("DenseMatMul", inputs, constants=(1, 3), options=options, activation="gelu")
        expected = dense_matmul.reference(x, weight, None, bias, residual, activation="gelu")
        assert y.shape == expected.shape
        if k == 0:  # A sum, and the activation's 16 roundings.
            assert np.all(np.abs(y - expected) <= 17 * EPSILON * (np.abs(bias) + np.abs(residual) + 1))
    if dtype == "float":
        for constants in ((), (1,)):
            y = one("MatMul", [x, weight], constants=constants, domain="", options=options)
            assert y.shape == (1, rows, m)
            assert k > 0 or np.all(y == 0)
        y = one("Gemm", [x[0], weight, bias], constants=(1, 2), domain="", options=options)
        np.testing.assert_array_equal(y, np.broadcast_to(bias, (rows, m)) if k == 0 else np.zeros((rows, m)))


X, W = np.zeros((2, 8), np.float32), np.zeros((8, 4), np.float32)


@pytest.mark.parametrize("activations", ["bf16", "int8"])
@pytest.mark.parametrize("transposed", [(0, 0), (1, 1)], ids=str)
def test_gemm_with_constant_weight_rounds_as_dense_product(activations: str, transposed: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((9, 64), dtype=np.float32), rng.standard_normal((64, 40), dtype=np.float32)
    c = rng.standard_normal((9, 40), dtype=np.float32)
    options = {"activations": activations}
    given = [np.ascontiguousarray(x.T) if turn else x for x, turn in zip((a, b), transposed, strict=True)]
    attributes = {"transA": transposed[0], "transB": transposed[1]}
    y = one("Gemm", [*given, c], constants=(1,), domain="", options=options, **attributes)
    expected = one("DenseMatMul", [a, b, None, None, c], constants=(1,), options=options)
    np.testing.assert_array_equal(y, expected)


def test_gemm_scales_c_and_with_beta_of_zero_does_not_read_it() -> None:
    """As in BLAS and in ONNX Runtime; 0 times infinity would be NaN."""
    a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    scaled = one("Gemm", [a, b, np.full((2, 4), 8, np.float32)], domain="", alpha=2.0, beta=-0.5)
    np.testing.assert_array_equal(scaled, np.full((2, 4), 2))
    y = one("Gemm", [a, b, np.full((2, 4), np.inf, np.float32)], domain="", beta=0.0)
    np.testing.assert_array_equal(y, np.full((2, 4), 3))


def test_gemm_of_changing_sizes_is_computed_run_by_run() -> None:
    """A computed B may be unknown when the session is made."""
    node = Node("Gemm", [X, W], domain="", transB=1)
    for rows, k, columns in [(2, 3, 4), (5, 1, 7), (1, 0, 2)]:
        a, b = np.ones((rows, k), np.float32), np.ones((columns, k), np.float32)
        np.testing.assert_array_equal(node(a, b)[0], np.full((rows, columns), k))


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "message"),
    [
        (
            "DenseMatMul",
            [X, W.astype(np.int32)],
            {},
            "input 1 .W.: expected float or float16 or bfloat16 or int8, got int32",
        ),
        ("DenseMatMul", [X, W[:, :, None]], {}, r"input 1 \(W\): expected shape \[\?,\?\], got \[8,4,1\]"),
        ("DenseMatMul", [X, W, X[0, :3]], {}, r"expected scale of 4 elements, got \[3\]"),
        ("DenseMatMul", [X, W, None, X[0, :3]], {}, r"expected bias of 4 elements, got \[3\]"),
        ("DenseMatMul", [X, W], {"activation": "relu"}, "expected one of none.gelu.gelu_tanh, got 'relu'"),
        ("DenseMatMul", [X[:, :7].copy(), W], {}, r"expected X of shape \[.., 8\], got \[2,7\]"),
        ("MatMul", [X, W.astype(np.float16)], {}, "input 1 .B.: expected float, the type of .*, got float16"),
        ("MatMul", [X, W[:7].copy()[None]], {}, r"expected shapes \[.., S, K\] and \[.., K, M\], got"),
    ],
)
def test_unfit_inputs_are_refused(op_type: str, inputs: list[Any], attributes: dict[str, Any], message: str) -> None:
    domain = "ai.flownpu" if op_type == "DenseMatMul" else ""
    constants = () if op_type == "MatMul" else tuple(i for i, a in enumerate(inputs) if i > 0 and a is not None)
    with pytest.raises(ValueError, match=message):
        run(op_type, inputs, domain=domain, constants=constants, **attributes)

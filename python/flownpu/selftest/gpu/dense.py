# SPDX-License-Identifier: Apache-2.0
"""Cases of the product with an unpacked weight matrix (DenseMatMul), in each type, order and epilogue."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import ml_dtypes
import numpy as np

from flownpu.selftest.gpu.case import F32, Case, Expected

Rng = np.random.Generator

_TYPES = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8}
# Errors of an activation in F32: erf is off by at most 16 units in the last place, tanh by 5 (OpenCL's bounds), and
# each operation around them adds a rounding.
_ACTIVATION = 24
_MOST_SLOPE = 1.13  # largest slope of GELU


def dense_products() -> Iterator[tuple[str, Callable[[Rng], Case]]]:
    """Pairs of a case's name and the function that makes the case; no size is a multiple of a tile's size."""
    for weight in _TYPES:
        yield f"dense_matmul, {weight}", partial(_dense, 77, 45, 19, weight=weight)
        yield f"dense_matmul, {weight}, transposed", partial(_dense, 67, 30, 3, weight=weight, transposed=True)
    yield "dense_matmul, bias and gelu", partial(_dense, 33, 65, 5, activation="gelu", bias=True)
    yield (
        "dense_matmul, bias, tanh and residual",
        partial(_dense, 70, 17, 18, activation="gelu_tanh", bias=True, repeats=1),
    )
    yield "dense_matmul, residual that repeats", partial(_dense, 70, 17, 18, repeats=3)


def _dense(
    rows: int, columns: int, tokens: int, rng: Rng, *, weight: str = "bfloat16", transposed: bool = False,
    activation: str = "none", bias: bool = False, repeats: int = 0,
) -> Case:  # fmt: skip
    x = rng.standard_normal((tokens, columns), dtype=np.float32)
    w = rng.standard_normal((columns, rows), dtype=np.float32)
    given = np.rint(20 * w).astype(np.int8) if weight == "int8" else w.astype(_TYPES[weight])
    scale = rng.uniform(0.02, 0.06, rows).astype(np.float32) if weight == "int8" else None
    exact, magnitude = (x.astype(np.float64) @ given.astype(np.float64), np.abs(x) @ np.abs(given.astype(np.float64)))
    factor = 1 if scale is None else scale.astype(np.float64)
    # The sum is in order: each term takes part in at most as many additions as there are columns.
    y, tolerance = exact * factor, (columns + 3) * F32 * magnitude * factor
    of_bias = rng.standard_normal(rows, dtype=np.float32) if bias else None
    residual = rng.standard_normal((tokens // repeats, rows), dtype=np.float32) if repeats else None
    if of_bias is not None:
        y = y + of_bias
        tolerance = tolerance + F32 * np.abs(y)
    if activation != "none":
        tolerance = _MOST_SLOPE * tolerance + _ACTIVATION * F32 * np.abs(y)
        y = _gelu(y, tanh=activation == "gelu_tanh")
    if residual is not None:
        y = y + np.tile(residual, (repeats, 1))
        tolerance = tolerance + F32 * np.abs(y)
    # A residual that repeats has fewer rows than the result, which gets an axis for the repetitions.
    of_result = (repeats, tokens // repeats, rows) if repeats else (tokens, rows)
    given_x = x.reshape(*of_result[:-1], columns)
    return Case(
        op_type="DenseMatMul", constants=[1], read=given.nbytes, operations=2 * tokens * rows * columns,
        inputs=[given_x, given.T.copy() if transposed else given, scale, of_bias, residual],
        expected={0: Expected(y.reshape(of_result), tolerance.reshape(of_result))},
        attributes={"activation": activation, "transposed": int(transposed)},
    )  # fmt: skip


def _gelu(x: np.ndarray, *, tanh: bool) -> np.ndarray:
    if tanh:
        factor = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    else:
        factor = np.array([math.erf(value / math.sqrt(2)) for value in x.flat]).reshape(x.shape)
    return np.asarray(0.5 * x * (1 + factor))

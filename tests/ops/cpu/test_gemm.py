# SPDX-License-Identifier: Apache-2.0
"""Gemm on the CPU, for every instruction set of this machine, against the reference in float64."""

from typing import Any

import numpy as np
import pytest

from tests.ops.cpu.within_bounds import check
from tests.ops.device import ISAS, Node, one, run

# Few rows, of which nothing is rounded; more, in several tiles of a transposition.
SIZES = [(3, 24, 10), (37, 40, 33)]
C_SHAPES: dict[str, Any] = {
    "none": None,
    "scalar": (),
    "one": (1,),
    "one, two axes": (1, 1),
    "a row": ("m",),
    "a row, two axes": (1, "m"),
    "a column": ("s", 1),
    "a matrix": ("s", "m"),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("added", C_SHAPES)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 1.0), (1.0, -2.0), (0.0, 3.0)])
@pytest.mark.parametrize("transposed", [(1, 0), (0, 1)], ids=str)
def test_gemm_forms_equal_equation(
    isa: str, sizes: tuple[int, int, int], added: str, alpha: float, beta: float, transposed: tuple[int, int]
) -> None:
    """B is computed, so nothing is rounded."""
    s, k, m = sizes
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((s, k), dtype=np.float32), rng.standard_normal((k, m), dtype=np.float32)
    shape = C_SHAPES[added]
    c = None if shape is None else rng.standard_normal([{"s": s, "m": m}.get(n, n) for n in shape], dtype=np.float32)
    given = [np.ascontiguousarray(x.T) if turn else x for x, turn in zip((a, b), transposed, strict=True)]
    attributes = {"transA": transposed[0], "transB": transposed[1], "alpha": alpha, "beta": beta}
    check("Gemm", [*given, c], options={"cpu_isa": isa}, **attributes)


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


def test_gemm_with_beta_of_zero_does_not_read_c() -> None:
    """As in BLAS and in ONNX Runtime; 0 times infinity would be NaN."""
    a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    y = one("Gemm", [a, b, np.full((2, 4), np.inf, np.float32)], domain="", beta=0.0)
    np.testing.assert_array_equal(y, np.full((2, 4), 3))


A, B = np.zeros((2, 8), np.float32), np.zeros((8, 4), np.float32)


@pytest.mark.parametrize(
    ("inputs", "attributes", "message"),
    [
        ([A, B], {"transA": 1}, r"expected B with 2 rows, as many as A has to multiply, got A \[2,8\] and B \[8,4\]"),
        ([A, B], {"transB": 1}, r"expected B with 8 columns, as many as A has to multiply, got .* B \[8,4\]"),
        ([A, B, A[:, :3].copy()], {}, r"expected C of a shape that broadcasts to \[2,4\], got \[2,3\]"),
        ([A[:1].copy(), B, A[:, :4].copy()], {}, r"expected C of a shape that broadcasts to \[1,4\], got \[2,4\]"),
        ([A, B, np.zeros((1, 2, 4), np.float32)], {}, r"expected C of a shape that broadcasts to \[2,4\], got"),
        ([A[None], B], {}, r"input 0 \(A\): expected shape \[\?,\?\], got \[1,2,8\]"),
    ],
)
def test_gemm_of_shapes_that_do_not_fit_is_refused(inputs: list[Any], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("Gemm", inputs, domain="", **attributes)


def test_gemm_of_changing_sizes_is_computed_run_by_run() -> None:
    """A computed B may be unknown when the session is made."""
    node = Node("Gemm", [A, B], domain="", transB=1)
    for rows, k, columns in [(2, 3, 4), (5, 1, 7), (1, 0, 2)]:
        a, b = np.ones((rows, k), np.float32), np.ones((columns, k), np.float32)
        np.testing.assert_array_equal(node(a, b)[0], np.full((rows, columns), k))

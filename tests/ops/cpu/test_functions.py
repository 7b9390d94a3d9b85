# SPDX-License-Identifier: Apache-2.0
"""Functions of one number on every instruction set, against float64; of several tensors, against numpy."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from tests.ops.device import ISAS, one

Function = Callable[..., np.ndarray]
FUNCTIONS: dict[str, Function] = {
    "Cos": np.cos,
    "Erf": np.vectorize(math.erf, otypes=[np.float64]),
    "Exp": np.exp,
    "Log": np.log,
    "Reciprocal": np.reciprocal,
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Sin": np.sin,
    "Sqrt": np.sqrt,
    "Tanh": np.tanh,
}
# Up to here e^x is a normal number of float32.
LIMIT = {"Exp": 87.3, "Sigmoid": 87.3}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("op_type", FUNCTIONS)
def test_functions_are_within_4_roundings_of_float64(op_type: str, isa: str) -> None:
    rng = np.random.default_rng(0)
    # All exponents, and the range in which functions change, denser; sines of what other ones reduce to angles.
    x = np.ldexp(rng.uniform(1, 2, 20_000), rng.integers(-126, 127, 20_000))
    x = np.concatenate([x, rng.uniform(0, 10, 20_000), np.arange(1, 5_000) * np.pi / 2])
    x = np.concatenate([x, -x]).astype(np.float32)
    x = x[np.abs(x) <= LIMIT.get(op_type, np.inf)]
    found = one(op_type, [x], domain="", options={"cpu_isa": isa})
    with np.errstate(all="ignore"):
        expected = FUNCTIONS[op_type](x.astype(np.float64))
    # Some four roundings follow one another where the error is largest: erf near 1/2, tanh near 0.55; the largest over
    # a thirteenth of all numbers of float32 was 3.1. Results below the normal range have no such digits.
    normal = np.isnan(expected) | (np.abs(expected) >= np.finfo(np.float32).tiny)
    np.testing.assert_allclose(found[normal], expected[normal], rtol=4 * 2.0**-24)


@pytest.mark.parametrize("isa", ISAS)
def test_sine_of_large_numbers_equals_float64(isa: str) -> None:
    x = np.array([1 << 20, 3e9, -1e30, 3.4e38] * 5, np.float32)
    found = one("Sin", [x], domain="", options={"cpu_isa": isa})
    np.testing.assert_allclose(found, np.sin(x.astype(np.float64)), rtol=2 * 2.0**-24)


@pytest.mark.parametrize("condition", [(1,), (3, 1), (3, 9000), (9000,)], ids=str)
@pytest.mark.parametrize("shapes", [((3, 9000), (3, 9000)), ((9000,), (1,)), ((1,), (3, 1))], ids=str)
def test_choice_and_product_of_broadcast_tensors_equal_numpy(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], condition: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    chosen = rng.integers(0, 2, condition) == 1
    np.testing.assert_array_equal(one("Where", [chosen, x, y], domain=""), np.where(chosen, x, y))
    np.testing.assert_array_equal(one("Mul", [x, y], domain=""), x * y)
    np.testing.assert_array_equal(one("Sub", [y, x], domain=""), y - x)

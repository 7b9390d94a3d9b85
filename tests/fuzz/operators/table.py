# SPDX-License-Identifier: Apache-2.0
"""All operators, and those among them that an opset has."""

from collections.abc import Callable
from functools import cache

from tests.fuzz.graphs.builder import Builder
from tests.fuzz.operators import attention, elementwise, foreign, moves, products, quantised, reductions, states

FAMILIES = (elementwise, moves, reductions, products, quantised, attention, states, foreign)


@cache
def operators_of(opset: int) -> list[tuple[int, Callable[[Builder], None]]]:
    """Weights and functions of the operators that an opset has."""
    return [
        (weight, function) for family in FAMILIES for weight, _, first, function in family.OPERATORS if first <= opset
    ]

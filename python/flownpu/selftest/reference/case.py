# SPDX-License-Identifier: Apache-2.0
"""A case: a call of a design with its inputs and expected output; and the comparison of results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flownpu.selftest.reference.numbers import wide

if TYPE_CHECKING:
    from collections.abc import Callable

    from flownpu.aie.iron.compat import Program


@dataclass(frozen=True)
class Case:
    """A call of a design, its inputs, and the expected output.

    Attributes:
        program: makes the call's program.
        inputs: host buffers by name.
        output: the name of the output buffer.
        expected: float64, in any shape.
        tolerance: absolute tolerance of each element, derived from the arithmetic.
        select: picks from the output buffer, [elements], what is compared; None: all of it.
    """

    program: Callable[[], Program]
    inputs: dict[str, np.ndarray]
    output: str
    expected: np.ndarray
    tolerance: np.ndarray | float
    select: Callable[[np.ndarray], np.ndarray] | None = None


class Deviation(NamedTuple):
    """The errors of a comparison.

    Attributes:
        beyond: how many elements are beyond their tolerance.
        share: the largest error as a multiple of its tolerance; infinite if a number is not finite, or must be exact
            and is not.
        error: the largest absolute error.
        text: a sentence on the element with the largest share: where it is, what was expected, and what came.
    """

    beyond: int
    share: float
    error: float
    text: str


def compare(actual: np.ndarray, expected: np.ndarray, tolerance: Any) -> Deviation:
    """Compares every element with the expected one, within its tolerance.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"expected numbers of shape {expected.shape}, got {actual.shape}")
    error = np.abs(wide(actual) - expected)
    error = np.where(np.isfinite(error), error, np.inf)
    with np.errstate(over="ignore", invalid="ignore"):  # such shares become infinite below
        share = np.where(error == 0, 0, error / np.maximum(tolerance, 1e-300))
    share = np.where(np.isfinite(error) & (share < 1e290), share, np.inf)
    beyond = ~(error <= tolerance)
    worst = np.unravel_index(np.argmax(share), share.shape)
    place = tuple(int(index) for index in worst)
    text = (
        f"{np.count_nonzero(beyond)} of {error.size} elements are beyond their tolerance; at {place}: expected "
        f"{expected[worst]}, got {actual[worst]}, {share[worst]:.2f} x the tolerance"
    )
    return Deviation(int(np.count_nonzero(beyond)), float(share[worst]), float(error.max()), text)

# SPDX-License-Identifier: Apache-2.0
"""Least-squares fits of parameters to numbers, by the Gauss-Newton method."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["fit_least_squares"]

_Name = TypeVar("_Name")
_PASSES = 30  # the most passes
_PROBE = 1e-4  # relative step for a derivative
_LARGEST = 0.3  # largest relative change in a pass: far from the solution, errors are not linear in the parameters
_SMALL = 5e-4  # the fit ends with a smaller relative change: the next one would be about its square
# Singular values below this, relative to the largest, are taken for 0: no error depends on those parameters.
_TELLS_NOTHING = 1e-4


def fit_least_squares(
    errors: Callable[[Mapping[_Name, float]], Sequence[float]], start: Mapping[_Name, float]
) -> dict[_Name, float]:
    """The parameters with the least sum of squared errors; a parameter that no error depends on stays as it is.

    The fit is in the parameters' logarithms, so that all stay positive.
    """
    names, at = list(start), np.log(list(start.values()))

    def parameters(logarithms: np.ndarray) -> dict[_Name, float]:
        return dict(zip(names, np.exp(logarithms).tolist(), strict=True))

    for _ in range(_PASSES):
        now, *moved = (np.array(errors(parameters(at + step))) for step in [0, *_PROBE * np.eye(len(names))])
        slopes = (np.stack(moved, axis=1) - now[:, None]) / _PROBE
        step = np.linalg.lstsq(slopes, -now, rcond=_TELLS_NOTHING)[0]
        at = at + np.clip(step, -_LARGEST, _LARGEST)
        if np.abs(step).max() < _SMALL:
            break
    return parameters(at)

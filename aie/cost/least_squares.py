# SPDX-License-Identifier: Apache-2.0
"""Fits of parameters to numbers: Gauss and Newton's method."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["fit_least_squares"]

_Name = TypeVar("_Name")
_PASSES = 30  # at most
_PROBE = 1e-4  # relative step of a derivative
_LARGEST = 0.3  # relative change in a pass: from far away, errors are not linear in the parameters
_SMALL = 5e-4  # relative change with which it ends: the next one's is about its square
# Singular values that are taken for 0, relative to the largest: those of parameters that no error tells anything of.
_TELLS_NOTHING = 1e-4


def fit_least_squares(
    errors: Callable[[Mapping[_Name, float]], Sequence[float]], start: Mapping[_Name, float]
) -> dict[_Name, float]:
    """The parameters with which the sum of the errors' squares is least; one that they do not depend on stays.

    In the parameters' logarithms, so that all stay positive.
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

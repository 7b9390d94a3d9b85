# SPDX-License-Identifier: Apache-2.0
"""Fits the cost model's parameters to published tables, and says how far off it is of those it was not fitted to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flownpu.aie.cost.parameters import Values
    from flownpu.predict.published import Row

__all__ = ["fit"]

_STEPS = 30
_DIFFERENCE = 1e-4


def fit(names: Sequence[str], rows: Sequence[Row], predict: Callable[[Row, Values], float], values: Values) -> Values:
    """The values with which log(predicted / published) is least, in squares, over all rows.

    Gauss and Newton's method in the logarithms of the parameters, so that none becomes negative.
    """
    current = dict(values)

    def errors(at: Values) -> np.ndarray:
        return np.array([np.log(predict(row, at) / row.value) for row in rows])

    for _ in range(_STEPS):
        base = errors(current)
        slopes = np.stack(
            [(errors({**current, name: current[name] * np.exp(_DIFFERENCE)}) - base) / _DIFFERENCE for name in names], 1
        )
        step = np.clip(-np.linalg.lstsq(slopes, base, rcond=None)[0], -1, 1)
        for name, change in zip(names, step, strict=True):
            current[name] = float(current[name] * np.exp(change))
        if np.abs(step).max() < 1e-9:
            break
    return current

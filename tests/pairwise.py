# SPDX-License-Identifier: Apache-2.0
"""Fewer cases than a product of lists, in which a mistake that two values make together still shows."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of a value of each axis in which any two values of two axes meet.

    Greedy: there are a few more than the product of the two longest axes.
    """
    every = [tuple(enumerate(at)) for at in product(*(range(len(axis)) for axis in axes))]
    left = {pair for at in every for pair in combinations(at, 2)}
    chosen = []
    while left:
        chosen.append(max(every, key=lambda at: sum(pair in left for pair in combinations(at, 2))))
        left.difference_update(combinations(chosen[-1], 2))
    return [tuple(axes[axis][i] for axis, i in at) for at in chosen]

# SPDX-License-Identifier: Apache-2.0
"""Texts in batches: sorted by length, so that little is computed for padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["batches", "padded"]

MOST_TOKENS = 2048
"""Tokens of a batch, padding included. Products read their weights once for some hundred rows, so that more gain
nothing; and what lies between two steps, up to 4 D floats a token, stays near the cores' caches."""
MOST_PADDING = 1 / 8
"""The part of a batch that may be padding: reading the weights again, for a batch of its own, costs a few texts as much
as some tens of rows."""


def batches(lengths: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    """Indices of texts that are computed together, the longest first; `lengths` are the texts' tokens."""
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    start = 0
    while start < len(order):
        longest, tokens, stop = lengths[order[start]], 0, start
        while stop < len(order):
            rows, tokens = stop + 1 - start, tokens + lengths[order[stop]]
            if rows > 1 and (rows * longest > MOST_TOKENS or tokens < (1 - MOST_PADDING) * rows * longest):
                break
            stop += 1
        yield order[start:stop]
        start = stop


def padded(rows: Sequence[Sequence[int]], fill: int) -> NDArray[np.int64]:
    """Rows of tokens as int64 [rows, longest], filled up on the right."""
    array = np.full((len(rows), max(map(len, rows))), fill, np.int64)
    for place, row in zip(array, rows, strict=True):
        place[: len(row)] = row
    return array

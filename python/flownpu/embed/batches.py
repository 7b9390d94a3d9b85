# SPDX-License-Identifier: Apache-2.0
"""Puts texts of similar length into batches, so that little padding is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

MOST_TOKENS = 2048
"""Most tokens of a batch, padding included, unless one text alone has more. A matrix product reads its weights once for
some hundred rows, so that larger batches gain nothing; and the values between two steps, up to 4 D floats a token (D:
the hidden size), stay near the cores' caches."""
MOST_PADDING = 1 / 8
"""The part of a batch that may be padding. Beyond it a new batch begins, although that reads all weights once more,
which takes as long as computing some tens of rows."""


def batches(lengths: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    """Yields the indices of the texts of each batch, the longest texts first; `lengths` are the texts' token counts."""
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
    """Rows of tokens as int64 [rows, longest], padded with `fill` on the right."""
    array = np.full((len(rows), max(map(len, rows))), fill, np.int64)
    for place, row in zip(array, rows, strict=True):
        place[: len(row)] = row
    return array

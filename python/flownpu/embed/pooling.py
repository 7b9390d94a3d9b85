# SPDX-License-Identifier: Apache-2.0
"""Poolings: from hidden states, float32 [N, S, D], to a vector per row, [N, D].

Rows are padded on the right: row i has `lengths[i]` tokens (int64 [N]), which are at least 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float32]
    Lengths: TypeAlias = NDArray[np.int64]


def _rows(reduce: Callable[[Floats], Floats]) -> Callable[[Floats, Lengths], Floats]:
    """A pooling that reduces each row's own tokens [t, D] to [D]. Padding is left out, so it may even hold NaN."""

    def pool(hidden: Floats, lengths: Lengths) -> Floats:
        return np.stack([reduce(row[:length]) for row, length in zip(hidden, lengths, strict=True)])

    return pool


def _weighted_mean(tokens: Floats) -> Floats:
    """The n-th token counts n times (Muennighoff, "SGPT: GPT Sentence Embeddings for Semantic Search", 2022)."""
    weights = np.arange(1, len(tokens) + 1, dtype=np.float32)
    mean: Floats = weights @ tokens / weights.sum()
    return mean


POOLINGS: Mapping[str, Callable[[Floats, Lengths], Floats]] = {
    "cls": lambda hidden, _: hidden[:, 0],
    "lasttoken": lambda hidden, lengths: hidden[np.arange(len(hidden)), lengths - 1],
    "mean": _rows(lambda tokens: tokens.mean(axis=0)),
    "max": _rows(lambda tokens: tokens.max(axis=0)),
    "mean_sqrt_len_tokens": _rows(lambda tokens: tokens.sum(axis=0) / np.float32(len(tokens) ** 0.5)),
    "weightedmean": _rows(_weighted_mean),
}
"""Poolings by their names in sentence-transformers."""

# SPDX-License-Identifier: Apache-2.0
"""Poolings: hidden states float32 [N, S, D] of rows with `lengths` int64 [N] tokens, padded on the right, as [N, D]."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float32]
    Lengths: TypeAlias = NDArray[np.int64]

__all__ = ["POOLINGS"]


def _rows(reduce: Callable[[Floats], Floats]) -> Callable[[Floats, Lengths], Floats]:
    """A pooling of each row's tokens [t, D] by itself: what padding holds is not even multiplied by 0."""

    def pool(hidden: Floats, lengths: Lengths) -> Floats:
        return np.stack([reduce(row[:length]) for row, length in zip(hidden, lengths, strict=True)])

    return pool


def _weighted_mean(tokens: Floats) -> Floats:
    """Muennighoff, "SGPT: GPT Sentence Embeddings for Semantic Search", 2022: the n-th token counts n times."""
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
"""By the names that sentence-transformers has for them."""

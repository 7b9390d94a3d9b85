# SPDX-License-Identifier: Apache-2.0
"""Scores of pairs of texts: how well a document answers a query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flownpu.embed.session import TextSession
from flownpu.errors import FlowNPUError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Reranker", "Scores"]


@dataclass(frozen=True)
class Scores:
    """The scores of documents, in their order."""

    logits: NDArray[np.float32]
    """[documents]: what the model says, the higher the better."""
    tokens: list[int]
    """The tokens of each pair, as far as they were computed."""
    cut: list[int]
    """The pairs that were longer than the model takes."""

    @property
    def scores(self) -> NDArray[np.float32]:
        """Between 0 and 1: 1 / (1 + e^-logit)."""
        # By tanh, which overflows nowhere.
        return ((1 + np.tanh(self.logits / 2)) / 2).astype(np.float32)


class Reranker:
    """A folder that `flownpu convert` made of a model that classifies pairs of texts with one label (a cross-encoder).

    Args, errors: as `EmbeddingModel`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        provider: str = "flownpu",
        options: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> None:
        self.folder = folder
        self._session = TextSession(folder, ["logits"], provider=provider, options=options, threads=threads)
        self.placement = self._session.placement
        self.load_seconds = self._session.load_seconds
        self.longest = self._session.tokenizer.longest

    def score(self, query: str, documents: Sequence[str], *, advance: Callable[[int], None] = lambda _: None) -> Scores:
        """Scores each document's answer to the query.

        Args:
            query: the first text of each pair.
            documents: the second ones.
            advance: hears how many more documents are done.

        Raises:
            FlowNPUError: a text is no UTF-8, or the model has several labels.
        """
        rows = self._session.tokenizer.rows([(query, document) for document in documents])
        logits = np.empty(len(rows), np.float32)
        for indices, output, _ in self._session.run(rows, advance):
            if output.shape != (len(indices), 1):
                raise FlowNPUError(
                    f"{self.folder}: expected a model with one label, whose logits are [{len(indices)}, 1], got "
                    f"{list(output.shape)}"
                )
            logits[indices] = output[:, 0]
        cut = [index for index, row in enumerate(rows) if row.is_cut]
        return Scores(logits, [len(row.ids) for row in rows], cut)

# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flownpu.embed.pipeline import normalised, read_pipeline
from flownpu.embed.session import TextModel, cut_rows
from flownpu.errors import FlowNPUError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["EmbeddingModel", "Embeddings"]


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of texts, in the texts' order."""

    vectors: NDArray[np.float32]
    """[texts, dimensions]."""
    tokens: list[int]
    """The tokens of each text, prompt and special tokens included, as far as they were computed."""
    cut: list[int]
    """The texts that were longer than the model takes: their embeddings are of their beginnings."""


class EmbeddingModel(TextModel):
    """A model of sentence-transformers: the folder also holds modules.json and what that names.

    Raises:
        FlowNPUError, RuntimeError: as `TextModel` and `read_pipeline`.
    """

    outputs = ("last_hidden_state", "token_embeddings")

    def prepare(self) -> None:
        """Reads what follows the graph."""
        self.pipeline = read_pipeline(self.folder)

    def embed(
        self,
        texts: Sequence[str],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> Embeddings:
        """Embeds texts, in batches of similar length.

        Args:
            texts: any number of them.
            prompt_name: which of the model's prompts goes before each text, such as "query"; None: its default.
            dimensions: the first so many of each embedding, scaled to length 1 where the model's have that: for models
                that were trained for it (Kusupati et al., "Matryoshka Representation Learning", 2022). None: all.
            advance: hears how many more texts are done.

        Raises:
            FlowNPUError: there is no such prompt, a text has no token, or there are not so many dimensions.
        """
        prompt = self.pipeline.prompt(prompt_name)
        rows = self.session.tokenizer.rows([prompt + text for text in texts])
        vectors: NDArray[np.float32] | None = None
        for indices, hidden, lengths in self.session.run(rows, advance):
            batch = self.pipeline.embeddings(hidden, lengths)
            if vectors is None:
                vectors = np.empty((len(rows), self._kept(batch.shape[1], dimensions)), np.float32)
            vectors[indices] = batch[:, : vectors.shape[1]]
        if vectors is None:
            vectors = np.empty((0, dimensions or 0), np.float32)
        if dimensions is not None and self.pipeline.normalises:
            vectors = normalised(vectors)
        return Embeddings(vectors, [len(row.ids) for row in rows], cut_rows(rows))

    def _kept(self, size: int, dimensions: int | None) -> int:
        if dimensions is not None and not 1 <= dimensions <= size:
            raise FlowNPUError(f"{self.folder}: expected 1 to {size} dimensions, got {dimensions}")
        return dimensions or size

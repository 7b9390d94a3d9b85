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


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of texts, in the texts' order."""

    vectors: NDArray[np.float32]
    """[texts, dimensions]."""
    tokens: list[int]
    """How many tokens of each text were computed, prompt and special tokens included."""
    cut: list[int]
    """Indices of the texts that were longer than the model takes: only their beginnings are embedded."""


class EmbeddingModel(TextModel):
    """A model of sentence-transformers: its folder also holds modules.json and the files that it names.

    Takes the arguments of `TextModel`.

    Raises:
        FlowNPUError, RuntimeError: as `TextModel` and `read_pipeline`.
    """

    outputs = ("last_hidden_state", "token_embeddings")

    def prepare(self) -> None:
        """Reads the pooling and the other steps that follow the graph."""
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
            texts: any number of texts.
            prompt_name: the name of the model's prompt that is put before each text, such as "query"; None: the model's
                default prompt, if it has one.
            dimensions: how many of each embedding's first dimensions to keep, for models that were trained for it
                (Kusupati et al., "Matryoshka Representation Learning", 2022); what is kept is scaled to length 1 again
                if the model's embeddings have that length. None: all.
            advance: called after each batch with the number of its texts.

        Raises:
            FlowNPUError: there is no such prompt, a text has no token or is not UTF-8, or the embeddings have fewer
                dimensions.
        """
        prompt = self.pipeline.prompt(prompt_name)
        rows = self.tokenizer.rows([prompt + text for text in texts])
        vectors: NDArray[np.float32] | None = None
        for indices, hidden, lengths in self.run(rows, advance):
            batch = self.pipeline.embeddings(hidden, lengths)
            if vectors is None:
                vectors = np.empty((len(rows), self._kept(batch.shape[1], dimensions)), np.float32)
            vectors[indices] = batch[:, : vectors.shape[1]]
        if vectors is None:
            vectors = np.empty((0, 0), np.float32)
        if dimensions is not None and self.pipeline.normalises:
            vectors = normalised(vectors)
        return Embeddings(vectors, [len(row.ids) for row in rows], cut_rows(rows))

    def _kept(self, size: int, dimensions: int | None) -> int:
        if dimensions is not None and not 1 <= dimensions <= size:
            raise FlowNPUError(f"{self.folder}: expected 1 to {size} dimensions, got {dimensions}")
        return dimensions or size

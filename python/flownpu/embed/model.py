# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flownpu.embed.pipeline import normalised, read_pipeline
from flownpu.embed.session import TextSession
from flownpu.errors import FlowNPUError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

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


class EmbeddingModel:
    """A folder that `flownpu convert` made of a model of sentence-transformers.

    Args:
        folder: holds model.onnx, tokenizer.json, modules.json and what that names.
        provider: "flownpu", or "cpu" for ONNX Runtime's own CPU provider.
        options: options of FlowNPU's provider by key, such as {"device": "cpu"}.
        threads: threads of the CPU kernels; None leaves the number to the provider.

    Raises:
        FlowNPUError, RuntimeError: as `TextSession` and `read_pipeline`.
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
        self.pipeline = read_pipeline(folder)
        outputs = ("last_hidden_state", "token_embeddings")
        self._session = TextSession(folder, outputs, provider=provider, options=options, threads=threads)
        self.placement = self._session.placement
        self.load_seconds = self._session.load_seconds
        self.longest = self._session.tokenizer.longest

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
        rows = self._session.tokenizer.rows([prompt + text for text in texts])
        vectors: NDArray[np.float32] | None = None
        for indices, hidden, lengths in self._session.run(rows, advance):
            batch = self.pipeline.embeddings(hidden, lengths)
            if vectors is None:
                vectors = np.empty((len(rows), self._kept(batch.shape[1], dimensions)), np.float32)
            vectors[indices] = batch[:, : vectors.shape[1]]
        if vectors is None:
            vectors = np.empty((0, dimensions or 0), np.float32)
        if dimensions is not None and self.pipeline.normalises:
            vectors = normalised(vectors)
        cut = [index for index, row in enumerate(rows) if row.is_cut]
        return Embeddings(vectors, [len(row.ids) for row in rows], cut)

    def _kept(self, size: int, dimensions: int | None) -> int:
        if dimensions is not None and not 1 <= dimensions <= size:
            raise FlowNPUError(f"{self.folder}: expected 1 to {size} dimensions, got {dimensions}")
        return dimensions or size

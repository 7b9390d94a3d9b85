# SPDX-License-Identifier: Apache-2.0
"""Models that embed texts, and those that score documents."""

from typing import TYPE_CHECKING, Any

from flownpu.errors import FlowNPUError, require
from flownpu.serve.errors import invalid, too_long
from flownpu.serve.in_process import InProcess

if TYPE_CHECKING:
    from flownpu.embed import EmbeddingModel, Embeddings, Reranker, Scores

MOST_TEXTS = 2048
"""Texts in one request; the limit of OpenAI's API."""
CHARACTERS = 64
"""Characters of a text, for each token that the model takes, that are cut into tokens, of 100 bytes or more.
Languages have one to six a token; a longer text is refused, or cut as one of too many tokens is."""


def _beginnings(texts: list[str], longest: int) -> list[str]:
    return [text[: CHARACTERS * longest] for text in texts]


class Embedder(InProcess["EmbeddingModel"]):
    """One model."""

    def open(self, **settings: Any) -> "EmbeddingModel":
        """Opens the model."""
        model: EmbeddingModel = require("flownpu.embed", extra="embed", purpose="Embeddings").EmbeddingModel(**settings)
        return model

    async def embed(self, texts: list[str], *, dimensions: int | None = None, truncate: bool = False) -> "Embeddings":
        """Embeds texts.

        Args:
            texts: the texts of one request.
            dimensions: see `EmbeddingModel.embed`.
            truncate: whether texts that are too long are cut, rather than refused.

        Raises:
            ApiError: there are too many texts, a text is too long, `EmbeddingModel.embed` refuses an argument, or see
                `compute`.
        """
        if len(texts) > MOST_TEXTS:
            raise invalid(f"expected {MOST_TEXTS} texts at most, got {len(texts)}", "input")
        longest = (await self.load()).longest
        given = _beginnings(texts, longest)
        cut = [index for index, text in enumerate(texts) if len(text) > len(given[index])]
        if not cut or truncate:
            try:
                found = await self.compute(
                    lambda model, check: model.embed(given, dimensions=dimensions, advance=check)
                )
            except FlowNPUError as error:
                raise invalid(str(error), "input") from error
            cut = cut or found.cut
        if cut and not truncate:
            raise too_long(
                f"input.{cut[0]} is longer than the {longest} tokens that the model takes: shorten it", "input"
            )
        return found


class Ranker(InProcess["Reranker"]):
    """One model that scores how well documents answer a query."""

    def open(self, **settings: Any) -> "Reranker":
        """Opens the model."""
        model: Reranker = require("flownpu.embed", extra="embed", purpose="Scores").open_reranker(**settings)
        return model

    async def score(self, query: str, documents: list[str]) -> "Scores":
        """Scores documents; those that are too long are cut, as every server of such models does.

        Raises:
            ApiError: there are too many documents, `Reranker.score` refuses one, or see `compute`.
        """
        if len(documents) > MOST_TEXTS:
            raise invalid(f"expected {MOST_TEXTS} documents at most, got {len(documents)}", "documents")
        (query, *documents) = _beginnings([query, *documents], (await self.load()).longest)
        try:
            return await self.compute(lambda model, check: model.score(query, documents, advance=check))
        except FlowNPUError as error:
            raise invalid(str(error), "documents") from error

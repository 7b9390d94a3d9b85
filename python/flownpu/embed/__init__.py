# SPDX-License-Identifier: Apache-2.0
"""Embeds texts and scores pairs of texts, with model folders whose graph yields hidden states or a score."""

from flownpu.embed.model import EmbeddingModel, Embeddings
from flownpu.embed.reranker import GeneratingReranker, Reranker, Scores, open_reranker

__all__ = ["EmbeddingModel", "Embeddings", "GeneratingReranker", "Reranker", "Scores", "open_reranker"]

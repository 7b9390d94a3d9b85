# SPDX-License-Identifier: Apache-2.0
"""Texts as vectors, and scores of pairs of texts: model folders whose graph has hidden states or a score for output."""

from flownpu.embed.model import EmbeddingModel, Embeddings
from flownpu.embed.reranker import GeneratingReranker, Reranker, Scores, open_reranker

__all__ = ["EmbeddingModel", "Embeddings", "GeneratingReranker", "Reranker", "Scores", "open_reranker"]

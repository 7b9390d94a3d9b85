# SPDX-License-Identifier: Apache-2.0
"""Texts as vectors, and scores of pairs of texts: model folders whose graph has hidden states or a score for output."""

from flownpu.embed.model import EmbeddingModel, Embeddings
from flownpu.embed.reranker import Reranker, Scores

__all__ = ["EmbeddingModel", "Embeddings", "Reranker", "Scores"]

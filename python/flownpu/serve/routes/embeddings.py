# SPDX-License-Identifier: Apache-2.0
"""/v1/embeddings, /v1/rerank, and Ollama's /api/embed and /api/embeddings."""

import base64
import time
import uuid
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from flownpu.serve.embeddings import Embedder, Ranker
from flownpu.serve.requests.embeddings import EmbeddingsRequest, OllamaEmbed, OllamaEmbeddings, RerankRequest
from flownpu.serve.routes.json_route import JsonRoute
from flownpu.serve.service import Service
from flownpu.serve.streams import unless_gone

NANOSECONDS = 1e9


def embeddings_routes(service: Service) -> APIRouter:
    """The routes to a server's models that embed texts."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/embeddings")
    async def embeddings(request: EmbeddingsRequest, connection: Request) -> dict[str, Any]:
        embedder = service.of_kind(request.model, Embedder)
        found = await unless_gone(connection, embedder.embed(request.texts(), dimensions=request.dimensions))
        tokens, packed = sum(found.tokens), request.encoding_format == "base64"
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _base64(vector) if packed else vector.tolist()}
                for index, vector in enumerate(found.vectors)
            ],
            "model": request.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    @router.post("/api/embed")
    async def embed(request: OllamaEmbed, connection: Request) -> dict[str, Any]:
        started = time.perf_counter()
        embedder = service.of_kind(request.model.removesuffix(":latest"), Embedder)
        await embedder.load()
        loaded = time.perf_counter()
        texts = request.texts()
        asked = embedder.embed(texts, dimensions=request.dimensions, truncate=request.truncate)
        found = await unless_gone(connection, asked)
        return {
            "model": request.model,
            "embeddings": found.vectors.tolist(),
            "total_duration": round(NANOSECONDS * (time.perf_counter() - started)),
            "load_duration": round(NANOSECONDS * (loaded - started)),
            "prompt_eval_count": sum(found.tokens),
        }

    @router.post("/api/embeddings")
    async def embedding(request: OllamaEmbeddings, connection: Request) -> dict[str, Any]:
        embedder = service.of_kind(request.model.removesuffix(":latest"), Embedder)
        found = await unless_gone(connection, embedder.embed([request.prompt], truncate=True))
        return {"embedding": found.vectors[0].tolist()}

    @router.post("/v1/rerank")
    async def rerank(request: RerankRequest, connection: Request) -> dict[str, Any]:
        ranker, texts = service.of_kind(request.model, Ranker), request.texts()
        found = await unless_gone(connection, ranker.score(request.query, texts))
        order = np.argsort(-found.logits, kind="stable").tolist()[: request.top_n]
        scores = found.scores.tolist()
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": request.model,
            "usage": {"total_tokens": sum(found.tokens)},
            "results": [
                {"index": index, "relevance_score": scores[index]}
                | ({"document": {"text": texts[index]}} if request.return_documents else {})
                for index in order
            ],
        }

    return router


def _base64(vector: np.ndarray[Any, Any]) -> str:
    """An embedding as base64 of little-endian float32, the form that OpenAI's client asks for."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()

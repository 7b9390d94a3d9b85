# SPDX-License-Identifier: Apache-2.0
"""Requests for embeddings, of OpenAI's API and of Ollama's, and for scores of documents."""

from typing import Annotated, Any, Literal

from pydantic import Field

from flownpu.serve.requests.openai import Items, Strict

# In a long list, the first wrong item is enough for the message.
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]


class EmbeddingsRequest(Strict):
    """OpenAI's /v1/embeddings. Tokens instead of texts are refused, because they would be another tokenizer's."""

    model: str
    input: str | Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None

    def texts(self) -> list[str]:
        """The texts to embed."""
        return [self.input] if isinstance(self.input, str) else self.input


class OllamaEmbed(Strict):
    """Ollama's /api/embed."""

    model: str
    input: str | Items[str]
    truncate: bool = True
    """Whether texts that are too long are cut; else they are refused."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    # The following fields change no embedding.
    keep_alive: str | int | None = None
    options: dict[str, Any] | None = None

    def texts(self) -> list[str]:
        """The texts to embed."""
        return [self.input] if isinstance(self.input, str) else self.input


class OllamaEmbeddings(Strict):
    """Ollama's /api/embeddings, which takes one text."""

    model: str
    prompt: str
    # The following fields change no embedding.
    keep_alive: str | int | None = None
    options: dict[str, Any] | None = None


class DocumentText(Strict):
    """A document as an object."""

    text: str


class RerankRequest(Strict):
    """/v1/rerank, as Jina's, Cohere's and vLLM's servers have it."""

    model: str
    query: str
    documents: Annotated[list[str | DocumentText], Field(min_length=1, fail_fast=True)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    """How many of the best are returned; None: all."""
    return_documents: bool = False

    def texts(self) -> list[str]:
        """The documents' texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]

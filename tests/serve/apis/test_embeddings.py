# SPDX-License-Identifier: Apache-2.0
"""A server with a model that embeds texts, asked by OpenAI's client and Ollama's."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import ollama
import openai
import pytest

from flownpu.convert import convert
from flownpu.embed import EmbeddingModel, Reranker
from tests.embed.checkpoints import SENTENCES, make_checkpoint
from tests.serve.conftest import Server

OPTIONS = ("--device", "cpu", "--activations", "bf16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embeds")
    convert(make_checkpoint("bert-mean", root / "checkpoint"), root / "embeds")
    return root / "embeds"


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scores")
    convert(make_checkpoint("bert-score", root / "checkpoint"), root / "scores")
    return root / "scores"


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], folder: Path, topics: Path, scores: Path) -> Server:
    return start_server(folder, topics, scores, *OPTIONS)


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    return EmbeddingModel(folder, options={"device": "cpu", "activations": "bf16"}).embed(SENTENCES).vectors


def test_openai_client_gets_embeddings(server: Server, expected: np.ndarray) -> None:
    client = server.openai()
    # The client asks for base64 unless it is told otherwise.
    found = client.embeddings.create(model="embeds", input=SENTENCES)
    np.testing.assert_array_equal(np.array([one.embedding for one in found.data], np.float32), expected)
    assert [one.index for one in found.data] == list(range(len(SENTENCES)))
    assert found.usage.prompt_tokens == found.usage.total_tokens > len(SENTENCES)
    one = client.embeddings.create(model="embeds", input=SENTENCES[0], encoding_format="float", dimensions=8)
    kept = expected[0, :8] / np.linalg.norm(expected[0, :8])
    np.testing.assert_allclose(one.data[0].embedding, kept, rtol=0, atol=1e-2)
    assert [model.id for model in client.models.list()] == ["embeds", "topics", "scores"]


def test_ollama_client_gets_embeddings(server: Server, expected: np.ndarray) -> None:
    client = ollama.Client(host=server.address)
    found = client.embed(model="embeds:latest", input=SENTENCES)
    np.testing.assert_allclose(np.array(found.embeddings), expected, rtol=0, atol=1e-6)
    assert client.show("embeds").capabilities == ["embedding"]
    assert {model.model for model in client.list().models} == {"embeds", "topics", "scores"}
    one = client.embeddings(model="embeds", prompt=SENTENCES[1]).embedding  # the route before /api/embed
    np.testing.assert_allclose(np.array(one), expected[1], rtol=0, atol=1e-6)
    with pytest.raises(ollama.ResponseError, match=r"input\.1 is longer than the 64 tokens that the model takes"):
        client.embed(model="embeds", input=["x", "word " * 200], truncate=False)
    assert len(client.embed(model="embeds", input=["x", "word " * 200]).embeddings) == 2


def test_rerank_gives_scores_of_model(server: Server, scores: Path) -> None:
    query, *documents = SENTENCES
    expected = Reranker(scores, options={"device": "cpu", "activations": "bf16"}).score(query, documents).scores
    body = {"model": "scores", "query": query, "documents": [*documents[:1], {"text": documents[1]}, *documents[2:]]}
    found = server.http().post("/v1/rerank", json=body | {"top_n": 2, "return_documents": True}).json()["results"]
    best = np.argsort(-expected, kind="stable")[:2]
    assert [one["index"] for one in found] == best.tolist()
    assert [one["document"]["text"] for one in found] == [documents[index] for index in best]
    # The same kernels on the same rows; JSON has float32's digits.
    np.testing.assert_allclose([one["relevance_score"] for one in found], expected[best], rtol=1e-6)
    assert len(server.http().post("/v1/rerank", json=body).json()["results"]) == len(documents)
    refused = server.http().post("/v1/rerank", json=body | {"model": "embeds"}).json()["error"]
    assert refused["message"].startswith("the model embeds embeds texts: ask /v1/embeddings")


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        (
            "topics",
            {"input": "x"},
            "the model topics generates texts: ask /v1/chat/completions. Of models that embed texts there is .*embeds",
        ),
        ("none", {"input": "x"}, "no model 'none' here; there is embeds, topics, scores"),
        ("embeds", {"input": []}, "input"),
        ("embeds", {"input": "x", "dimensions": 97}, "expected 1 to 96 dimensions, got 97"),
        ("embeds", {"input": ["x"] * 2049}, "expected 2048 texts at most, got 2049"),
    ],
)
def test_unfit_embedding_request_is_refused(model: str, fields: dict[str, object], reason: str, server: Server) -> None:
    with pytest.raises(openai.APIStatusError, match=reason):
        server.openai().embeddings.create(model=model, **fields)


def test_text_too_long_is_refused_like_openai(server: Server) -> None:
    """An embedding of only a text's beginning would not be the one that the client asked for."""
    with pytest.raises(openai.BadRequestError, match=r"input\.1 is longer than the 64 tokens") as refused:
        server.openai().embeddings.create(model="embeds", input=["x", "word " * 200])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


def test_text_of_megabytes_takes_little_memory(server: Server) -> None:
    """Its tokens would take a gigabyte; what is far behind the last token that counts is not cut into tokens."""

    def peak() -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    client = ollama.Client(host=server.address)
    client.embed("embeds", "x")
    server.http().post("/v1/rerank", json={"model": "scores", "query": "a", "documents": ["b"]})
    before = peak()
    few, many = "word " * 200, "word " * 5_000_000
    vectors = [client.embed("embeds", text).embeddings for text in (few, many)]
    np.testing.assert_array_equal(*map(np.array, vectors))
    scores = [
        server.http().post("/v1/rerank", json={"model": "scores", "query": "a", "documents": [text]}).json()["results"]
        for text in (few, many)
    ]
    assert scores[0] == scores[1]
    with pytest.raises(openai.BadRequestError, match=r"input\.0 is longer than the 64 tokens"):
        server.openai().embeddings.create(model="embeds", input=many)
    assert peak() - before < 400 * 2**20  # the body, its text and its parts; with all tokens 1.1 GB


def test_embedding_model_does_not_chat(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="the model embeds embeds texts: ask /v1/embeddings"):
        server.openai().chat.completions.create(model="embeds", messages=[{"role": "user", "content": "x"}])
    assert server.http().get("/health").json()["models"]["embeds"] is True

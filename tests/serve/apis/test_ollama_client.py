# SPDX-License-Identifier: Apache-2.0
"""Ollama's client pulls, lists, unloads and deletes models; a server whose clients may do it, and a hub on loopback."""

import ollama
import pytest

from tests.hub.conftest import hub as hub  # noqa: PLC0414 a fixture
from tests.serve.conftest import serve

QUESTION = [{"role": "user", "content": "Tell me about loops."}]


@pytest.fixture
def server(hub, topics):  # noqa: ARG001 the hub's address is in the environment
    started = serve(f"given={topics}", "--allow-pull", "--alias", "*=given", "--alias", "short=given")
    yield started
    started.end()


def test_model_is_pulled_asked_unloaded_and_deleted(server):
    client = ollama.Client(host=server.address)
    told = list(client.pull("someone/topics", stream=True))
    assert told[-1].status == "success"
    assert any(one.total and one.completed == one.total for one in told)
    assert [model.model for model in client.list().models] == ["given", "someone/topics", "short"]
    answer = client.chat(model="someone/topics", messages=QUESTION, options={"num_predict": 4}, keep_alive=0)
    assert answer.eval_count == 4
    assert [model.model for model in client.ps().models] == ["given"]
    # Other names are aliases, and an answer is of the model that was asked for.
    options = {"num_predict": 8, "temperature": 0}
    texts = {
        name: "".join(part.message.content for part in client.chat(name, QUESTION, options=options, stream=True))
        for name in ("given", "short", "gpt-4o", "someone/topics")
    }
    assert len(set(texts.values())) == 1
    assert client.delete("someone/topics").status == "success"
    assert [model.model for model in client.list().models] == ["given", "short"]
    with pytest.raises(ollama.ResponseError, match="was not pulled"):
        client.delete("given")


def test_faults_of_pull_are_told(server):
    client = ollama.Client(host=server.address)
    for name, reason in (("someone/other", "someone/other"), ("no name", "expected a short name")):
        with pytest.raises(ollama.ResponseError, match=reason):
            client.pull(name)
        with pytest.raises(ollama.ResponseError, match=reason):
            list(client.pull(name, stream=True))
    with pytest.raises(ollama.ResponseError, match="makes no model 'mine' of a Modelfile"):
        client.create("mine", from_="given", parameters={"temperature": 0})


def test_model_is_loaded_and_unloaded_by_request(server_of_three):
    client = ollama.Client(host=server_of_three.address)
    http = server_of_three.http()
    for keep_alive, done, loaded in ((0, "unload", False), (None, "load", True), ("0s", "unload", False)):
        for ask in (client.generate, client.chat):
            assert ask(model="topics", keep_alive=keep_alive).done_reason == done
            assert http.get("/health").json()["models"]["topics"] == loaded
    assert http.head("/").status_code == 200


def test_server_refuses_pulls_unless_it_was_told(server_of_three):
    client = ollama.Client(host=server_of_three.address)
    for ask in (client.pull, client.delete):
        with pytest.raises(ollama.ResponseError, match="start `flownpu serve` with --allow-pull"):
            ask("someone/topics")

# SPDX-License-Identifier: Apache-2.0
"""Ollama's client pulls, lists, unloads and deletes models; a server whose clients may do it, and a hub on loopback."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ollama
import pytest

from flownpu.cli import main
from flownpu.serve.routes.pulling import MOST
from tests.hub.conftest import hub as hub  # noqa: PLC0414 a fixture
from tests.serve.conftest import serve

FIXTURES = Path(__file__).parents[2] / "fixtures"
QUESTION = [{"role": "user", "content": "Tell me about loops."}]


@pytest.fixture
def checkpoint():
    """That of `topics`: a test compares the texts of both."""
    return FIXTURES / "gemma3-topics"


@pytest.fixture
def server(hub, topics):  # noqa: ARG001 the hub's address is in the environment
    aliases = ("--alias", "*=given", "--alias", "short=given")
    started = serve(f"given={topics}", "--allow-pull", *aliases, "--stopping-seconds", 3)
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


def test_clients_that_pull_at_once_share_pull_and_leave_server_free(server, hub):
    """Pulls wait for a hub that stands still; the event loop lends fewer threads than there are clients."""
    hub.repositories |= {f"someone/other-{number}": hub.repositories["someone/topics"] for number in range(MOST)}
    hub.hold = threading.Event()
    client = ollama.Client(host=server.address)
    with ThreadPoolExecutor(60) as threads:
        same = [threads.submit(client.pull, "someone/topics") for _ in range(50)]
        assert hub.held.wait(60)
        others = [threads.submit(client.pull, f"someone/other-{number}") for number in range(MOST)]
        assert client.chat("given", QUESTION, options={"num_predict": 2}).eval_count == 2
        hub.hold.set()
        hub.hold = None
        assert {one.result(120).status for one in same} == {"success"}
        assert sum(one.exception(120) is None for one in others) == MOST - 1
    asked = [path for method, path, _ in hub.asked if method == "GET" and path.endswith("topics/model.safetensors")]
    assert len(asked) <= 2  # the file, and where it is kept


def test_model_of_two_names_is_deleted_under_both(server):
    client = ollama.Client(host=server.address)
    for name in ("someone/topics", "hf.co/someone/topics"):
        assert client.pull(name).status == "success"
    client.delete("hf.co/someone/topics")
    assert [model.model for model in client.list().models] == ["given", "short"]


def test_model_that_command_removed_is_no_longer_there(server):
    client, http = ollama.Client(host=server.address), server.http()
    client.pull("someone/topics")
    assert client.generate("someone/topics").done_reason == "load"
    assert main(["remove", "someone/topics"]) == 0
    assert [model.model for model in client.list().models] == ["given", "short"]
    assert [model.model for model in client.ps().models] == ["given"]
    assert http.get("/v1/models/someone/topics").status_code == 404
    with pytest.raises(ollama.ResponseError, match="no model 'someone/topics' here"):
        client.show("someone/topics")


def test_server_ends_while_it_pulls(server, hub):
    hub.hold = threading.Event()
    with ThreadPoolExecutor() as threads:
        pulling = threads.submit(ollama.Client(host=server.address).pull, "someone/topics")
        assert hub.held.wait(60)
        started = time.monotonic()
        pulling.cancel()
        assert server.end() == 0
        assert time.monotonic() - started < 40  # --stopping-seconds is 3, and the hub holds it for 60
        hub.hold.set()


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

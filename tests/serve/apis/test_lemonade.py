# SPDX-License-Identifier: Apache-2.0
"""A server as an engine of Lemonade: it is started, asked and ended as Lemonade's C++ does it.

Sources: lemonade-sdk/lemonade at e385039e (August 2026): src/cpp/server/wrapped_server.cpp, streaming_proxy.cpp,
utils/platform/process_linux.cpp, and the engines llama-server, vLLM and RyzenAI in src/cpp/server/backends. The command
and the waiting times are those of docs/use/service.md.
"""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from flownpu.convert import convert
from tests.embed.checkpoints import make_checkpoint
from tests.serve.conftest import COMMAND

PAGE = (Path(__file__).parents[3] / "docs" / "use" / "service.md").read_text()
NAME = "user.Topics-FlowNPU"  # Lemonade's name of a model, which requests have
MESSAGES = [{"role": "user", "content": "Tell me about loops."}]
POLL, READY = 0.1, 600  # seconds: WrappedServer::wait_for_ready
PATIENCE = 60  # seconds from SIGTERM to SIGKILL; LinuxProcessPlatform::terminate waits 5, on a machine that is not busy


class Engine:
    """Lemonade's WrappedServer, as far as it meets a server."""

    def __init__(self, folder, context=1024):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        line = re.search(r"^    (flownpu serve NAME=.*)$", PAGE, re.MULTILINE)[1]
        filled = {"NAME=FOLDER": f"{NAME}={folder}", "PORT": str(self.port), "CTX_SIZE": str(context)}
        arguments = [filled.get(word, word) for word in shlex.split(line)[1:] if word != "npu"]
        arguments.remove("--device")
        self.process = subprocess.Popen([sys.executable, "-c", COMMAND, *arguments])
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)
        end = time.monotonic() + READY
        while not self.reachable(1):
            assert self.process.poll() is None, "the process has terminated"
            assert time.monotonic() < end
            time.sleep(POLL)

    def reachable(self, seconds):
        """HttpClient::is_reachable, of loading and of the watchdog."""
        try:
            return self.http.get("/health", timeout=seconds).status_code == 200
        except httpx.HTTPError:
            return False

    def ask(self, path, **fields):
        """WrappedServer::forward_request: the answer, or the error's message, type and code."""
        request = {"model": NAME, **fields}
        if "max_completion_tokens" in request:  # JsonUtils::add_legacy_max_tokens_alias
            request["max_tokens"] = request["max_completion_tokens"]
        response = self.http.post(path, json=request)
        return response.json() if response.status_code == 200 else {"status": response.status_code, **response.json()}

    def stream(self, path, **fields):
        """StreamingProxy::forward_sse_stream, with the options that the vLLM engine adds: bytes, then telemetry."""
        request = {"model": NAME, "stream": True, "stream_options": {"include_usage": True}, **fields}
        telemetry, done = {}, False
        with self.http.stream("POST", path, json=request) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith("data: ") and line != "data: [DONE]":
                    telemetry |= json.loads(line.removeprefix("data: ")).get("usage") or {}
        return telemetry, done

    def unload(self):
        """ProcessManager::stop_process; returns whether the process ended without being killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        return True


@pytest.fixture(scope="module")
def engine(topics):
    started = Engine(topics)
    yield started
    started.process.kill()
    started.process.wait()


def test_chats_completions_and_responses_are_answered(engine):
    chat = engine.ask("/v1/chat/completions", messages=MESSAGES, max_completion_tokens=4, temperature=0)
    assert (chat["model"], chat["usage"]["completion_tokens"]) == (NAME, 4)
    text = engine.ask("/v1/completions", prompt="The loop", max_tokens=2, echo=True, logprobs=1)["choices"][0]
    assert text["text"].startswith("The loop")
    assert len(text["logprobs"]["tokens"]) > 2
    told = engine.ask("/v1/responses", input="Tell me about loops.", max_output_tokens=4, temperature=0)
    assert told["usage"]["output_tokens"] == 4
    assert [one["id"] for one in engine.http.get("/v1/models").json()["data"]] == [NAME]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_stream_has_tokens_for_telemetry_and_end(engine, path):
    asked = {"messages": MESSAGES} if "chat" in path else {"prompt": 'The "for" statement is used to'}
    telemetry, done = engine.stream(path, max_tokens=5, temperature=0, **asked)
    assert telemetry["completion_tokens"] == 5
    assert telemetry["prompt_tokens"] > 0
    assert "cached_tokens" in telemetry["prompt_tokens_details"]
    assert done


def test_prompt_too_long_has_the_code_that_lemonade_hands_on(engine):
    error = engine.ask("/v1/chat/completions", messages=[{"role": "user", "content": "word " * 2000}])
    assert (error["status"], error["error"]["code"]) == (400, "context_length_exceeded")
    assert error["error"]["type"] == "invalid_request_error"


def test_watchdog_reaches_health_while_an_answer_is_written(engine):
    with engine.http.stream(
        "POST",
        "/v1/completions",
        json={"model": NAME, "prompt": "A", "max_tokens": 900, "stream": True},
    ) as response:
        next(response.iter_lines())
        assert Engine.reachable(engine, 30)  # of 2 s three times, on a machine with nothing else to do


def test_engine_ends_in_time_also_when_it_answers(topics):
    """And where it does not, its model's process ends with it."""
    for by_force in (False, True):
        engine = Engine(topics)
        children = psutil.Process(engine.process.pid).children(recursive=True)
        assert children
        with engine.http.stream(
            "POST", "/v1/completions", json={"model": NAME, "prompt": "A", "max_tokens": 900, "stream": True}
        ) as response:
            next(response.iter_lines())
            if by_force:
                engine.process.kill()
                engine.process.wait()
            else:
                assert engine.unload()
        _, alive = psutil.wait_procs(children, 30)
        assert not alive


def test_embeddings_and_scores_are_engines_of_their_own(tmp_path):
    for form, path, asked in (
        ("bert-mean", "/v1/embeddings", {"input": ["a", "b"]}),
        ("bert-score", "/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ):
        convert(make_checkpoint(form, tmp_path / f"{form}-checkpoint"), tmp_path / form)
        engine = Engine(tmp_path / form)
        answer = engine.ask(path, **asked)
        assert len(answer.get("data", answer.get("results"))) == 2, answer
        assert engine.unload()

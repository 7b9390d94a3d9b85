# SPDX-License-Identifier: Apache-2.0
"""Installed clients by others: nested tools, JSON of nested schemas, streams, and leaving one.

Each client's script runs once, with the packages of `python -m scripts.environments`, in the environment that
`scripts/environments.py` describes; OpenAI's, Ollama's and pydantic-ai's of Python are in the tests' own.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from scripts import environments
from tests.serve.conftest import Server

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TOKENS = 24

# No client may report its use, nor fetch prices, models or tokenizers.
SILENT = {
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OTEL_SDK_DISABLED": "true",
}

# The order that scenario.py and scenario.mjs describe, by hand.
ADDRESS = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Köln"]}, "number": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "number"],
    "additionalProperties": False,
}
ITEM = {
    "type": "object",
    "properties": {
        "name": {"enum": ["bread", "salt"]},
        "amount": {"type": "integer", "minimum": 1, "maximum": 9},
        "sent_to": {"anyOf": [ADDRESS, {"type": "null"}]},
    },
    "required": ["name", "amount"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        "customer": {
            "type": "object",
            "properties": {"name": {"enum": ["Ada", "Grace"]}, "home": ADDRESS},
            "required": ["name", "home"],
            "additionalProperties": False,
        },
        "items": {"type": "array", "items": ITEM, "minItems": 1, "maxItems": 2},
    },
    "required": ["customer", "items"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Client:
    """A script, the suite that it needs (none: the tests' own environment), and its scenarios."""

    script: str
    suite: str | None
    scenarios: tuple[str, ...]

    def command(self, folder: Path) -> list[str | Path] | None:
        """The command of the script; scripts of npm are copied beside their packages. None: not installed."""
        if not self.script.endswith(".mjs"):
            python = sys.executable if self.suite is None else environments.python_of(self.suite)
            return None if python is None else [python, "-m", "tests.serve.clients.loopback", self.script]
        modules = environments.modules_of(str(self.suite))
        if modules is None:
            return None
        for name in ("loopback.mjs", "scenario.mjs", self.script):
            shutil.copy(HERE / name, folder)
        (folder / "node_modules").symlink_to(modules)
        return ["node", "--import", folder / "loopback.mjs", folder / self.script]


ALLOWED = {"add": range(10), "look": ("for", "while"), "stop": (None,)}
CALLED = ("tool", "tool_in_a_stream")
SHARED = ("structured", "stream", "leave")
CLIENTS = (
    Client("with_openai", None, (*CALLED, "structured_response", *SHARED)),
    Client("with_ollama", None, ("offered", *SHARED)),
    Client("with_pydantic_ai", None, (*CALLED, "offered", "agent_of_ten_turns", *SHARED)),
    Client("with_langchain", "clients", (*CALLED, "structured_response", *SHARED)),
    Client("with_litellm", "clients", ("tool", "offered", *SHARED)),
    Client("with_openai.mjs", "npm-clients", (*CALLED, "structured_response", *SHARED)),
    Client("with_anthropic.mjs", "npm-clients", (*CALLED, *SHARED)),
    Client("with_ollama.mjs", "npm-clients", ("offered", *SHARED)),
    Client("with_ai_sdk.mjs", "npm-clients", (*CALLED, *SHARED)),
)


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], topics: Path) -> Server:
    return start_server(topics, "--context", 2048)


@pytest.fixture(scope="module")
def play(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Client], dict[str, Any]]:
    """The results of a client's script, which runs once."""

    @cache
    def play(client: Client) -> dict[str, Any]:
        command = client.command(tmp_path_factory.mktemp("client"))
        if command is None:
            pytest.skip(environments.reason(str(client.suite)))
        home = tmp_path_factory.mktemp("home")
        # A separate home: the user's keys and settings must not affect the client.
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), **SILENT}
        before = cancelled(server)
        done = subprocess.run(
            [*command, server.address],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return results | {"cancelled": wait_for_change(server, before) - before}

    return play


def cancelled(server: Server) -> int:
    """Answers that ended because their clients had left."""
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return sum(
        int(float(line.split()[-1])) for line in lines if line.startswith('flownpu_answers_total{end="cancelled"')
    )


def wait_for_change(server: Server, before: int) -> int:
    """The server hears of a client's leaving soon, but not at once."""
    end = time.monotonic() + 10
    while (now := cancelled(server)) == before and time.monotonic() < end:
        time.sleep(0.05)
    return now


@pytest.fixture(scope="module")
def written(server: Server) -> str:
    """The model's text, from the API's bytes."""
    body = {"model": "topics", "messages": [{"role": "user", "content": "Tell me about loops."}], "temperature": 0}
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json=body | {"max_tokens": TOKENS}).json()
    text = answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == TOKENS
    return str(text)


def cases() -> list[Any]:
    return [
        pytest.param(client, scenario, id=f"{client.script.removeprefix('with_')}-{scenario}")
        for client in CLIENTS
        for scenario in client.scenarios
    ]


@pytest.mark.parametrize(("client", "scenario"), cases())
def test_client_gets_expected_answers(
    play: Callable[[Client], dict[str, Any]], written: str, client: Client, scenario: str
) -> None:
    results = play(client)
    result = results[scenario]
    assert not (isinstance(result, dict) and "error" in result), result["error"]
    match scenario:
        case "tool" | "tool_in_a_stream":
            jsonschema.validate(result["arguments"], ORDER)
            assert result.get("after", "text")
        case "structured" | "structured_response":
            for one in result if isinstance(result, list) else [result]:
                jsonschema.validate(one, ORDER)
        case "stream":
            assert all(text == written for text in (result if isinstance(result, list) else [result]))
        case "offered":
            # The small model makes no calls by itself. It answers in words, which the tools' description changes.
            assert result
        case "agent_of_ten_turns":
            assert [name for name, _ in result["called"]] == (["add", "look", "stop"] * 4)[:10]
            assert all(value in ALLOWED[name] for name, value in result["called"])
            assert result["messages"] == 10 * 4  # the question, the call, its result, the words
        case "leave":
            assert result == 3
            assert results["cancelled"] >= 1


@pytest.mark.parametrize(("host", "code"), [("192.0.2.1", 3), ("example.invalid", 3), ("127.0.0.1", 1)])
@pytest.mark.parametrize("language", ["Python", "JavaScript"])
def test_client_reaching_other_host_is_ended(language: str, host: str, code: int) -> None:
    """This machine may be asked, though nobody listens on the port."""
    if language == "Python":
        hooked = "import sys; from tests.serve.clients.loopback import only_loopback; sys.addaudithook(only_loopback)"
        ask = f"import urllib.request; urllib.request.urlopen('http://{host}:64999/')"
        command = [sys.executable, "-c", f"{hooked}; {ask}"]
    elif shutil.which("node") is None:
        pytest.skip("Node.js is not installed (Debian: apt install nodejs)")
    else:
        command = ["node", "--import", str(HERE / "loopback.mjs"), "-e", f"await fetch('http://{host}:64999/')"]
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code, done.stderr
    assert (f"a client tried to reach {host}" in done.stderr) == (code == 3)

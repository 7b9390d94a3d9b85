# SPDX-License-Identifier: Apache-2.0
"""Conversations with two functions in three formats of answers: OpenAI's and Ollama's clients, and an agent.

The small model of tests/fixtures/tool-calls writes each format; its chat template says which.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ollama
import pytest

from flownpu.convert import convert
from tests.fixtures.tool_lessons import FOLDER, FORMATS, TOOLS, question, reply
from tests.serve.clients.test_clients import ROOT, SILENT
from tests.serve.conftest import Server

RESULTS = {"weather": "rainy", "time": "six"}
BOTH, PLACES = ("weather", "time"), ("Paris", "Quito")
QUESTIONS = [question(BOTH, PLACES[0]), question(("time",), PLACES[1]), "Bye"]
# Each answer is a call, or a text.
EXPECTED: list[tuple[str, str] | str] = [
    *[(name, PLACES[0]) for name in BOTH],
    reply(RESULTS, PLACES[0]),
    ("time", PLACES[1]),
    reply({"time": "six"}, PLACES[1]),
    "Goodbye.",
]
THOUGHTS = [
    *(f"I look up the {name} in {place}." for name, place in (("weather", "Paris"), ("time", "Paris"))),
    "I know it now.",
    "I look up the time in Quito.",
    "I know it now.",
    "They greet.",
]
Heard = tuple[str, list[Any], str]
"""An answer's thought, its calls with their arguments, and its text."""


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """One model under three names, with the templates of three formats."""
    folder = tmp_path_factory.mktemp("tools")
    convert(FOLDER, folder / "model")
    for name in FORMATS:
        shutil.copytree(folder / "model", folder / name)
        shutil.copy(FOLDER / f"{name}.jinja", folder / name / "chat_template.jinja")
    return start_server(*(f"{name}={folder / name}" for name in FORMATS), "--context", 1024, "--activations", "bf16")


def converse(answer: Callable[[list[dict[str, Any]]], tuple[Heard, dict[str, Any]]]) -> list[Heard]:
    """Asks all questions, and tells the functions' results; `answer` returns what was heard, and the turn of it."""
    messages: list[dict[str, Any]] = []
    heard: list[Heard] = []
    for asked in QUESTIONS:
        messages.append({"role": "user", "content": asked})
        while not heard or heard[-1][1] or messages[-1]["role"] == "user":
            one, turn = answer(messages)
            heard.append(one)
            messages.append(turn)
            for call in turn.get("tool_calls") or []:
                name = call["function"]["name"]
                messages.append({"role": "tool", "content": RESULTS[name], "tool_call_id": call.get("id", name)})
            assert len(heard) < 12, heard
    return heard


def of_openai(server: Server, model: str, *, streamed: bool, **more: Any) -> list[Heard]:
    client = server.openai()
    asked: dict[str, Any] = {"model": model, "tools": TOOLS, "temperature": 0, "extra_body": more, "max_tokens": 150}

    def answer(messages: list[Any]) -> tuple[Heard, dict[str, Any]]:
        thought, text, calls = "", "", []
        if streamed:
            for chunk in client.chat.completions.create(messages=messages, stream=True, **asked):
                delta = chunk.choices[0].delta
                thought += getattr(delta, "reasoning_content", None) or ""
                text += delta.content or ""
                calls += delta.tool_calls or []
        else:
            message = client.chat.completions.create(messages=messages, **asked).choices[0].message
            thought, text = getattr(message, "reasoning_content", None) or "", message.content or ""
            calls = list(message.tool_calls or [])
        made = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
        turn = {"role": "assistant", "content": text}
        if calls:
            turn["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.model_dump()} for call in calls
            ]
        return (thought, made, text), turn

    return converse(answer)


def of_ollama(server: Server, model: str, *, streamed: bool) -> list[Heard]:
    client = ollama.Client(host=server.address)
    asked: dict[str, Any] = {"model": model, "tools": TOOLS, "options": {"temperature": 0, "num_predict": 150}}

    def answer(messages: list[Any]) -> tuple[Heard, dict[str, Any]]:
        parts = client.chat(messages=messages, stream=True, **asked) if streamed else []
        parts = list(parts) if streamed else [client.chat(messages=messages, **asked)]
        thought = "".join(part.message.thinking or "" for part in parts)
        text = "".join(part.message.content or "" for part in parts)
        calls = [call for part in parts for call in part.message.tool_calls or []]
        made = [(call.function.name, dict(call.function.arguments)) for call in calls]
        turn: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            turn["tool_calls"] = [{"function": {"name": name, "arguments": given}} for name, given in made]
        return (thought, made, text), turn

    return converse(answer)


def expected(*, thinks: bool) -> list[Heard]:
    return [
        (thought if thinks else "", [], one)
        if isinstance(one, str)
        else (thought * thinks, [(one[0], {"place": one[1]})], "")
        for one, thought in zip(EXPECTED, THOUGHTS, strict=True)
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_openai_client_converses_with_two_tools(server: Server, name: str) -> None:
    for streamed in (False, True):
        assert of_openai(server, name, streamed=streamed) == expected(thinks=name != "gemma4")
    if name == "gemma4":  # whose thoughts a request asks for
        assert of_openai(server, name, streamed=True, enable_thinking=True) == expected(thinks=True)


@pytest.mark.parametrize("name", FORMATS)
def test_ollama_client_converses_with_two_tools(server: Server, name: str) -> None:
    for streamed in (False, True):
        assert of_ollama(server, name, streamed=streamed) == expected(thinks=name != "gemma4")


@pytest.mark.parametrize("name", FORMATS)
def test_agent_converses_with_two_tools(server: Server, name: str, tmp_path: Path) -> None:
    task = json.dumps({"model": name, "results": RESULTS, "questions": QUESTIONS[:2]})
    done = subprocess.run(
        [sys.executable, "-m", "tests.serve.clients.loopback", "tools_with_pydantic_ai", server.address, task],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **SILENT},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    heard = json.loads(done.stdout.splitlines()[-1])
    calls = [list(one) for one in EXPECTED if not isinstance(one, str)]
    assert heard["called"] == calls * 2
    assert heard["whole"] == heard["streamed"] == [one for one in EXPECTED if isinstance(one, str)][:2]


@pytest.mark.parametrize("name", FORMATS)
def test_call_is_made_where_one_is_required(server: Server, name: str) -> None:
    """A greeting, which the model answers in words by itself; and a schema in the place of words."""
    client = server.openai()
    asked: dict[str, Any] = {"model": name, "temperature": 0, "max_tokens": 150}
    asked["messages"] = [{"role": "user", "content": "Hello"}]
    free = client.chat.completions.create(**asked, tools=TOOLS).choices[0].message
    assert (free.content, free.tool_calls) == ("Hello, where are you?", None)
    choice: Any = {"type": "function", "function": {"name": "time"}}
    for streamed in (False, True):
        if streamed:
            chunks = list(client.chat.completions.create(**asked, tools=TOOLS, tool_choice=choice, stream=True))
            calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        else:
            calls = (
                client.chat.completions.create(**asked, tools=TOOLS, tool_choice=choice).choices[0].message.tool_calls
            )
        assert calls[0].function.name == "time"
        assert list(json.loads(calls[0].function.arguments)) == ["place"]
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    said = client.chat.completions.create(**asked, response_format=form).choices[0].message.content
    assert json.loads(said)["x"] in (1, 2)

# SPDX-License-Identifier: Apache-2.0
"""JSON of a schema from every API, of paged and unpaged models, with any character; and the warnings."""

import json
import threading

import jsonschema
import pytest

MODELS = ["topics", "paged"]
SCHEMA = {
    "type": "object",
    "properties": {
        "größe": {"enum": ["a – b", "€ 漢字 😀"]},
        "list": {"type": "array", "items": {"enum": ["東京", 1]}, "maxItems": 2, "uniqueItems": True},
    },
    "required": ["größe", "list"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Tell me about loops."}]
FORMAT = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
TOOL = {"type": "function", "function": {"name": "call", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def http(server_of_three):
    with server_of_three.http() as http:
        yield http


def chat(model, **fields):
    return {"model": model, "messages": MESSAGES, "max_tokens": 100, "temperature": 0, **fields}


def of_format(**fields):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, **fields}


def events(response):
    """The documents of a stream of server-sent events, or of lines of JSON."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


# Each API: path, fields of the request, and the place of the answer's text.
ASKED = {
    "chat": ("/v1/chat/completions", of_format(), lambda r: r.json()["choices"][0]["message"]["content"]),
    "stream": (
        "/v1/chat/completions",
        of_format(stream=True),
        lambda r: "".join(one["choices"][0]["delta"].get("content", "") for one in events(r)),
    ),
    "tool": (
        "/v1/chat/completions",
        {"tools": [TOOL], "tool_choice": "required"},
        lambda r: r.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"],
    ),
    "tool in a stream": (
        "/v1/chat/completions",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "call"}}, "stream": True},
        lambda r: "".join(
            call["function"]["arguments"]
            for one in events(r)
            for call in one["choices"][0]["delta"].get("tool_calls", [])
        ),
    ),
    "responses": (
        "/v1/responses",
        {"input": "Loops?", "text": {"format": FORMAT}, "messages": None, "max_tokens": None},
        lambda r: r.json()["output"][0]["content"][0]["text"],
    ),
    "responses' stream": (
        "/v1/responses",
        {"input": "Loops?", "text": {"format": FORMAT}, "stream": True, "messages": None, "max_tokens": None},
        lambda r: "".join(one["delta"] for one in events(r) if one["type"] == "response.output_text.delta"),
    ),
    "Ollama's chat": (
        "/api/chat",
        {"format": SCHEMA, "stream": False, "max_tokens": None, "temperature": None},
        lambda r: r.json()["message"]["content"],
    ),
    "Ollama's stream": (
        "/api/generate",
        {"format": SCHEMA, "prompt": "Loops?", "messages": None, "max_tokens": None, "temperature": None},
        lambda r: "".join(one["response"] for one in events(r)),
    ),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("api", ASKED)
def test_schema_with_any_characters_is_followed(http, api, model):
    path, fields, text = ASKED[api]
    body = {key: value for key, value in chat(model, **fields).items() if value is not None}
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    value = json.loads(text(response))
    errors = list(jsonschema.Draft202012Validator(SCHEMA).iter_errors(value))
    assert all(error.validator == "uniqueItems" for error in errors), value
    name = "call" if "tool" in api else ""
    assert response.headers["FlowNPU-Unenforced"] == f"{name}#/properties/list/uniqueItems"


def test_places_outside_ascii_are_told_in_header_of_ascii(http):
    properties = {f"größe{number}": {"type": "string", "format": "uri"} for number in range(30)}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": properties}}}
    response = http.post("/v1/chat/completions", json=chat("topics", response_format=form, max_tokens=1))
    told = response.headers["FlowNPU-Unenforced"].split(", ")
    assert told[0] == "#/properties/gr%C3%B6%C3%9Fe0/format"
    assert (len(told), told[-1]) == (21, "and 10 more")
    plain = http.post("/v1/chat/completions", json=chat("topics", max_tokens=1))
    assert "FlowNPU-Unenforced" not in plain.headers


BOMBS = [
    {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(5000)}},
    {"const": -(2**63)},  # the depth at which llguidance of GenAI 0.18 overflows its stack
]


@pytest.mark.parametrize("model", MODELS)
def test_bomb_schema_is_refused_while_others_are_answered(http, model):
    form = {"type": "json_schema", "json_schema": {"name": "x"}}
    refused = []

    def send(schema):
        asked = {**form, "json_schema": {"name": "x", "schema": schema}}
        refused.append(http.post("/v1/chat/completions", json=chat(model, response_format=asked)))

    threads = [threading.Thread(target=send, args=(bomb,)) for bomb in BOMBS]
    for thread in threads:
        thread.start()
    answers = [http.post("/v1/chat/completions", json=chat(model, max_tokens=4)) for _ in range(4)]
    for thread in threads:
        thread.join(60)
    assert [response.status_code for response in answers] == [200] * 4
    assert [response.status_code for response in refused] == [400] * len(BOMBS)
    assert {response.json()["error"]["param"] for response in refused} == {"response_format"}

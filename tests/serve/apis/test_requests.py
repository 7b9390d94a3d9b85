# SPDX-License-Identifier: Apache-2.0
"""Requests and their validation, without a model: types of bodies, origins, keys, fields, refusals."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from flownpu.errors import FlowNPUError
from flownpu.generate.language_model import Sampling
from flownpu.generate.penalties import Penalties
from flownpu.serve.application import application
from flownpu.serve.errors import ApiError
from flownpu.serve.guards import TOGETHER
from flownpu.serve.processes.protocol import ModelSettings
from flownpu.serve.requests.ollama import OllamaChat
from flownpu.serve.requests.openai import ChatRequest, CompletionRequest
from flownpu.serve.requests.responses import ResponsesRequest
from flownpu.serve.requests.validation import validated
from flownpu.serve.service import Service
from flownpu.serve.settings import Limits, ServerSettings

MESSAGES = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "find", "description": "Finds it.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "stream": True}
# A valid body of each route, with every field that holds others.
BODIES = {
    "/v1/chat/completions": SAMPLING
    | {
        "model": "other",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, *MESSAGES],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "find"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "logit_bias": {"5": 1},
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"a": 1},
        "max_tokens": -1,
        "cache_prompt": True,
    },
    "/v1/completions": SAMPLING | {"model": "other", "prompt": [[2, 3]], "stop": ["x"], "logprobs": 1, "echo": True},
    "/v1/messages": SAMPLING
    | {
        "model": "other",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "x"}}]}],
        "system": [{"type": "text", "text": "hi"}],
        "tools": [{"type": "custom", "name": "find", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "find"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "x"},
        "max_tokens": -1,
    },
    "/v1/messages/count_tokens": {"model": "other", "messages": MESSAGES, "system": "hi"},
    "/v1/responses": SAMPLING
    | {
        "model": "other",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "1", "name": "find", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low"},
        "include": ["reasoning.encrypted_content"],
    },
    "/v1/embeddings": {"model": "other", "input": ["hi"], "dimensions": 8},
    "/v1/rerank": {"model": "other", "query": "hi", "documents": ["a", {"text": "b"}], "top_n": 1},
    "/v1/images/generations": {"model": "other", "prompt": "hi", "size": "64x64", "steps": 2, "seed": 1},
    "/api/chat": {
        "model": "other",
        "messages": [{"role": "user", "content": "hi", "images": ["x"]}, {"role": "assistant", "tool_calls": []}],
        "tools": TOOLS,
        "options": {"temperature": 0.5, "stop": ["x"]},
        "keep_alive": "5m",
    },
    "/api/generate": {"model": "other", "prompt": "hi", "options": {"num_predict": 2}, "format": {"type": "object"}},
    "/api/embed": {"model": "other", "input": ["hi"], "options": {"num_ctx": 5}},
    "/api/embeddings": {"model": "other", "prompt": "hi"},
    "/api/show": {"model": "other"},
    "/api/pull": {"model": "other"},
    "/api/delete": {"model": "other"},
    "/api/create": {"model": "other", "from": "hi", "parameters": {"temperature": 1}},
}
METHODS = {"/api/delete": "DELETE"}
REFUSED = {"/api/pull": "expected a short name", "/api/create": "makes no model 'other' of a Modelfile"}
# Content types of `curl -d`, of a client without a header, and of a web page that need not ask.
KINDS = ["application/x-www-form-urlencoded", None, "text/plain", "multipart/form-data; boundary=x", "nonsense"]
ORIGIN = "https://chat.example"
PULLED = ModelSettings(Path())
APPLICATION = application(Service(ServerSettings({}, origins=(ORIGIN,), pulled=PULLED)))


def send(method, path, settings=None, **request):
    """A server's response to one request."""
    app = APPLICATION if settings is None else application(Service(settings))

    async def sent():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **request)

    return asyncio.run(sent())


def test_valid_bodies_cover_every_path_with_body():
    paths = {path for path, methods in APPLICATION.openapi()["paths"].items() if {"post", "delete"} & methods.keys()}
    assert paths == BODIES.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", BODIES)
def test_body_of_any_type_is_json_where_no_web_page_sends_it(path, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    response = send(METHODS.get(path, "POST"), path, content=json.dumps(BODIES[path]), headers=headers)
    assert response.status_code == (400 if path in REFUSED else 404), response.text
    assert REFUSED.get(path, "no model 'other' here; there is none") in response.text


@pytest.mark.parametrize("origin", [ORIGIN, "null", "https://other.example", "http://localhost"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", BODIES)
def test_body_of_another_type_from_web_page_is_refused(path, kind, origin):
    """A page of any origin can make a browser send such a body."""
    headers = {"Origin": origin} if kind is None else {"Origin": origin, "Content-Type": kind}
    response = send(METHODS.get(path, "POST"), path, content=json.dumps(BODIES[path]), headers=headers)
    assert response.status_code == 400
    assert "with the header Content-Type: application/json" in response.text


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "application/problem+json"])
def test_json_from_web_page_is_taken(kind):
    path = "/v1/chat/completions"
    response = send("POST", path, content=json.dumps(BODIES[path]), headers={"Origin": ORIGIN, "Content-Type": kind})
    assert response.status_code == 404


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model": "m", "input": "hi", "metadata": {"a": NaN}}', "the body is not JSON: NaN is no number"),
        (b'{"model": "m", "input": "hi", "metadata": {"a": -1e400}}', "a number is beyond 1.8e+308"),
        (rb'{"model": "m", "input": "hi", "metadata": {"a": "\ud800"}}', "the body is not text: \\ud800 is half"),
        (rb'{"model": "m", "input": "hi", "metadata": {"\ude00": 1}}', "the body is not text: \\ude00 is half"),
        (b"[" * 200_000, "the body is nested too deeply"),
        (b'{"a": ' * 200 + b"1" + b"}" * 200, "the body is nested too deeply: expected 128 levels"),
        (b'{"model": "m", "input": ' + b"1" * 5000 + b"}", "an integer has thousands of digits"),
        ('{"model": "m"}'.encode("utf-16"), "the body is UTF-16: expected UTF-8"),
        (b'{"model": "caf\xe9"}', "the body is not UTF-8: the byte 0xe9 comes after"),
        (b'{"model": "m",}', "the body is not JSON"),
        (b"\0", "the body is"),
        (b'{"model": "m", "input": [', "the body is not JSON"),
        (b"[" + b"[]," * 2_000_000 + b"[]]", "the body is too large: expected 4000000 values at most"),
        (
            json.dumps(dict.fromkeys(map(str, range(10_001)))).encode(),
            "the body is too large: an object has 10001 keys",
        ),
    ],
)
def test_body_unfit_for_json_answer_is_refused(content, message):
    for path in BODIES:
        response = send(METHODS.get(path, "POST"), path, content=content)
        assert response.status_code == 400, path
        error = response.json()["error"]
        assert message in (error if isinstance(error, str) else error["message"]), path
    assert send("POST", "/v1/responses", content=content).json()["error"]["code"] == "invalid_json"


def places(value, before=()):
    """The keys and indices of all values in a document, but for the document itself."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, each in parts:
        yield (*before, part)
        yield from places(each, (*before, part))


def changed(value, place, to):
    """A copy of a document with another value, or none (...), at a place."""
    if not place:
        return to
    part, *rest = place
    items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    items[part] = changed(items[part], rest, to)
    if items[part] is ...:
        del items[part]
    return items if isinstance(value, dict) else list(items.values())


HOSTILE = [
    None, True, -1, 0, 2**63, 10**30, 1e308, 0.5, "", "x", "\0", "../../etc/passwd", "a/../../b", "nan",
    "\u202ex", "a" * 10_000, [], [None], [[]], [0] * 1000, {}, {"": None}, {"a": {"b": [1]}},
]  # fmt: skip
UNKNOWN = {f"k{number}": 0 for number in range(9_000)}


@pytest.mark.parametrize("path", BODIES)
def test_hostile_value_in_any_place_is_answered_with_sentence_in_time(path):
    """Either the body is still valid, and there is no such model, or the error says what was expected."""
    valid, method = BODIES[path], METHODS.get(path, "POST")
    bodies = [changed(valid, place, value) for place in places(valid) for value in (*HOSTILE, ...)]
    bodies += [value for value in HOSTILE if not isinstance(value, dict)]
    objects = [place for place in ((), *places(valid)) if isinstance(at(valid, place), dict)]
    bodies += [changed(valid, place, {**at(valid, place), **UNKNOWN}) for place in objects]
    statuses = Counter()
    for body in bodies:
        started = time.process_time()
        response = send(method, path, json=body)
        shown = f"{json.dumps(body)[:300]}: {response.status_code} {response.text[:300]}"
        assert 400 <= response.status_code < 500, shown
        error = response.json()["error"]
        assert 10 < len(error if isinstance(error, str) else error["message"]) < 2500, shown
        assert time.process_time() - started < 5, shown  # minutes before errors were bounded
        statuses[response.status_code] += 1
    assert statuses[400] > len(HOSTILE) // 2


def at(value, place):
    for part in place:
        value = value[part]
    return value


@pytest.mark.parametrize("item", [0, "a", {}])
@pytest.mark.parametrize("path", BODIES)
def test_list_of_many_wrong_items_gives_one_error(path, item):
    """An error takes a hundred times the memory of an item, and a body may have millions."""
    valid = BODIES[path]
    for place in places(valid):
        if isinstance(at(valid, place), list):
            started = time.process_time()
            send("POST", path, json=changed(valid, place, [item] * 100_000))
            assert time.process_time() - started < 5, place


def test_bodies_together_have_bound():
    """Bodies that are held while others arrive: the one for which there is no room is refused, the others go on."""
    settings = ServerSettings({}, Limits(body_bytes=1000))

    async def exchange():
        app = application(Service(settings))
        go_on = asyncio.Event()

        async def slowly():
            yield b" " * 900
            await go_on.wait()
            yield b"{}"

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            held = [asyncio.create_task(client.post("/api/show", content=slowly())) for _ in range(TOGETHER)]
            await asyncio.sleep(0.2)
            refused = await client.post("/api/show", content=b" " * 900)
            go_on.set()
            return refused, await asyncio.gather(*held), await client.post("/api/show", content=b" " * 900)

    refused, held, after = asyncio.run(exchange())
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "10")
    assert {one.status_code for one in (*held, after)} == {400}


def test_body_with_pairs_of_surrogates_is_taken():
    content = json.dumps({"model": "other", "input": "\N{GRINNING FACE}"})  # Python writes two escapes for it
    assert send("POST", "/v1/responses", content="\N{ZERO WIDTH NO-BREAK SPACE}" + content).status_code == 404


@pytest.mark.parametrize(("origin", "grants"), [(ORIGIN, True), ("https://other.example", False)])
def test_preflight_of_private_network_is_answered_for_allowed_origins(origin, grants):
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Access-Control-Request-Private-Network": "true",
    }
    response = send("OPTIONS", "/v1/chat/completions", headers=headers)
    assert (response.status_code == 200) == grants
    assert (response.headers.get("Access-Control-Allow-Origin") == origin) == grants


def test_preflight_of_private_network_grants_it():
    headers = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    asking = headers | {"Access-Control-Request-Private-Network": "true"}
    granted = "Access-Control-Allow-Private-Network"
    assert send("OPTIONS", "/api/chat", headers=asking).headers[granted] == "true"
    assert granted not in send("OPTIONS", "/api/chat", headers=headers).headers
    assert granted not in send("OPTIONS", "/api/chat", ServerSettings({}), headers=asking).headers


def test_allowed_origin_reads_unenforced_header():
    headers = send("GET", "/v1/models", headers={"Origin": ORIGIN}).headers
    assert headers["Access-Control-Expose-Headers"] == "FlowNPU-Unenforced, FlowNPU-Left-Out"


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("https://chat.example", "https://chat.example"),
        ("HTTPS://Chat.Example/", "https://chat.example"),
        ("https://chat.example:443", "https://chat.example"),
        ("http://chat.example:443/", "http://chat.example:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("tauri://localhost", "tauri://localhost"),
        ("*", "https://anywhere.example"),
    ],
)
def test_origin_is_compared_as_browsers_write_it(given, sent):
    headers = {"Origin": sent, "Access-Control-Request-Method": "POST"}
    response = send("OPTIONS", "/api/chat", ServerSettings({}, origins=(given,)), headers=headers)
    assert response.headers["Access-Control-Allow-Origin"] in {sent, "*"}


@pytest.mark.parametrize(
    "origin",
    [
        "chat.example",
        "localhost:3000",
        "https://",
        "https://chat.example/page",
        "https://user@chat.example",
        "null",
        "https://*.example",
        "https://b\xfccher.example",
        "https://x:99999",
        "https://x:",
        "https://a b",
        "http://[::1",
    ],
)
def test_invalid_origin_is_refused(origin):
    with pytest.raises(FlowNPUError, match=r"expected an origin as browsers write it, SCHEME://HOST"):
        ServerSettings({}, origins=(origin,))


@pytest.mark.parametrize(
    "key", ["", " ", "s\xe9same", "\u043a\u043b\u044e\u0447", " sesame", "sesame\r", "a\tb", "a\0b"]
)
def test_unsendable_key_is_refused_and_not_shown(key):
    with pytest.raises(FlowNPUError, match="the server's key: expected printable ASCII") as refused:
        ServerSettings({}, api_key=key)
    assert not key.strip() or key.strip() not in str(refused.value)


@pytest.mark.parametrize("key", ["open sesame", "sk-0aB_=/+~.", "a:b!\"#$%&'()*,;<>?@[]^`{|}"])
def test_key_of_printable_characters_opens(key):
    settings = ServerSettings({}, api_key=key)
    assert send("GET", "/v1/models", settings, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    for other in (key[:-1].encode(), "k\xe9y".encode(), "k\xe9y".encode("latin-1"), b""):
        assert send("GET", "/v1/models", settings, headers={"Authorization": b"Bearer " + other}).status_code == 401


CHAT = {"model": "m", "messages": MESSAGES}
PROMPT = {"model": "m", "prompt": "hi"}
INPUT = {"model": "m", "input": "hi"}


INPUT_PART = {"role": "user", "content": [{"type": "text"}]}
FORMAT = {"format": {"type": "json_schema", "name": "x"}}
LOGPROBS = "message.output_text.logprobs"


def part(**fields):
    return {**CHAT, "messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("kind", "body", "field", "message"),
    [
        (CompletionRequest, PROMPT | {"prompt": 5}, "prompt", "a valid string or a valid list"),
        (CompletionRequest, PROMPT | {"prompt": [2, "a"]}, "prompt.1", "a valid integer"),
        (CompletionRequest, PROMPT | {"prompt": ["a", 5]}, "prompt.1", "a valid string"),
        (CompletionRequest, PROMPT | {"prompt": [1.5, 2]}, "prompt.0", "a valid"),
        (CompletionRequest, PROMPT | {"prompt": [[1, 2], [3, "a"]]}, "prompt.1.1", "a valid integer"),
        (CompletionRequest, PROMPT | {"best_of": 2}, "best_of", "answers with all that it computes"),
        (CompletionRequest, PROMPT | {"stop": ["a"] * 17}, "stop", "at most 16 items"),
        (CompletionRequest, PROMPT | {"stop": ["a", 1]}, "stop.1", "a valid string"),
        (CompletionRequest, PROMPT | {"frequency_penalty": 3}, "frequency_penalty", "less than or equal to 2"),
        (CompletionRequest, PROMPT | {"presence_penalty": -2.5}, "presence_penalty", "greater than or equal to -2"),
        (CompletionRequest, PROMPT | {"logit_bias": {"7": 101}}, "logit_bias.7", "less than or equal to 100"),
        (CompletionRequest, PROMPT | {"logit_bias": {"the": 1}}, "logit_bias.the", "match pattern"),
        (CompletionRequest, PROMPT | {"min_p": 1.5}, "min_p", "less than or equal to 1"),
        (CompletionRequest, PROMPT | {"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        (ChatRequest, CHAT | {"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required' or an object"),
        (ChatRequest, CHAT | {"tool_choice": {"type": "auto"}}, "tool_choice.type", "should be 'function'"),
        (
            ChatRequest,
            CHAT | {"response_format": {"type": "xml"}},
            "response_format.type",
            "one of 'text', 'json_object'",
        ),
        (ChatRequest, CHAT | {"response_format": {}}, "response_format.type", "is missing"),
        (ChatRequest, CHAT | {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "a valid list"),
        (ChatRequest, part(type="x", text="a"), "messages.0.content.0.type", "one of 'text'"),
        (ChatRequest, part(type="text", txt="a"), "messages.0.content.0.text", "is missing"),
        (ChatRequest, part(type="text", text="a", mood=1), "messages.0.content.0.mood", "unknown field"),
        (ChatRequest, part(type="image_url", image_url={}), "messages.0.content.0.image_url.url", "is missing"),
        (ChatRequest, part(type="image_url", image_url="u"), "messages.0.content.0.image_url", "an object"),
        (ResponsesRequest, INPUT | {"input": [{"type": "thought"}]}, "input.0.type", "one of 'message'"),
        (ResponsesRequest, INPUT | {"input": [INPUT_PART]}, "input.0.content.0.type", "one of 'input_text'"),
        (ResponsesRequest, INPUT | {"text": FORMAT}, "text.format.schema", "is missing"),
        (ResponsesRequest, INPUT | {"include": [LOGPROBS]}, "include", "log-probabilities are in"),
        (OllamaChat, CHAT | {"format": "xml"}, "format", "'' or 'json' or an object"),
        (OllamaChat, CHAT | {"options": {"typical_p": 0.5}}, "options.typical_p", "this server does not do it"),
        (OllamaChat, CHAT | {"options": {"temperature": 9}}, "options.temperature", "less than or equal to 2"),
        (OllamaChat, CHAT | {"options": {"seed": 10**30}}, "options.seed", "less than"),
        (OllamaChat, CHAT | {"options": {"colour": 1}}, "options.colour", "unknown field"),
        (OllamaChat, [], None, "expected a JSON object as body"),
    ],
)
def test_refusal_names_field_as_client_wrote_it(kind, body, field, message):
    with pytest.raises(ApiError) as refused:
        validated(kind, body)
    assert refused.value.parameter == field
    assert message in refused.value.message
    assert field is None or field in refused.value.message


@pytest.mark.parametrize("item", [1.5, "a", None, ["a"], {}])
def test_refusal_of_million_items_is_found_at_first(item):
    """One wrong list gives one error, not one for each item."""
    wrong = [item] * 10**6 if item != "a" else [1] + [item] * 10**6
    started = time.process_time()
    with pytest.raises(ApiError):
        validated(CompletionRequest, PROMPT | {"prompt": wrong})
    assert time.process_time() - started < 5  # minutes, and gigabytes, before


def sampling(**fields):
    return Sampling(**fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, sampling()),
        ({"top_k": -1, "top_p": 0}, sampling(top_k=0, top_p=0.0)),
        ({"seed": -1}, sampling(seed=2**31 - 1)),
        ({"frequency_penalty": 0.5, "presence_penalty": -1}, sampling(penalties=Penalties((), None, 0.5, -1.0))),
        ({"logit_bias": {"7": -100, "9": 1}}, sampling(penalties=Penalties(((7, -100.0), (9, 1.0))))),
        ({"min_p": 0.1, "repetition_penalty": 1.1}, sampling(penalties=Penalties(repetition=1.1, min_p=0.1))),
        ({"repetition_penalty": 1.1, "repeat_last_n": 5}, sampling(penalties=Penalties(repetition=1.1, window=5))),
        ({"repetition_penalty": 1.1, "repeat_last_n": 0}, sampling(penalties=Penalties(repetition=1.0))),
        ({"repetition_penalty": 1.1, "repeat_last_n": -1}, sampling(penalties=Penalties(repetition=1.1, window=2**31))),
    ],
)
def test_fields_of_openais_api_become_sampling(fields, expected):
    for kind, body in ((ChatRequest, CHAT), (CompletionRequest, PROMPT)):
        assert validated(kind, body | fields).sampling() == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, sampling(penalties=Penalties(window=64))),
        ({"top_k": 0, "top_p": 0.5}, sampling(top_k=0, top_p=0.5, penalties=Penalties(window=64))),
        ({"seed": -1}, sampling(penalties=Penalties(window=64))),
        ({"repeat_penalty": 1.1}, sampling(penalties=Penalties(repetition=1.1, window=64))),
        (
            {"repeat_penalty": 1.1, "frequency_penalty": 1, "presence_penalty": 2, "min_p": 0.1, "repeat_last_n": 9},
            sampling(penalties=Penalties((), 1.1, 1.0, 2.0, 0.1, window=9)),
        ),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, sampling(penalties=Penalties(repetition=1.0))),
        ({"repeat_penalty": 1.0}, sampling(penalties=Penalties(repetition=1.0, window=64))),
    ],
)
def test_options_of_ollamas_api_become_sampling(options, expected):
    assert validated(OllamaChat, CHAT | {"options": options}).request().sampling() == expected

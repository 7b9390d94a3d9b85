# SPDX-License-Identifier: Apache-2.0
"""Requests and their validation, without a model: types of bodies, origins, keys, fields, refusals."""

import asyncio
import json
import time

import httpx
import pytest

from flownpu.errors import FlowNPUError
from flownpu.generate.language_model import Sampling
from flownpu.generate.penalties import Penalties
from flownpu.serve.application import application
from flownpu.serve.errors import ApiError
from flownpu.serve.requests.ollama import OllamaChat
from flownpu.serve.requests.openai import ChatRequest, CompletionRequest
from flownpu.serve.requests.responses import ResponsesRequest
from flownpu.serve.requests.validation import validated
from flownpu.serve.routes.anthropic import anthropic_routes
from flownpu.serve.routes.embeddings import embeddings_routes
from flownpu.serve.routes.ollama import ollama_routes
from flownpu.serve.routes.openai import openai_routes
from flownpu.serve.routes.responses import responses_routes
from flownpu.serve.service import Service
from flownpu.serve.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"model": "other", "messages": MESSAGES},
    "/v1/completions": {"model": "other", "prompt": "hi"},
    "/v1/messages": {"model": "other", "messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"model": "other", "messages": MESSAGES},
    "/v1/responses": {"model": "other", "input": "hi"},
    "/v1/embeddings": {"model": "other", "input": "hi"},
    "/api/chat": {"model": "other", "messages": MESSAGES},
    "/api/generate": {"model": "other", "prompt": "hi"},
    "/api/embed": {"model": "other", "input": "hi"},
    "/api/embeddings": {"model": "other", "prompt": "hi"},
    "/api/show": {"model": "other"},
    "/v1/rerank": {"model": "other", "query": "hi", "documents": ["a"]},
}
# Content types of `curl -d`, of a client without a header, and of a web page that need not ask.
KINDS = ["application/x-www-form-urlencoded", None, "text/plain", "multipart/form-data; boundary=x", "nonsense"]
ORIGIN = "https://chat.example"
APPLICATION = application(Service(ServerSettings({}, origins=(ORIGIN,))))


def send(method, path, settings=None, **request):
    """A server's response to one request."""
    app = APPLICATION if settings is None else application(Service(settings))

    async def sent():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **request)

    return asyncio.run(sent())


def test_valid_bodies_cover_every_path_with_body():
    service = Service(ServerSettings({}))
    makers = (openai_routes, anthropic_routes, embeddings_routes, responses_routes, ollama_routes)
    paths = {route.path for make in makers for route in make(service).routes if "POST" in route.methods}
    assert paths == BODIES.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", BODIES)
def test_body_of_any_type_is_json_where_no_web_page_sends_it(path, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    response = send("POST", path, content=json.dumps(BODIES[path]), headers=headers)
    assert response.status_code == 404, response.text
    assert "no model 'other' here" in response.text


@pytest.mark.parametrize("origin", [ORIGIN, "null", "https://other.example", "http://localhost"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", BODIES)
def test_body_of_another_type_from_web_page_is_refused(path, kind, origin):
    """A page of any origin can make a browser send such a body."""
    headers = {"Origin": origin} if kind is None else {"Origin": origin, "Content-Type": kind}
    response = send("POST", path, content=json.dumps(BODIES[path]), headers=headers)
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
    ],
)
def test_body_unfit_for_json_answer_is_refused(content, message):
    response = send("POST", "/v1/responses", content=content)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize("content", [b"", b'"text"'])
def test_body_without_object_is_refused(content):
    assert "expected a JSON object" in send("POST", "/v1/responses", content=content).json()["error"]["message"]


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

# SPDX-License-Identifier: Apache-2.0
"""A chat page for many users, of Open WebUI's kind, asks as its two connections do: OpenAI's, and Ollama's.

Source: open-webui/open-webui, backend/open_webui/routers/openai.py, routers/ollama.py, utils/payload.py and
utils/middleware.py (2026). The program itself takes gigabytes to install.
"""

import json

import pytest

QUESTION = {"role": "user", "content": "Tell me about loops."}
SPEC = {
    "name": "count",
    "description": "Counts.",
    "parameters": {
        "type": "object",
        "properties": {"x": {"enum": [1, 2]}},
        "required": ["x"],
        "additionalProperties": False,  # else the small model never ends
    },
}
TOOL = {"type": "function", "function": SPEC}


@pytest.fixture(scope="module")
def http(server_of_three):
    # Who asks, as the program forwards it, beside a key that this server does not want.
    user = {"X-OpenWebUI-User-Name": "Ada", "X-OpenWebUI-User-Id": "1", "X-OpenWebUI-Chat-Id": "2"}
    with server_of_three.http(headers={"Authorization": "Bearer none", **user}) as http:
        yield http


def chunks(http, **fields):
    """The documents of OpenAI's stream."""
    asked = {"model": "topics", "stream": True, "temperature": 0, "stream_options": {"include_usage": True}} | fields
    with http.stream("POST", "/v1/chat/completions", json=asked) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def lines(http, **fields):
    """The documents of Ollama's stream."""
    machine = {"num_ctx": 2048, "num_thread": 2, "num_gpu": 1, "use_mmap": True, "use_mlock": False, "num_keep": 4}
    asked = {"model": "topics:latest", "stream": True, "keep_alive": "5m", "options": {"temperature": 0} | machine}
    asked["options"] |= fields.pop("options", {})
    with http.stream("POST", "/api/chat", json=asked | fields) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(line) for line in response.iter_lines()]


def test_both_connections_list_models_and_stream_same_answer(http):
    assert {model["id"] for model in http.get("/v1/models").json()["data"]} >= {"topics", "seeing"}
    tags = http.get("/api/tags").json()["models"]
    assert {model["model"] for model in tags} >= {"topics", "seeing"}
    assert all({"name", "digest", "size", "details"} <= set(model) for model in tags)
    assert "version" in http.get("/api/version").json()
    assert "models" in http.get("/api/ps").json()
    told = chunks(http, messages=[QUESTION], max_tokens=16)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in told if chunk["choices"])
    assert text
    assert told[-1]["usage"]["completion_tokens"] == 16
    said = lines(http, messages=[QUESTION], options={"num_predict": 16})
    assert "".join(line["message"]["content"] for line in said) == text
    assert (said[-1]["done"], said[-1]["eval_count"]) == (True, 16)


def test_title_is_made_beside_conversation(http):
    """Tasks such as a chat's title and tags are asked for whole, with the conversation in one text."""
    task = {
        "role": "user",
        "content": f"### Task:\nWrite a title as JSON.\n<chat_history>\n{QUESTION}\n</chat_history>",
    }
    asked = {"model": "topics", "messages": [task], "stream": False, "max_completion_tokens": 8}
    assert http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    asked = {"model": "topics", "messages": [task], "stream": False, "num_predict": 8, "metadata": {"task": "title"}}
    assert http.post("/api/chat", json=asked).json()["eval_count"] == 8


def test_call_of_stream_is_sent_back_with_its_index(http):
    told = chunks(http, messages=[QUESTION], tools=[TOOL], tool_choice="required", max_tokens=150)
    deltas = [choice["delta"] for chunk in told for choice in chunk["choices"]]
    (call,) = [call for delta in deltas for call in delta.get("tool_calls") or []]
    assert (call["index"], call["function"]["name"]) == (0, "count")
    turns = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "Three."},
    ]
    after = chunks(http, messages=turns, tools=[TOOL], tool_choice="none", max_tokens=4)
    assert after[-1]["usage"]["completion_tokens"] == 4
    # For Ollama's connection the program rewrites the call.
    function = call["function"] | {"arguments": json.loads(call["function"]["arguments"])}
    turns[1]["tool_calls"] = [{"index": 0, "id": call["id"], "function": function}]
    assert lines(http, messages=turns, tools=[TOOL], options={"num_predict": 1})[-1]["done"]

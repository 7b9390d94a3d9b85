# SPDX-License-Identifier: Apache-2.0
"""Pictures, tools, Ollama's clients, /v1/responses and Prometheus, on a server with two models."""

import base64
import io
import json
import random

import ollama
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fixtures.shapes_pictures import draw, questions, random_scene

MESSAGES = [{"role": "user", "content": "Tell me about loops."}]
GREEDY = {"temperature": 0, "model": "topics"}
ARGUMENTS = {
    "type": "object",
    "properties": {"kind": {"enum": ["for", "while"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}
FUNCTION = {"name": "find_loop", "description": "Finds loops.", "parameters": ARGUMENTS}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "stop"}}]
CHOICE = {"type": "function", "function": {"name": "find_loop"}}


@pytest.fixture(scope="module")
def server(server_of_three):
    return server_of_three


@pytest.fixture(scope="module")
def client(server):
    return server.openai()


@pytest.fixture(scope="module")
def ollama_client(server):
    return ollama.Client(host=server.address)


def picture(seed):
    """A PNG file of shapes, a question about it, and the right answer."""
    scene = random_scene(random.Random(seed))
    file = io.BytesIO()
    draw(scene, 256).save(file, "PNG")
    asked = next(question for question in questions(scene) if question.question == "What is this?")
    return file.getvalue(), asked.question, asked.answer


def shown(seed):
    """A picture and its question as messages of OpenAI's API, and the right answer."""
    file, question, answer = picture(seed)
    url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return [{"role": "user", "content": parts}], answer


def valid(arguments):
    assert arguments["kind"] in {"for", "while"}
    assert arguments["count"] in range(10)
    assert set(arguments) == {"kind", "count"}


def test_vision_model_answers_about_picture_from_cache(client):
    """The model answers right, and continues from its KV cache, pictures included."""
    messages, answer = shown(1)
    first = client.chat.completions.create(model="seeing", messages=messages, temperature=0)
    text = first.choices[0].message.content
    assert text == answer
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "What is this?"}]
    second = client.chat.completions.create(model="seeing", messages=messages, temperature=0, max_tokens=30)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    other, other_answer = shown(2)
    assert (
        client.chat.completions.create(model="seeing", messages=other, temperature=0).choices[0].message.content
        == other_answer
    )


def test_forced_tool_call_has_arguments_of_schema(client):
    answer = client.chat.completions.create(messages=MESSAGES, tools=TOOLS, tool_choice=CHOICE, **GREEDY)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert call.function.name == "find_loop"
    valid(json.loads(call.function.arguments))
    # The conversation goes on with what the function returned.
    result = {"role": "tool", "tool_call_id": call.id, "content": "There is one."}
    messages = [*MESSAGES, choice.message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5, **GREEDY)
    assert after.choices[0].message.content


def test_tool_choice_none_answers_in_words(client):
    answer = client.chat.completions.create(messages=MESSAGES, tools=TOOLS, max_tokens=8, **GREEDY)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content[0].isupper()


def test_responses_api_answers_by_schema(client):
    answer = client.responses.create(model="topics", input="Tell me about loops.", temperature=0, max_output_tokens=12)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    chat = client.chat.completions.create(messages=MESSAGES, max_tokens=12, **GREEDY)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.output_tokens == 12
    with client.responses.stream(model="topics", input=MESSAGES, temperature=0, max_output_tokens=12) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == answer.output_text
    form = {"format": {"type": "json_schema", "name": "loop", "schema": ARGUMENTS}}
    said = client.responses.create(model="topics", input="A loop.", instructions="Be brief.", temperature=0, text=form)
    assert said.status == "completed"
    valid(json.loads(said.output_text))


def test_responses_call_tools(client):
    tools = [{"type": "function", "strict": True, **FUNCTION}]
    asked = {"model": "topics", "tools": tools, "temperature": 0}
    answer = client.responses.create(input="Find one.", tool_choice="required", **asked)
    (call,) = answer.output
    assert call.type == "function_call"
    valid(json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "None."}
    items = [{"role": "user", "content": "Find one."}, call.model_dump(), result]
    after = client.responses.create(input=items, tool_choice="none", max_output_tokens=5, **asked)
    assert after.output_text


def test_ollama_client_chats_and_lists_models(ollama_client, client):
    assert [model.model for model in ollama_client.list().models] == ["topics", "paged", "seeing"]
    assert ollama_client.show("seeing").capabilities == ["completion", "vision", "tools"]
    options = {"temperature": 0, "num_predict": 12, "num_ctx": 1024}
    expected = client.chat.completions.create(messages=MESSAGES, max_tokens=12, **GREEDY).choices[0].message.content
    answer = ollama_client.chat("topics:latest", MESSAGES, options=options)
    assert answer.message.content == expected
    assert (answer.done_reason, answer.eval_count) == ("length", 12)
    assert answer.eval_duration > 0
    parts = list(ollama_client.chat("topics", MESSAGES, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == expected
    assert parts[-1].done
    assert ollama_client.generate("topics", MESSAGES[0]["content"], options=options).response == expected
    raw = ollama_client.generate("topics", "Strings are", raw=True, options=options).response
    assert raw == client.completions.create(prompt="Strings are", max_tokens=12, **GREEDY).choices[0].text
    for name in ("topics", "paged", "seeing"):
        assert ollama_client.generate(name).done_reason == "load"
    assert {model.model for model in ollama_client.ps().models} == {"topics", "paged", "seeing"}


def test_ollama_client_sends_pictures_formats_and_tools(ollama_client):
    file, question, answer = picture(3)
    said = ollama_client.chat(
        "seeing", [{"role": "user", "content": question, "images": [file]}], options={"temperature": 0}
    )
    assert said.message.content == answer
    said = ollama_client.generate("topics", "A loop.", format=ARGUMENTS, options={"temperature": 0})
    valid(json.loads(said.response))
    # Ollama's API cannot demand a call, and this model makes none by itself.
    said = ollama_client.chat("topics", MESSAGES, tools=TOOLS, options={"temperature": 0, "num_predict": 6})
    assert said.message.content
    with pytest.raises(ollama.ResponseError, match="mirostat") as refused:
        ollama_client.chat("topics", MESSAGES, options={"mirostat": 2})
    assert refused.value.status_code == 400


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 10**6}]}),
        ("/v1/completions", {"prompt": "word " * 10**6}),
        ("/v1/messages/count_tokens", {"system": "word " * 10**6, "messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_prompt_of_megabytes_is_refused_before_it_is_cut_into_tokens(server, path, fields):
    response = server.http().post(path, json={"model": "topics", **fields})
    assert response.status_code == 400
    assert "characters long and the context holds 1500 tokens: shorten it to" in response.text


def test_metrics_name_models(server, client):
    def read():
        with server.http() as http:
            families = text_string_to_metric_families(http.get("/metrics").text)
            return {
                (sample.name, sample.labels["model"], sample.labels.get("end")): sample.value
                for family in families
                for sample in family.samples
                if "le" not in sample.labels
            }

    client.chat.completions.create(messages=MESSAGES, max_tokens=5, **GREEDY)
    before = read()
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=5, **GREEDY)
    after = read()

    def grown(name, end=None):
        key = (f"flownpu_{name}", "topics", end)
        return after[key] - before[key]

    assert grown("answers_total", "length") == 1
    assert grown("prompt_tokens_total") == answer.usage.prompt_tokens
    assert grown("cached_prompt_tokens_total") == answer.usage.prompt_tokens_details.cached_tokens
    assert grown("generated_tokens_total") == 5
    for name in ("queue", "time_to_first_token", "time_between_tokens"):
        assert grown(f"{name}_seconds_count") == 1
    assert after["flownpu_resident_bytes", "topics", None] > 2**20
    assert after["flownpu_slots", "topics", None] == 4


def test_model_is_dropped_when_memory_is_short(start_server, topics, shapes):
    """The limit has no room for two models' processes."""
    server = start_server(topics, f"seeing={shapes}", "--memory", 0.1)
    client = server.openai()

    def loaded():
        with server.http() as http:
            return [name for name, is_loaded in http.get("/health").json()["models"].items() if is_loaded]

    assert loaded() == ["topics"]
    messages = [{"role": "user", "content": "Hello"}]
    for name in ("seeing", "topics"):
        client.chat.completions.create(model=name, messages=messages, max_tokens=2, temperature=0)
        assert loaded() == [name]
    assert "topics: dropped, to make room for seeing" in server.text()

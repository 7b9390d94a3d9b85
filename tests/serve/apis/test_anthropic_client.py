# SPDX-License-Identifier: Apache-2.0
"""The stock `anthropic` client talks to the server: whole and streamed, tools, images, thoughts, errors, counts."""

import asyncio
import base64
import json

import anthropic
import jsonschema
import pytest
from PIL import Image

from flownpu.generate.answer_format import format_of
from flownpu.serve.requests.anthropic import MessagesRequest
from flownpu.serve.requests.validation import validated
from flownpu.serve.routes import anthropic as routes
from tests.generate.test_answer_format import CASES
from tests.generate.test_marked_answers import all_of, chat_of

QUESTION = [{"role": "user", "content": "Tell me about loops."}]
# This release of the client has no argument for the temperature, which older ones and other clients send.
TAKES_LIKELIEST = {"extra_body": {"temperature": 0}}
GREEDY = {"model": "topics", "messages": QUESTION, **TAKES_LIKELIEST}
DIGIT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
DOCUMENT = {"type": "text", "media_type": "text/plain", "data": "Loops."}
CITED = {"type": "document", "source": DOCUMENT, "citations": {"enabled": True}}
COUNT = {"name": "count", "description": "Counts.", "input_schema": DIGIT, "cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def client(server_of_three):
    return anthropic.Anthropic(base_url=server_of_three.address, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def expected(server_of_three):
    """The text and the prompt's tokens, as OpenAI's client gets them."""
    answer = server_of_three.openai().chat.completions.create(**GREEDY, max_tokens=24)
    return answer.choices[0].message.content, answer.usage.prompt_tokens


def test_text_equals_that_of_openais_api(client, expected):
    text, prompt_tokens = expected
    answer = client.messages.create(**GREEDY, max_tokens=24)
    assert [(block.type, block.text) for block in answer.content] == [("text", text)]
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == prompt_tokens
    assert answer.usage.output_tokens == 24


def test_stream_is_sequence_of_events_and_gives_same_message(client, expected):
    with client.messages.stream(**GREEDY, max_tokens=24) as stream:
        kinds = [event.type for event in stream if event.type != "text"]  # the client adds events of the kind "text"
        answer = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert answer.content[0].text == expected[0]
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == expected[1]


def test_stop_sequence_that_ended_answer_is_named(client, expected):
    stop = expected[0][7:14]
    answer = client.messages.create(**GREEDY, max_tokens=24, stop_sequences=["never", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == expected[0][:7]


@pytest.mark.parametrize("model", ["topics", "paged"])
def test_counted_tokens_are_those_of_prompt(client, expected, model):
    given = {"model": model, "messages": QUESTION}
    assert client.messages.count_tokens(**given).input_tokens == expected[1]
    longer = client.messages.count_tokens(**given, system=[{"type": "text", "text": "Be brief."}], tools=[COUNT])
    assert longer.input_tokens > expected[1] + 20
    too_long = [{"role": "user", "content": "loop " * 3000}]  # the context holds 1500 tokens
    assert client.messages.count_tokens(model=model, messages=too_long).input_tokens > 3000
    answer = client.messages.create(model=model, messages=QUESTION, max_tokens=0)
    assert (answer.content, answer.stop_reason, answer.usage.output_tokens) == ([], "max_tokens", 0)


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_is_called_and_its_result_is_read(client, streamed):
    asked = {**GREEDY, "max_tokens": 200, "tools": [COUNT], "tool_choice": {"type": "any"}}
    if streamed:
        with client.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**asked)
    (call,) = answer.content
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "count", "tool_use")
    jsonschema.validate(call.input, DIGIT)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Three."}]}
    turns = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**{**asked, "messages": turns, "tool_choice": {"type": "none"}, "max_tokens": 8})
    assert after.content[0].type == "text"


def test_built_in_tool_is_left_out_and_said(client, expected):
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "a\r\nb: c", "name": "x"}]
    response = client.messages.with_raw_response.create(**GREEDY, max_tokens=24, tools=tools)
    assert response.headers["FlowNPU-Left-Out"] == "web_search_20250305, a\\r\\nb: c"
    assert response.parse().content[0].text == expected[0]
    with pytest.raises(anthropic.BadRequestError, match="has no tools"):
        client.messages.create(**GREEDY, max_tokens=1, tools=tools, tool_choice={"type": "any"})


@pytest.mark.parametrize(
    "wish", [{"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"output_config": {"effort": "low"}}]
)
def test_wish_for_thoughts_is_left_out_for_model_that_knows_none(client, expected, server_of_three, wish):
    response = client.messages.with_raw_response.create(**GREEDY, max_tokens=24, **wish)
    assert response.headers["FlowNPU-Left-Out"] == "thinking"
    assert response.parse().content[0].text == expected[0]
    counted = client.messages.with_raw_response.count_tokens(model="topics", messages=QUESTION, **wish)
    assert (counted.headers["FlowNPU-Left-Out"], counted.parse().input_tokens) == ("thinking", expected[1])
    plain = client.messages.with_raw_response.create(**GREEDY, max_tokens=1, thinking={"type": "disabled"})
    assert "FlowNPU-Left-Out" not in plain.headers
    assert "left out: 'thinking'" in server_of_three.text()


def test_image_is_seen(client, server_of_three, tmp_path):
    Image.new("RGB", (64, 64), (200, 30, 30)).save(tmp_path / "red.png")
    data = base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    given = {"model": "seeing", "max_tokens": 12, **TAKES_LIKELIEST}
    answer = client.messages.create(**given, messages=[{"role": "user", "content": parts}])
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "low"}}
    same = server_of_three.openai().chat.completions.create(
        **given, messages=[{"role": "user", "content": [url, parts[1]]}]
    )
    assert answer.content[0].text == same.choices[0].message.content


@pytest.mark.parametrize("case", ["harmony", "gemma", "xml, opened by the template", "harmony, final"])
def test_thoughts_and_calls_are_blocks(case):
    template, _, said, calls = CASES[case]
    assert format_of(template) is not None
    whole = asyncio.run(routes.message(routes.events(chat_of(case), "m")))
    answer = anthropic.types.Message.model_validate(whole)
    assert "".join(block.thinking for block in answer.content if block.type == "thinking") == said.thought
    assert "".join(block.text for block in answer.content if block.type == "text") == said.text
    made = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
    assert made == [(name, json.loads(arguments)) for name, arguments in calls]
    assert answer.stop_reason == ("tool_use" if calls else "end_turn")
    without = asyncio.run(routes.message(routes.events(chat_of(case), "m", with_thoughts=False)))
    assert [block["type"] for block in without["content"]] == [
        block.type for block in answer.content if block.type != "thinking"
    ]
    events = asyncio.run(all_of(routes.events(chat_of(case), "m")))
    blocks = [(event["type"], event["index"]) for event in events if event["type"].startswith("content_block")]
    assert list(dict.fromkeys(blocks)) == [
        (f"content_block_{part}", index)
        for index in range(len(answer.content))
        for part in ("start", "delta", "stop")  # each block is closed before the next begins
    ]


def test_thoughts_that_come_back_are_the_turns_own():
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b", "citations": None}]},
        {"role": "assistant", "content": [thinking, {"type": "redacted_thinking", "data": "x"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "text", "text": "and?"}, {"type": "tool_result", "tool_use_id": "1"}]},
    ]
    asked = validated(MessagesRequest, {"model": "m", "max_tokens": 5, "system": "s", "messages": turns}).request()
    assert [turn.role for turn in asked.messages] == ["system", "user", "assistant", "tool", "user"]
    assert asked.messages[1].content == "a\nb"
    assert asked.messages[2].reasoning_content == "Hm."
    assert json.loads(asked.messages[2].tool_calls[0].function.arguments) == {"x": 1}
    assert asked.messages[4].content == "and?"


@pytest.mark.parametrize(
    ("thinking", "effort", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, None, (True, None)),
        ({"type": "disabled"}, "low", (False, None)),
        ({"type": "adaptive"}, "high", (None, None)),
        (None, "max", (None, "max")),
    ],
)
def test_choice_of_thinking_becomes_that_of_chat(thinking, effort, expected):
    body = {"model": "m", "max_tokens": 5, "messages": QUESTION, "output_config": {"effort": effort}}
    asked = validated(MessagesRequest, body | ({"thinking": thinking} if thinking else {})).request()
    assert (asked.enable_thinking, asked.reasoning_effort) == expected


@pytest.mark.parametrize(
    ("fields", "error", "kind"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"extra_body": {"temperature": 2}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "I"}]}, anthropic.BadRequestError, "last turn"),
        ({"extra_body": {"colour": 1}}, anthropic.BadRequestError, "unknown field colour"),
        ({"messages": [{"role": "user", "content": "loop " * 3000}]}, anthropic.BadRequestError, "shorten the prompt"),
        ({"messages": [{"role": "user", "content": [CITED]}]}, anthropic.BadRequestError, "should be False"),
    ],
)
def test_error_has_anthropics_form(client, fields, error, kind):
    with pytest.raises(error) as raised:
        client.messages.create(**{**GREEDY, "max_tokens": 4, **fields})
    assert raised.value.body["type"] == "error"
    assert kind in json.dumps(raised.value.body["error"])


def test_models_are_listed_with_their_context(client):
    first = next(iter(client.models.list()))
    assert (first.id, first.display_name, first.type, first.max_input_tokens) == ("topics", "topics", "model", 1500)
    assert client.models.retrieve("topics").id == "topics"

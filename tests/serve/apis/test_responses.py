# SPDX-License-Identifier: Apache-2.0
"""/v1/responses as coding agents use it: thoughts as items, results as lists, tools and items that are left out."""

import asyncio

import openai
import pytest
from openai.types.responses import Response

from flownpu.serve.errors import ApiError
from flownpu.serve.requests.responses import ResponsesRequest
from flownpu.serve.requests.validation import validated
from flownpu.serve.routes import responses as routes
from tests.generate.test_answer_format import CASES
from tests.generate.test_marked_answers import all_of, chat_of

TOOLS = [
    {"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {"type": "web_search", "search_context_size": "low"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
]
CALL = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}", "status": "completed"}
RESULT = [{"type": "input_text", "text": "Three."}, {"type": "input_text", "text": "Four."}]
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID = {"type": "output_text", "text": "So.", "annotations": []}
AGENTS = {
    "model": "topics",
    "client_metadata": {"session": "x"},
    "prompt_cache_key": "k",
    "include": ["reasoning.encrypted_content"],
    "tools": TOOLS,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Tell me about loops."}]},
        {"type": "item_reference", "id": "rs_0"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {**THOUGHT, "id": "rs_2"},
        CALL,
        {"type": "function_call_output", "call_id": "c1", "output": RESULT},
        THOUGHT,
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "So.", "annotations": []}],
        },
        {"role": "user", "content": "And?"},
    ],
}


def request(**fields):
    return validated(ResponsesRequest, {**AGENTS, **fields})


def test_items_of_agents_become_turns():
    turns = request().request().messages
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "assistant", "user"]
    assert turns[1].reasoning_content == turns[3].reasoning_content == "Hm."
    assert turns[1].tool_calls[0].function.name == "find"
    assert [part.text for part in turns[2].content] == ["Three.", "Four."]
    assert turns[3].content[0].text == "So."


def test_tools_left_out_are_named_in_header(server_of_three):
    client = server_of_three.openai()
    asked = {**AGENTS, "max_output_tokens": 4, "extra_body": {"client_metadata": AGENTS["client_metadata"]}}
    del asked["client_metadata"]
    raw = client.responses.with_raw_response.create(**asked)
    assert raw.headers["FlowNPU-Left-Out"] == "web_search, custom, item_reference, web_search_call"
    answer = raw.parse()
    assert answer.output_text
    assert [tool.type for tool in answer.tools] == ["function"]
    with pytest.raises(openai.BadRequestError, match="keeps no items"):
        client.responses.create(model="topics", input=[{"type": "item_reference", "id": "msg_1"}])


@pytest.mark.parametrize("case", ["harmony", "gemma", "xml, opened by the template", "harmony, final"])
def test_thoughts_are_item_before_text_and_calls(case):
    _, _, said, calls = CASES[case]
    document = asyncio.run(routes.response(chat_of(case), request()))
    answer = Response.model_validate(document)
    thoughts = [part.text for item in answer.output if item.type == "reasoning" for part in item.content]
    assert "".join(thoughts) == said.thought
    assert answer.output_text == said.text
    made = [(item.name, item.arguments) for item in answer.output if item.type == "function_call"]
    assert made == calls
    events = asyncio.run(all_of(routes._events(chat_of(case), request())))
    for kind, expected in (("reasoning_text", said.thought), ("output_text", said.text)):
        assert "".join(one["delta"] for one in events if one["type"] == f"response.{kind}.delta") == expected
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    items = [one["item"]["type"] for one in events if one["type"] == "response.output_item.done"]
    assert items == [item.type for item in answer.output]


def test_empty_answer_is_empty_message():
    chat = chat_of("harmony, final")
    chat.answers._text = ""
    answer = Response.model_validate(asyncio.run(routes.response(chat, request())))
    assert [item.type for item in answer.output] == ["message"]


def test_unknown_item_is_refused():
    with pytest.raises(ApiError, match="one of 'message'"):
        request(input=[{"type": "mesage", "role": "user", "content": "hi"}])

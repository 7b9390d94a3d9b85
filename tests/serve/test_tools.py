# SPDX-License-Identifier: Apache-2.0
"""Calls of functions: what templates say of them, the grammar that a model is held to, and how they are found."""

import json
import queue

import pytest

from flownpu.generate.generator_worker import GeneratorWorker
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.worker import Finished, Piece, Request
from flownpu.serve.chat_prompts import ChatModel
from flownpu.serve.requests.openai import ChatRequest
from flownpu.serve.tools import AnswerReader, CallFormat, Constraint, ToolCall

DIGIT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "count", "parameters": DIGIT}},
    {"type": "function", "function": {"name": "stop"}},
]
# As the templates of Hermes and Qwen describe calls, and that of Llama 3.
TAGGED = (
    '{% if tools %}...within <tool_call></tool_call>: {"name": <function-name>, "arguments": <args-json>}{% endif %}'
)
PARAMETERS = 'Respond in the format {"name": function name, "parameters": dictionary of names}. {{ tools }}'
CALL = '<tool_call>\n{"name":"count","arguments":{"x":3}}\n</tool_call>'


def request(**fields):
    messages = [{"role": "user", "content": "Count."}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, "tools": TOOLS, **fields})


@pytest.fixture(scope="module")
def write(topics):
    """The small model's answer, held to a constraint."""
    worker = GeneratorWorker(LanguageModel(topics), context=512)

    def write(constraint, tokens=60):
        events = queue.Queue()
        prompt = worker.model.tokens_of_text("Count.")
        worker.submit(Request(prompt, tokens, Sampling(temperature=0), guidance=constraint.guidance), events.put)
        text = ""
        while not isinstance(event := events.get(timeout=60), Finished):
            text += event.text if isinstance(event, Piece) else ""
        return text

    yield write
    worker.close()


def read(text, calls, size=1):
    """What a reader passes on, and the calls it finds, if the text comes in pieces of some size."""
    reader = AnswerReader(calls)
    passed = "".join(reader.add(text[at : at + size]) for at in range(0, len(text), size))
    rest, found = reader.finish()
    return passed + rest, found


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TAGGED, CallFormat(template_knows_tools=True, tagged=True)),
        (PARAMETERS, CallFormat(template_knows_tools=True, arguments="parameters")),
        ("{{ tools }}", CallFormat(template_knows_tools=True)),
        ("{{ messages }} <tool_call>", CallFormat(template_knows_tools=False)),
    ],
)
def test_what_a_template_says_of_calls(template, expected):
    assert CallFormat.of_template(template) == expected


@pytest.mark.parametrize("template", [TAGGED, PARAMETERS, ""])
def test_a_call_that_must_be_made_is_made(write, template):
    calls = CallFormat.of_template(template)
    constraint = Constraint.of(request(tool_choice="required", parallel_tool_calls=False), calls)
    text, (call,) = read(write(constraint), constraint.calls)
    assert text == ""
    arguments = json.loads(call.arguments)
    assert (call.name, list(arguments)) in [("count", ["x"]), ("stop", [])]
    named = request(tool_choice={"type": "function", "function": {"name": "count"}}, parallel_tool_calls=False)
    _, (call,) = read(write(Constraint.of(named, calls)), calls)
    assert call.name == "count"
    assert json.loads(call.arguments)["x"] in range(10)


@pytest.mark.parametrize("template", [TAGGED, PARAMETERS])
def test_a_text_or_json_instead_of_a_call(write, template):
    """The small model has never seen a call, and writes what it would write without tools."""
    calls = CallFormat.of_template(template)
    constraint = Constraint.of(request(), calls)
    text = write(constraint, 8)
    assert text
    assert read(text, constraint.calls) == (text, [])
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["a", "b"]}}}
    either = Constraint.of(request(response_format=form, parallel_tool_calls=False), calls)
    text, found = read(write(either), either.calls)
    assert len(found) == 1 if found else json.loads(text) in {"a", "b"}


def test_no_tools_no_constraint():
    calls = CallFormat(template_knows_tools=True)
    assert Constraint.of(request(tool_choice="none"), calls) == Constraint()
    assert Constraint.of(request(tools=None), calls) == Constraint()


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "passed", "names"),
    [
        (CALL, "", ["count"]),
        (f"I count. {CALL}\n{CALL}", "I count. ", ["count", "count"]),
        ("a < b, <tool and no call", "a < b, <tool and no call", []),
        ('I count. <tool_call>\n{"name":', 'I count. <tool_call>\n{"name":', []),
        ("", "", []),
    ],
)
def test_tagged_calls_are_found(text, passed, names, size):
    found_text, calls = read(text, CallFormat(template_knows_tools=True, tagged=True), size)
    assert found_text == passed
    assert [call.name for call in calls] == names
    assert all(call == ToolCall("count", '{"x": 3}') for call in calls)


@pytest.mark.parametrize("size", [1, 1000])
def test_an_object_is_a_call_where_calls_have_no_tags(size):
    calls = CallFormat(template_knows_tools=False)
    assert read('{"name":"stop","arguments":{}}', calls, size) == ("", [ToolCall("stop", "{}")])
    assert read('{"name":"st', calls, size) == ('{"name":"st', [])
    assert read("Text {", calls, size) == ("Text {", [])


@pytest.fixture
def model(tmp_path):
    def model(template):
        (tmp_path / "chat_template.jinja").write_text(template)
        return ChatModel(tmp_path)

    return model


CALLED = [
    {"role": "user", "content": "Count."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "count", "arguments": '{"x": 3}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "Three."},
    {"role": "tool", "tool_call_id": "2", "content": "Four."},
]


def test_a_template_that_knows_tools_gets_them_as_they_are(model):
    conversation = model(TAGGED).conversation(request(messages=CALLED), 0)
    assert conversation.tools == TOOLS
    call = {"type": "function", "function": {"name": "count", "arguments": {"x": 3}}}
    assert conversation.messages[1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert conversation.messages[2] == {"role": "tool", "content": "Three.", "tool_call_id": "1"}


def test_another_model_is_told_in_words(model):
    """Tools, calls and results become words in turns that alternate, as templates without tools want them."""
    conversation = model("{{ messages }}").conversation(request(messages=CALLED), 0)
    assert conversation.tools == []
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant", "user"]
    assert '"name": "count"' in conversation.messages[0]["content"]
    assert conversation.messages[2]["content"] == '{"name": "count", "arguments": {"x": 3}}'
    assert conversation.messages[3]["content"] == "The function's result: Three.\nThe function's result: Four."

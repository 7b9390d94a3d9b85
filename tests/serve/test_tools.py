# SPDX-License-Identifier: Apache-2.0
"""Calls of functions: the description in templates, the grammar of an answer, and the search for calls."""

import json
import queue

import pytest

from flownpu.generate.generator_worker import GeneratorWorker
from flownpu.generate.language_model import LanguageModel, Sampling
from flownpu.generate.worker import Finished, Piece, Request
from flownpu.serve.chat_prompts import ChatModel
from flownpu.serve.errors import ApiError
from flownpu.serve.grammars.compiler import Compiler
from flownpu.serve.grammars.form import AnswerForm
from flownpu.serve.requests.ollama import OllamaChat
from flownpu.serve.requests.openai import ChatRequest
from flownpu.serve.requests.responses import ResponsesRequest
from flownpu.serve.tools import AnswerReader, CallFormat, ToolCall

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
# Calls as the templates of Hermes and Qwen describe them, and as Llama 3's does.
TAGGED = (
    '{% if tools %}...within <tool_call></tool_call>: {"name": <function-name>, "arguments": <args-json>}{% endif %}'
)
PARAMETERS = 'Respond in the format {"name": function name, "parameters": dictionary of names}. {{ tools }}'
# Tools as Phi-4-mini's template reads them, and ids of calls as Mistral's templates want them.
IN_SYSTEM = (
    "{% for message in messages %}{% if 'tools' in message %}{{ message['tools'] }}{% endif %}"
    "{{ message['role'] + message['content'] }}{% endfor %}"
)
NINE = "{{ tools }}{% if call.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}"
CALL = '<tool_call>\n{"name":"count","arguments":{"x":3}}\n</tool_call>'


def request(**fields):
    messages = [{"role": "user", "content": "Count."}]
    return ChatRequest.model_validate({"model": "m", "messages": messages, "tools": TOOLS, **fields})


@pytest.fixture(scope="module")
def write(topics):
    """The small model's answer, held to a form."""
    worker, compiler = GeneratorWorker(LanguageModel(topics), context=512), Compiler()

    def write(form, tokens=60):
        events = queue.Queue()
        prompt = worker.model.tokens_of_text("Count.")
        guidance = compiler.compile(form).guidance
        worker.submit(Request(prompt, tokens, Sampling(temperature=0), guidance=guidance), events.put)
        text = ""
        while not isinstance(event := events.get(timeout=60), Finished):
            text += event.text if isinstance(event, Piece) else ""
        return text

    yield write
    worker.close()


def read(text, calls, size=1):
    """The text that a reader passes on, and the calls that it finds, if the text comes in pieces of some size."""
    reader = AnswerReader(calls)
    passed = "".join(reader.add(text[at : at + size]).text for at in range(0, len(text), size))
    rest, found = reader.finish()
    return passed + rest.text, found


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TAGGED, CallFormat(template_knows_tools=True, tagged=True)),
        (PARAMETERS, CallFormat(template_knows_tools=True, arguments="parameters")),
        ("{{ tools }}", CallFormat(template_knows_tools=True)),
        ("{{ messages }} <tool_call>", CallFormat(template_knows_tools=False)),
        ("Use tools. {# tools #} {{ 'no tools' }}", CallFormat(template_knows_tools=False)),
        (IN_SYSTEM, CallFormat(template_knows_tools=False, tools_in_system=True)),
        ("{{ messages[0].tools }}", CallFormat(template_knows_tools=False, tools_in_system=True)),
        ("{{ messages[0].tools or tools }}", CallFormat(template_knows_tools=True)),
        (NINE, CallFormat(template_knows_tools=True, short_ids=True)),
        ("{{ tools ? }}", CallFormat(template_knows_tools=False)),
    ],
)
def test_call_format_is_read_from_template(template, expected):
    assert CallFormat.of_template(template) == expected


@pytest.mark.parametrize("template", [TAGGED, PARAMETERS, ""])
def test_required_call_is_made(write, template):
    calls = CallFormat.of_template(template)
    form = AnswerForm.of(request(tool_choice="required", parallel_tool_calls=False), calls)
    text, (call,) = read(write(form), form.calls)
    assert text == ""
    arguments = json.loads(call.arguments)
    assert (call.name, list(arguments)) in [("count", ["x"]), ("stop", [])]
    named = request(tool_choice={"type": "function", "function": {"name": "count"}}, parallel_tool_calls=False)
    _, (call,) = read(write(AnswerForm.of(named, calls)), calls)
    assert call.name == "count"
    assert json.loads(call.arguments)["x"] in range(10)


@pytest.mark.parametrize("template", [TAGGED, PARAMETERS])
def test_answer_beside_tools_is_text_or_json(write, template):
    """The small model has never seen a call, and answers as it would without tools."""
    calls = CallFormat.of_template(template)
    form = AnswerForm.of(request(), calls)
    text = write(form, 8)
    assert text
    assert read(text, form.calls) == (text, [])
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["a", "b"]}}}
    either = AnswerForm.of(request(response_format=asked, parallel_tool_calls=False), calls)
    text, found = read(write(either), either.calls)
    assert len(found) == 1 if found else json.loads(text) in {"a", "b"}


def test_request_without_tools_has_no_grammar():
    calls = CallFormat(template_knows_tools=True)
    assert AnswerForm.of(request(tool_choice="none"), calls) == AnswerForm()
    assert AnswerForm.of(request(tools=None), calls) == AnswerForm()


NAMED = {"type": "function", "function": {"name": "other"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "tools": None},
        {"tool_choice": "required", "tools": []},
        {"tool_choice": NAMED},
        {"tool_choice": NAMED, "tools": None},
    ],
)
def test_impossible_tool_choice_is_refused(fields):
    with pytest.raises(ApiError, match="tool_choice") as refused:
        AnswerForm.of(request(**fields), CallFormat(template_knows_tools=True))
    assert (refused.value.status, refused.value.parameter) == (400, "tool_choice")


def test_impossible_tool_choice_of_responses_is_refused():
    for choice in ("required", {"type": "function", "name": "other"}):
        asked = ResponsesRequest.model_validate({"model": "m", "input": "Count.", "tool_choice": choice})
        with pytest.raises(ApiError, match="tool_choice"):
            AnswerForm.of(asked.request(), CallFormat(template_knows_tools=True))


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
def test_untagged_object_is_call(size):
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


def test_template_with_tools_gets_them_unchanged(model):
    conversation = model(TAGGED).conversation(request(messages=CALLED), 0)
    assert conversation.tools == TOOLS
    call = {"id": "1", "type": "function", "function": {"name": "count", "arguments": {"x": 3}}}
    assert conversation.messages[1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert conversation.messages[2] == {"role": "tool", "content": "Three.", "tool_call_id": "1"}


def test_template_without_tools_gets_words(model):
    """Tools, calls and results become words in turns that alternate, as templates without tools want them."""
    conversation = model("{{ messages }}").conversation(request(messages=CALLED), 0)
    assert conversation.tools == []
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant", "user"]
    assert '"name": "count"' in conversation.messages[0]["content"]
    assert conversation.messages[2]["content"] == '{"name": "count", "arguments": {"x": 3}}'
    assert conversation.messages[3]["content"] == "The function's result: Three.\nThe function's result: Four."


def test_template_reading_tools_from_system_message_gets_them(model):
    conversation = model(IN_SYSTEM).conversation(request(messages=CALLED), 0)
    assert conversation.tools == []
    system, user, assistant, *results = conversation.messages
    assert system["role"] == "system"
    assert json.loads(system["tools"]) == [tool["function"] for tool in TOOLS]
    assert user == {"role": "user", "content": "Count."}
    assert assistant["content"] == '{"name": "count", "arguments": {"x": 3}}'
    assert [(turn["role"], turn["content"]) for turn in results] == [("tool", "Three."), ("tool", "Four.")]
    own = [{"role": "system", "content": "Be brief."}, *CALLED]
    system = model(IN_SYSTEM).conversation(request(messages=own), 0).messages[0]
    assert (system["content"], json.loads(system["tools"])[0]["name"]) == ("Be brief.", "count")


@pytest.mark.parametrize("given", ["call_0123456789abcdef01234567", "", "abcDEF123", "überzehn1"])
def test_ids_of_calls_have_nine_letters_and_digits_where_template_wants_it(model, given):
    messages = json.loads(json.dumps(CALLED[:3]))
    messages[1]["tool_calls"][0]["id"] = messages[2]["tool_call_id"] = given
    conversation = model(NINE).conversation(request(messages=messages), 0)
    (call,), result = conversation.messages[1]["tool_calls"], conversation.messages[2]
    assert call["id"] == result["tool_call_id"]
    assert len(call["id"]) == 9
    assert call["id"].isascii()
    assert call["id"].isalnum()
    assert given != "abcDEF123" or call["id"] == given


def test_results_of_ollamas_clients_get_ids_of_their_calls():
    """These clients may send calls without ids, and results with the function's name or only in order."""
    called = {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {}}} for name in "aba"]}
    named = [{"role": "tool", "content": str(number), "tool_name": name} for number, name in enumerate("baa")]
    in_order = [{"role": "tool", "content": "x"}]
    given = {"role": "assistant", "tool_calls": [{"id": "own", "function": {"name": "c"}}]}
    answered = {"role": "tool", "content": "y", "tool_call_id": "own"}
    messages = [{"role": "user", "content": "?"}, called, *named, given, answered, called, *in_order]
    turns = OllamaChat.model_validate({"model": "m", "messages": messages}).request().messages
    first, second, third = (call.id for call in turns[1].tool_calls)
    assert len({first, second, third}) == 3
    assert [turn.tool_call_id for turn in turns[2:5]] == [second, first, third]
    assert turns[5].tool_calls[0].id == turns[6].tool_call_id == "own"
    assert turns[8].tool_call_id == turns[7].tool_calls[0].id
    assert all(len(one) == 9 and one.isalnum() for one in (first, second, third))

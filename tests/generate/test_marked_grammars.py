# SPDX-License-Identifier: Apache-2.0
"""Grammars of answers with marks: they take every answer of the wanted form, and no other."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from flownpu.generate.answer_format import MARKS, FormatReader, format_of
from flownpu.generate.guidance import rehearse
from flownpu.serve.errors import ApiError
from flownpu.serve.grammars.compiler import END_TOKEN, Compiler, Grammar
from flownpu.serve.grammars.form import AnswerForm, Marks
from flownpu.serve.requests.openai import ChatRequest
from flownpu.serve.tools import CallFormat
from tests.generate.test_answer_format import GEMMA, HARMONY, XML

WEATHER = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["°C", "°F"], "type": "string"},
    },
    "required": ["place"],
    "additionalProperties": False,
}
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}
SHAPE = {
    "type": "object",
    "properties": {
        "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1},
        "name": {"anyOf": [{"type": "null"}, {"type": "string", "minLength": 2}]},
        "inner": {"$ref": "#"},
        "any": {},
    },
    "$defs": {"point": POINT},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("weather", WEATHER), ("shape", SHAPE))
]
STOP = {"type": "function", "function": {"name": "stop"}}
TEMPLATES = {"harmony": HARMONY, "gemma": GEMMA, "xml": XML}
Takes = Callable[[Grammar, str], bool]


def marks(name: str, *, special: bool = True, begins: str | None = None) -> Marks:
    form = format_of(TEMPLATES[name])
    assert form is not None
    return Marks(form, begins or form.begin, form.special if special and name != "xml" else frozenset())  # type: ignore[arg-type]


def form_of(shown: Marks, **fields: Any) -> AnswerForm:
    messages = [{"role": "user", "content": "Weather?"}]
    asked = ChatRequest.model_validate({"model": "m", "messages": messages, "tools": [*TOOLS, STOP], **fields})
    return AnswerForm.of(asked, CallFormat(template_knows_tools=True), shown)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture(scope="module")
def takes(compiler: Compiler) -> Takes:
    """Whether a grammar takes a text to its end, of which marks in « » are special tokens."""

    def takes(grammar: Grammar, text: str) -> bool:
        tokens: list[int] = []
        for part in re.split("(«.*?»)", text):
            special = part.startswith("«")
            tokens += [END_TOKEN + 1 + MARKS.index(part[1:-1])] if special else part.encode()
        assert grammar.guidance is not None
        tokens.append(END_TOKEN)
        return rehearse(compiler._genai, compiler._choices, grammar.guidance, 0, tokens=tokens) == tokens

    return takes


THOUGHT = "«<|channel|>»analysis«<|message|>»Hm: a < b.«<|end|>»«<|start|>»assistant"
HARMONY_CALL = "«<|channel|>»commentary to=functions.weather «<|constrain|>»json«<|message|>»{}«<|call|>»"
GEMMA_CALL = '«<|tool_call>»call:weather{place:«<|"|>»{}«<|"|>»}«<tool_call|>»'
XML_CALL = "<tool_call>\n<function=weather>\n<parameter=place>\n{}\n</parameter>\n{}</function>\n</tool_call>"
DAYS = "<parameter=days>\n{}\n</parameter>\n"
STOPPED = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
PLACE = '{"place":"Zürich"}'
SHAPED = "«<|tool_call>»call:shape{}«<tool_call|>»"
# Each format: answers that are taken where a call is required, and such that are not.
REQUIRED = {
    "harmony": (
        (THOUGHT + HARMONY_CALL.replace("{}", PLACE), HARMONY_CALL.replace("{}", '{"place":"a","unit":"°F"}')),
        (
            "«<|channel|>»final«<|message|>»Sunny.",
            HARMONY_CALL.replace("{}", "{}"),
            HARMONY_CALL.replace("{}", '{"place":"a","days":10}'),
            HARMONY_CALL.replace("{}", PLACE).replace("weather", "other"),
            THOUGHT.replace("a < b", "<|end|>") + HARMONY_CALL.replace("{}", PLACE),
            HARMONY_CALL.replace("{}", PLACE) * 2,
        ),
    ),
    "gemma": (
        (
            "«<|channel>»thought\nHm.\n«<channel|>»" + GEMMA_CALL.replace("{}", 'St. Gallen, {"CH"}'),
            GEMMA_CALL.replace("{}", "a") + "«<|tool_call>»call:stop{}«<tool_call|>»",
            GEMMA_CALL.replace("{}", "a").replace("}«<tool", ',days:3,unit:«<|"|>»°C«<|"|>»}«<tool'),
            SHAPED.replace("{}", "{}"),
            SHAPED.replace("{}", "{points:[{x:1.5},{x:-2}],name:null,inner:{points:[]},any:[true,{a:{b:1}}]}"),
            SHAPED.replace("{}", '{name:«<|"|>»x«<|"|>»,any:«<|"|>»y«<|"|>»}'),
        ),
        (
            "Sunny.",
            "«<|tool_call>»call:weather{}«<tool_call|>»",
            GEMMA_CALL.replace("{}", "a").replace("}«<tool", ",days:0}«<tool"),
            GEMMA_CALL.replace("{}", '<|"|>'),
            GEMMA_CALL.replace("{}", "a").replace("}«<tool", ',unit:«<|"|>»K«<|"|>»}«<tool'),
            SHAPED.replace("{}", "{any:1,name:null}"),
            SHAPED.replace("{}", "{points:[{}]}"),
            SHAPED.replace("{}", "{,any:1}"),
        ),
    ),
    "xml": (
        (
            "<think>\nHm: a < b.\n</think>\n\n" + XML_CALL.format("Zürich\n</x>", DAYS.format(3)),
            XML_CALL.format("12", "") + "\n" + STOPPED,
            XML_CALL.format("a", "<parameter=unit>\n°C\n</parameter>\n"),
        ),
        (
            "Sunny.",
            XML_CALL.format("a", DAYS.format(10)),
            XML_CALL.format("a", DAYS.format("x")),
            XML_CALL.format("a", "<parameter=unit>\nK\n</parameter>\n"),
            STOPPED.replace("stop", "other"),
            "Hm.\n</think>\n\n" + STOPPED,
        ),
    ),
}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", REQUIRED)
def test_required_calls_are_taken_and_nothing_else(name: str, special: bool, compiler: Compiler, takes: Takes) -> None:
    shown = marks(name, special=special)
    grammar = compiler.compile(form_of(shown, tool_choice="required"))
    right, wrong = REQUIRED[name]
    schemas = {"weather": WEATHER, "shape": SHAPE, "stop": {}}
    for answer in right:
        read = FormatReader(shown.format, shown.begins, schemas)
        plain = re.sub("[«»]", "", answer)
        read.add(plain)
        assert read.finish().text == "", answer
        assert read.calls, answer
        assert takes(grammar, answer if special else plain), answer
    for answer in wrong:
        assert not takes(grammar, answer if special else re.sub("[«»]", "", answer)), answer


def test_thought_that_the_template_began_is_ended_first(compiler: Compiler, takes: Takes) -> None:
    grammar = compiler.compile(form_of(marks("xml", begins="thought"), tool_choice="required"))
    assert takes(grammar, "Hm.\n</think>\n\n" + STOPPED)
    assert not takes(grammar, STOPPED)


@pytest.mark.parametrize("name", TEMPLATES)
def test_schema_is_followed_behind_thoughts_and_beside_calls(name: str, compiler: Compiler, takes: Takes) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": POINT}}
    said = ("«<|channel|>»final«<|message|>»" if name == "harmony" else "") + '{"x":1}'
    thought = {"harmony": THOUGHT, "gemma": "«<|channel>»thought\nHm.\n«<channel|>»", "xml": "<think>\nHm.</think>\n\n"}
    alone = compiler.compile(form_of(marks(name), response_format=asked, tools=None))
    beside = compiler.compile(form_of(marks(name), response_format=asked))
    for grammar in (alone, beside):
        for before in ("", thought[name]):
            assert takes(grammar, before + said)
            assert not takes(grammar, before + said.replace("1", '"a"'))
    call = REQUIRED[name][0][0]
    assert takes(beside, call)
    assert not takes(alone, call)


def test_calls_are_as_many_as_the_request_allows(compiler: Compiler, takes: Takes) -> None:
    calls = GEMMA_CALL.replace("{}", "a") * 2
    several = compiler.compile(form_of(marks("gemma"), tool_choice="required"))
    one = compiler.compile(form_of(marks("gemma"), tool_choice="required", parallel_tool_calls=False))
    assert takes(several, calls)
    assert not takes(one, calls)
    named = {"type": "function", "function": {"name": "stop"}}
    chosen = compiler.compile(form_of(marks("gemma"), tool_choice=named))
    assert takes(chosen, "«<|tool_call>»call:stop{}«<tool_call|>»")
    assert not takes(chosen, GEMMA_CALL.replace("{}", "a"))


def test_keywords_that_are_not_enforced_are_reported(compiler: Compiler) -> None:
    left_out = {name: compiler.compile(form_of(marks(name), tool_choice="required")).left_out for name in TEMPLATES}
    assert left_out["harmony"] == ()
    assert set(left_out["gemma"]) == {"shape#/properties/points/minItems", "shape#/properties/name/anyOf/1/minLength"}


def test_answers_without_form_have_no_grammar() -> None:
    assert form_of(marks("gemma")) == form_of(marks("gemma"), tools=None) == AnswerForm()
    with pytest.raises(ApiError, match="the request has no tools"):
        form_of(marks("gemma"), tools=None, tool_choice="required")

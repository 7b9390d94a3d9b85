# SPDX-License-Identifier: Apache-2.0
"""Answers with marks of thoughts and calls: each family's, whole, token by token and letter by letter."""

import json

import pytest

from flownpu.generate.answer_format import Call, FormatReader, Said, format_of

# Parts of the families' templates, by which they are recognised.
HARMONY = "{{ '<|start|>' + role + '<|channel|>final<|message|>' }}"
GEMMA = "{{ '<|tool_call>call:' }} {{ '<|channel>thought' }}"
XML = "<tool_call>\\n<function=example> {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}"
WEATHER = {"weather": {"properties": {"place": {"type": "string"}, "days": {"type": "integer"}}}, "stop": {}}
CASES = {
    "harmony": (
        HARMONY,
        "<|channel|>analysis<|message|>They ask for weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"place": "Zürich <|", "days": 3}',
        Said("I look it up.", "They ask for weather."),
        [Call("weather", '{"place": "Zürich <|", "days": 3}')],
    ),
    "harmony with recipient before channel": (
        HARMONY,
        " to=functions.stop<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
        Said(),
        [Call("stop", "{}")],
    ),
    "harmony, final": (HARMONY, "<|channel|>final<|message|>Yes: a < b\n\n- c", Said("Yes: a < b\n\n- c"), []),
    "harmony, unlearnt": (HARMONY, "Just a text.", Said("Just a text."), []),
    "harmony, damaged call": (
        HARMONY,
        "<|channel|>commentary to=functions.weather<|message|>{place: 3",
        Said("{place: 3"),
        [],
    ),
    "harmony, function that was not offered": (
        HARMONY,
        "<|channel|>commentary to=functions.other<|message|>{}",
        Said("{}"),
        [],
    ),
    "gemma": (
        GEMMA,
        '<|channel>thought\nRain?\n<channel|>\nI look it up.\n<|tool_call>call:weather{place:<|"|>St. Gallen, {CH}<|"|>'
        ",days:3}<tool_call|><|tool_call>call:stop{}<tool_call|>",
        Said("I look it up.", "Rain?"),
        [Call("weather", '{"place": "St. Gallen, {CH}", "days": 3}'), Call("stop", "{}")],
    ),
    "gemma with objects": (
        GEMMA,
        '<|tool_call>call:weather{places:[{name:<|"|>a"b<|"|>,far:true},{name:<|"|>é<|"|>,size:1.5}],none:null}<tool_call|>',
        Said(),
        [Call("weather", '{"places": [{"name": "a\\"b", "far": true}, {"name": "é", "size": 1.5}], "none": null}')],
    ),
    "gemma, text alone": (GEMMA, "a <| b <|tool", Said("a <| b <|tool"), []),
    "gemma, call that is cut short": (GEMMA, "So: <|tool_call>call:stop{", Said("So:call:stop{"), []),
    "xml, opened by the template": (
        XML,
        "Rain?\n</think>\n\nI look it up.\n\n<tool_call>\n<function=weather>\n<parameter=place>\n12\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n"
        "</tool_call>",
        Said("I look it up.", "Rain?"),
        [Call("weather", '{"place": "12", "days": 3}'), Call("stop", "{}")],
    ),
}


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("case", CASES)
def test_parts_are_told_apart_whole_and_streamed(case: str, size: int) -> None:
    template, answer, expected, calls = CASES[case]
    form = format_of(template)
    assert form is not None
    reader = FormatReader(form, form.begins(template, thinks=True), WEATHER)
    said = [reader.add(answer[at : at + size]) for at in range(0, len(answer), size)]
    said.append(reader.finish())
    assert Said("".join(one.text for one in said), "".join(one.thought for one in said)) == expected
    assert reader.calls == calls
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


def test_text_is_passed_on_as_soon_as_it_is_certain() -> None:
    form = format_of(GEMMA)
    assert form is not None
    reader = FormatReader(form)
    assert reader.add("Hello <") == Said("Hello")
    assert reader.add("b> ") == Said(" <b>")
    assert reader.add("<|channel>thought\nHm") == Said("", "Hm")
    assert reader.add(", yes<channel|>So") == Said("So", ", yes")


@pytest.mark.parametrize("template", ["", "{{ '<tool_call>' }}{{ tools }}", "{{ '<think>' }}"])
def test_other_templates_have_no_format(template: str) -> None:
    assert format_of(template) is None


def test_template_opens_thought_unless_thinking_is_off() -> None:
    form = format_of(XML)
    assert form is not None
    assert form.begins(XML, thinks=True) == "thought"
    assert form.begins(XML, thinks=False) == "text"
    assert form.begins("<function=x>", thinks=True) == "text"


def test_marks_of_templates_are_special_tokens() -> None:
    harmony, gemma = (format_of(template) for template in (HARMONY, GEMMA))
    assert harmony is not None
    assert gemma is not None
    assert {"<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|start|>", "<|constrain|>"} <= harmony.special
    assert {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'} <= gemma.special

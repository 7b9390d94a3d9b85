# SPDX-License-Identifier: Apache-2.0
r"""Answers in which a model marks its thoughts and its calls of functions: the marks of three families, as data.

    harmony (gpt-oss)  <|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>TEXT
                       <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>
    Gemma 4            <|channel>thought\nTHOUGHT<channel|>TEXT
                       <|tool_call>call:NAME{key:<|"|>text<|"|>,other:3}<tool_call|>
    Qwen's XML         <think>\nTHOUGHT</think>\n\nTEXT   (a template may write the first mark itself)
                       <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>

Marks that are special tokens become text in the answers of such models, for `FormatReader` to find them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

State = Literal["text", "thought", "call", "header"]
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of functions' arguments, by the functions' names."""


class Call(NamedTuple):
    """A call of a function, with its arguments as an object in JSON."""

    name: str
    arguments: str


class Written(NamedTuple):
    """How parts of an answer are written, for a grammar; {} stands for a text, as do the names in the others."""

    thought: str
    text: str
    call: str
    """With {name} and {arguments}."""
    arguments: Literal["json", "quoted", "elements"]
    """JSON; the same with <|"|> around texts, and bare keys; or an XML element for each argument."""
    between: str | None
    """The text between two calls; None: an answer has one."""


class Said(NamedTuple):
    """Further parts of an answer."""

    text: str = ""
    thought: str = ""


@dataclass(frozen=True)
class AnswerFormat:
    """The marks of a family: which end a part of an answer, and what part follows."""

    sign: str
    """A pattern that the family's chat templates contain, and no others."""
    begin: State
    marks: Mapping[State, Mapping[str, State]]
    read_call: Callable[[str, str, Schemas], Call | None]
    """A call, from its header and its body; None: it is none."""
    written: Written
    opened: str | None = None
    """A pattern of templates that begin the answer's thought themselves."""

    @property
    def special(self) -> frozenset[str]:
        """The names that special tokens may have which are marks or parts of calls."""
        marks = {mark.strip() for following in self.marks.values() for mark in following}
        return frozenset({*marks, *_OTHERS} | {mark.removesuffix("thought") for mark in marks})

    def begins(self, template: str, *, thinks: bool) -> State:
        """The part that an answer begins with; `thinks`: whether the request left thinking on."""
        return "thought" if thinks and self.opened and re.search(self.opened, template) else self.begin


QUOTE = '<|"|>'
_OTHERS = ("<|channel|>", "<|constrain|>", "<|start|>", QUOTE)


def format_of(template: str) -> AnswerFormat | None:
    """The format that a chat template describes; None: answers have no marks, or others."""
    return next((form for form in _FORMATS if re.search(form.sign, template)), None)


class FormatReader:
    """Takes an answer's text piece by piece; tells thoughts, text and calls apart.

    Spaces and newlines at the ends of a part count as its marks.

    Args:
        form: the answer's format.
        state: the part that the answer begins with; None: the format's.
        functions: the functions that may be called.
    """

    def __init__(self, form: AnswerFormat, state: State | None = None, functions: Schemas | None = None) -> None:
        self._form, self._state, self._functions = form, state or form.begin, functions or {}
        self._held = self._header = self._call = self._spaces = ""
        self._is_empty = True  # the part so far
        self.calls: list[Call] = []

    def add(self, text: str) -> Said:
        """Takes further text; returns what is certain to be text or thought."""
        self._held += text
        said = Said()
        while True:
            marks = self._form.marks[self._state]
            places = [(place, mark) for mark in marks if (place := self._held.find(mark)) >= 0]
            if not places:
                break
            place, mark = min(places)
            said = self._take(said, self._held[:place])
            self._held = self._held[place + len(mark) :]
            said = self._turn(said, marks[mark])
        kept = _possible_beginning(self._held, self._form.marks[self._state])
        taken, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return self._take(said, taken)

    def finish(self) -> Said:
        """The rest of the answer; a call that is incomplete counts as text."""
        said = self._take(Said(), self._held)
        self._held = ""
        if self._state == "call":
            return self._turn(said, "text")
        left = self._header if self._state == "header" and "<|" not in self._header else ""
        return said._replace(text=said.text + left.strip())

    def _take(self, said: Said, text: str) -> Said:
        """Adds text to the part that it belongs to."""
        if self._state == "header":
            self._header += text
        elif self._state == "call":
            self._call += text
        else:
            text = self._spaces + text
            text = text.lstrip() if self._is_empty else text
            kept = text.rstrip()
            self._spaces = text[len(kept) :]
            self._is_empty = self._is_empty and not kept
            place = "text" if self._state == "text" else "thought"
            said = said._replace(**{place: getattr(said, place) + kept})
        return said

    def _turn(self, said: Said, following: State) -> Said:
        """Ends a part of the answer."""
        if self._state == "header":  # of harmony
            is_call = re.search(r"\bto=\S", self._header) is not None
            following = "call" if is_call else "thought" if _CHANNEL.search(self._header) else "text"
        elif self._state == "call":
            call = self._form.read_call(self._header, self._call, self._functions)
            if call is not None and (not self._functions or call.name in self._functions):
                self.calls.append(call)
            else:
                said = said._replace(text=said.text + self._call.strip())
        self._call = self._spaces = ""
        self._header = "" if following == "header" else self._header
        self._state, self._is_empty = following, True
        return said


def reader_of(template: str) -> FormatReader | None:
    """A reader of an answer in a conversation without tools; None: answers have no marks."""
    form = format_of(template)
    return None if form is None else FormatReader(form, form.begins(template, thinks=True))


_CHANNEL = re.compile(r"<\|channel\|>\s*analysis|^\s*analysis")


def _possible_beginning(text: str, marks: Mapping[str, State]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    longest = max(map(len, marks)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def _object(name: str, text: str) -> Call | None:
    """A call whose arguments are an object in JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return Call(name, json.dumps(value, ensure_ascii=False)) if isinstance(value, dict) else None


def _harmony_call(header: str, body: str, _functions: Schemas) -> Call | None:
    found = re.search(r"\bto=(?:functions\.)?([^\s<]+)", header)
    return _object(found[1], body.strip() or "{}") if found else None


def _gemma_call(_header: str, body: str, _functions: Schemas) -> Call | None:
    found = re.fullmatch(r"\s*call:([^\s{]+)\s*(\{.*\})\s*", body, re.DOTALL)
    if found is None:
        return None
    parts = found[2].split(QUOTE)
    # Every other part is a text; in those between them keys stand without quotes.
    keyed = [re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", r'\1"\2":', part) for part in parts[::2]]
    texts = [json.dumps(part) for part in parts[1::2]]
    return _object(found[1], "".join(part for pair in zip(keyed, [*texts, ""], strict=False) for part in pair))


def _xml_call(_header: str, body: str, functions: Schemas) -> Call | None:
    found = re.fullmatch(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*", body, re.DOTALL)
    if found is None:
        return None
    properties = functions.get(found[1], {}).get("properties", {})
    values: dict[str, Any] = {}
    for key, value in re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", found[2], re.DOTALL):
        described = properties.get(key) if isinstance(properties, Mapping) else None
        is_text = isinstance(described, Mapping) and described.get("type") == "string"
        try:
            values[key] = value if is_text else json.loads(value)
        except (ValueError, RecursionError):
            values[key] = value
    return Call(found[1], json.dumps(values, ensure_ascii=False))


_ENDS: dict[str, State] = dict.fromkeys(("<|end|>", "<|call|>", "<|return|>", "<|start|>"), "header")
_HARMONY = AnswerFormat(
    sign=r"<\|channel\|>",
    begin="header",
    marks={"header": {"<|message|>": "text"}, "text": _ENDS, "thought": _ENDS, "call": _ENDS},
    read_call=_harmony_call,
    written=Written(
        thought="<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        text="<|channel|>final<|message|>{}",
        call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
        arguments="json",
        between=None,
    ),
)
_GEMMA = AnswerFormat(
    sign=r"<\|tool_call>",
    begin="text",
    marks={
        "text": {"<|channel>thought\n": "thought", "<|tool_call>": "call", "<|tool_response>": "text"},
        "thought": {"<channel|>": "text"},
        "call": {"<tool_call|>": "text"},
    },
    read_call=_gemma_call,
    written=Written(
        thought="<|channel>thought\n{}<channel|>",
        text="{}",
        call="<|tool_call>call:{name}{arguments}<tool_call|>",
        arguments="quoted",
        between="",
    ),
)
_XML = AnswerFormat(
    sign=r"<function=",
    begin="text",
    marks={
        "text": {"<think>": "thought", "<tool_call>": "call"},
        "thought": {"</think>": "text"},
        "call": {"</tool_call>": "text"},
    },
    read_call=_xml_call,
    written=Written(
        thought="<think>\n{}</think>\n\n",
        text="{}",
        call="<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        arguments="elements",
        between="\n",
    ),
    opened=r"assistant\\n<think>\\n|['\"]<think>\\n['\"]",
)
_FORMATS = (_HARMONY, _GEMMA, _XML)
MARKS = tuple(sorted(mark for mark in frozenset().union(*(form.special for form in _FORMATS)) if mark.endswith(">")))
"""The names that special tokens may have which are marks of a format."""

# SPDX-License-Identifier: Apache-2.0
"""Functions that a model may call: their description in a prompt, and the search for calls in an answer.

A call is a JSON object with the function's name and its arguments. A model whose chat template puts calls between
<tool_call> and </tool_call> writes them like this, and may write several; another model answers with the object alone.
The key of the arguments is the template's, too.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from flownpu.generate.answer_format import AnswerFormat, FormatReader, Said, Schemas, State
from flownpu.generate.stop_texts import StopTexts
from flownpu.serve.requests.openai import Function

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class CallFormat:
    """How a model writes its calls."""

    template_knows_tools: bool
    """Whether the template reads the variable `tools`."""
    tagged: bool = False
    """Whether calls stand between BEGIN and END."""
    arguments: str = "arguments"
    """The key of the arguments in a call's object."""
    tools_in_system: bool = False
    """Whether the template reads tools, a text, from the system message's field `tools`, as that of Phi-4-mini does."""
    short_ids: bool = False
    """Whether the template refuses ids of calls that have not nine letters and digits, as those of Mistral's models."""

    @classmethod
    def of_template(cls, template: str) -> "CallFormat":
        """The format that a chat template describes."""
        knows, in_system = _tools_read(template)
        other = re.search(r'"parameters": (?:dictionary|<args)', template) is not None
        short_ids = re.search(r"\|\s*length\s*!=\s*9\b", template) is not None
        key = "parameters" if knows and other else "arguments"
        return cls(knows, knows and BEGIN in template, key, in_system and not knows, short_ids)

    def call_id(self, name: str) -> str:
        """The id of a call in the form that the template takes; a call and its result get the same."""
        if not self.short_ids or re.fullmatch("[a-zA-Z0-9]{9}", name):
            return name
        return hashlib.sha256(name.encode()).hexdigest()[:9]

    def instruction(self, tools: Sequence[Function]) -> str:
        """The instruction for a model whose chat template does not describe tools."""
        described = "\n".join(json.dumps(function.model_dump(exclude_none=True)) for function in tools)
        return (
            f'You may call these functions:\n{described}\nTo call one, answer with {{"name": its name, '
            f'"{self.arguments}": {{its arguments}}}} and nothing else.'
        )


def _tools_read(template: str) -> tuple[bool, bool]:
    """Whether a template reads the variable `tools`, and whether it reads a message's field of that name."""
    try:
        lexed = Environment().lex(template)  # noqa: S701 nothing is rendered
        tokens = [(kind, value) for _, kind, value in lexed if kind != "whitespace"]
    except TemplateSyntaxError:  # the error is reported when the template is rendered
        return False, False
    pairs = list(zip([("", ""), *tokens], tokens, strict=False))
    variable = any(token == ("name", "tools") and before[1] != "." for before, token in pairs)
    field = any(token == ("name", "tools") and before[1] == "." for before, token in pairs)
    return variable, field or any(kind == "string" and value[1:-1] == "tools" for kind, value in tokens)


@dataclass(frozen=True)
class ToolCall:
    """One call in an answer."""

    name: str
    arguments: str
    """An object in JSON."""

    def document(self, index: int | None = None) -> dict[str, Any]:
        """OpenAI's object of the call; in streams it has the call's index, too."""
        place = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return {**place, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


class AnswerReader:
    """Takes an answer's text piece by piece; passes on the text outside calls.

    Args:
        calls: how the model writes calls; None: there are none.
    """

    def __init__(self, calls: CallFormat | None) -> None:
        self._calls = calls
        self._stop = StopTexts((BEGIN,) if calls and calls.tagged else ())
        self.text = ""
        """The answer so far, calls included."""
        self._passed = 0

    def add(self, text: str) -> Said:
        """Takes further text; returns the text that is certainly outside calls."""
        self.text += text
        if self._calls is None:
            passed = text
        elif self._calls.tagged:
            passed = self._stop.add(text)
        else:
            passed = "" if self.text.lstrip().startswith("{") else text
        self._passed += len(passed)
        return Said(passed)

    def finish(self) -> tuple[Said, list[ToolCall]]:
        """The rest of the text, and the calls; a call that is incomplete counts as text."""
        rest = self.text[self._passed :]
        if self._calls is None or not rest:
            return Said(rest), []
        found = self._objects(rest)
        return (Said(), found) if found else (Said(rest), [])

    def _objects(self, text: str) -> list[ToolCall]:
        assert self._calls is not None
        parts = text.split(BEGIN) if self._calls.tagged else [text]
        found = []
        for part in parts:
            try:
                value = json.loads(part.replace(END, "").strip())
                found.append(ToolCall(value["name"], json.dumps(value[self._calls.arguments], ensure_ascii=False)))
            except (ValueError, KeyError, TypeError):
                continue
        return found


class MarkedReader(AnswerReader):
    """The same for an answer whose thoughts and calls have marks."""

    def __init__(self, form: AnswerFormat, begins: State | None, functions: Schemas) -> None:
        super().__init__(None)
        self._marked = FormatReader(form, begins, functions)

    def add(self, text: str) -> Said:
        """Takes further text; returns the text and the thoughts that are certainly such."""
        self.text += text
        return self._marked.add(text)

    def finish(self) -> tuple[Said, list[ToolCall]]:
        """The rest of the text and of thoughts, and the calls."""
        rest = self._marked.finish()
        return rest, [ToolCall(*call) for call in self._marked.calls]

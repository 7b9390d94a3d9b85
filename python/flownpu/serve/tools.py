# SPDX-License-Identifier: Apache-2.0
"""Functions that a model may call: a grammar that its calls must follow, and how they are found in its answer.

A call is a JSON object with the function's name and its arguments. A model whose chat template puts calls between
<tool_call> and </tool_call> writes them like this, and may write several; another model answers with the object alone.
The key of the arguments is the template's, too.
"""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flownpu.generate.stop_texts import StopTexts
from flownpu.generate.worker import Guidance
from flownpu.serve.requests.openai import ChatRequest, Function, NamedTool

__all__ = ["AnswerReader", "CallFormat", "Constraint", "ToolCall", "json_guidance"]

BEGIN, END = "<tool_call>", "</tool_call>"
# Forbids white space that the schema does not ask for: a small model might write spaces up to the token limit.
COMPACT = {"x-guidance": {"whitespace_flexible": False}}


@dataclass(frozen=True)
class CallFormat:
    """How a model writes its calls."""

    template_knows_tools: bool
    tagged: bool = False
    """Whether calls stand between BEGIN and END."""
    arguments: str = "arguments"
    """The key of the arguments in a call's object."""

    @classmethod
    def of_template(cls, template: str) -> "CallFormat":
        """The format that a chat template describes."""
        knows = re.search(r"\btools\b", template) is not None
        other = re.search(r'"parameters": (?:dictionary|<args)', template) is not None
        return cls(knows, knows and BEGIN in template, "parameters" if knows and other else "arguments")

    def instruction(self, tools: Sequence[Function]) -> str:
        """The instruction for a model whose chat template does not describe tools."""
        described = "\n".join(json.dumps(function.model_dump(exclude_none=True)) for function in tools)
        return (
            f'You may call these functions:\n{described}\nTo call one, answer with {{"name": its name, '
            f'"{self.arguments}": {{its arguments}}}} and nothing else.'
        )


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


@dataclass(frozen=True)
class Constraint:
    """The grammar that an answer must follow, and how calls are written if it may have some."""

    guidance: Guidance | None = None
    calls: CallFormat | None = None

    @classmethod
    def of(cls, request: ChatRequest, calls: CallFormat) -> "Constraint":
        """The constraint that a request's tools and response format demand."""
        text = _schema(request)
        tools = offered(request)
        if not tools:
            return cls(json_guidance(text) if text is not None else None)
        must = request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
        several = calls.tagged and request.parallel_tool_calls is not False
        return cls(Guidance("lark_grammar", _grammar(tools, calls, text, must=must, several=several)), calls)


def offered(request: ChatRequest) -> list[Function]:
    """The functions that may be called."""
    if request.tool_choice == "none":
        return []
    functions = [tool.function for tool in request.tools or []]
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        functions = [function for function in functions if function.name == name]
    return functions


def _schema(request: ChatRequest) -> dict[str, Any] | None:
    """The JSON schema that the answer's text must follow; None: any text."""
    match request.response_format:
        case None:
            return None
        case form if form.type == "json_object":
            return {"type": "object"}
        case form if form.type == "json_schema":
            return form.json_schema.schema_
    return None


def json_guidance(schema: dict[str, Any]) -> Guidance:
    """Guidance that admits only JSON that follows a schema."""
    return Guidance("json_schema", json.dumps(COMPACT | schema))


def _grammar(
    tools: Sequence[Function], calls: CallFormat, text: dict[str, Any] | None, *, must: bool, several: bool
) -> str:
    """A grammar for an answer with calls, in llguidance's dialect of Lark.

    To tell text and calls apart: text before tagged calls does not contain BEGIN; text instead of an untagged call does
    not begin with "{".

    Args:
        tools: the functions that may be called.
        calls: how calls are written.
        text: the JSON schema of an answer without calls; None: any text.
        must: whether the answer must be a call.
        several: whether there may be more than one call.
    """
    call = f'"{BEGIN}\\n" object "\\n{END}"' if calls.tagged else "object"
    many = f'{call} ("\\n" {call})*' if several else call
    choices = (
        ["calls"] if must else ["calls", "text"] if not calls.tagged or text is not None else ["text", "text calls"]
    )
    objects = [
        COMPACT
        | {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                calls.arguments: function.parameters or {"type": "object", "additionalProperties": False},
            },
            "required": ["name", calls.arguments],
            "additionalProperties": False,
        }
        for function in tools
    ]
    if text is not None:
        free = f"text: %json {json.dumps(COMPACT | text)}"
    elif calls.tagged:
        free = f"text: TEXT\nTEXT: /(.|\\n)*/ & ~/(.|\\n)*{BEGIN}(.|\\n)*/"
    else:
        free = "text: TEXT\nTEXT: /([^{\\s](.|\\n)*)?/"
    rules = [f"start: {' | '.join(choices)}", f"calls: {many}"]
    rules += [f"object: {' | '.join(f'object_{i}' for i in range(len(objects)))}"]
    rules += [f"object_{i}: %json {json.dumps(schema)}" for i, schema in enumerate(objects)]
    return "\n".join([*rules, *([] if must else [free])]) + "\n"


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

    def add(self, text: str) -> str:
        """Takes further text; returns what is certainly outside calls."""
        self.text += text
        if self._calls is None:
            passed = text
        elif self._calls.tagged:
            passed = self._stop.add(text)
        else:
            passed = "" if self.text.lstrip().startswith("{") else text
        self._passed += len(passed)
        return passed

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest of the text, and the calls; a call that is incomplete counts as text."""
        rest = self.text[self._passed :]
        if self._calls is None or not rest:
            return rest, []
        found = self._objects(rest)
        return ("", found) if found else (rest, [])

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

# SPDX-License-Identifier: Apache-2.0
"""The form that a request asks of its answer, and the grammar of that form."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flownpu.generate.answer_format import AnswerFormat, State
from flownpu.serve.errors import invalid
from flownpu.serve.requests.openai import ChatRequest, Function, NamedTool
from flownpu.serve.tools import BEGIN, END, CallFormat

Write = Callable[[dict[str, Any]], str]
"""Writes a schema as the grammar has it."""


@dataclass(frozen=True)
class Parameters:
    """A function's name, and the JSON schema of its arguments."""

    name: str
    schema: dict[str, Any]


@dataclass(frozen=True)
class Marks:
    """How a model marks thoughts and calls in an answer."""

    format: AnswerFormat
    begins: State
    """The part that the answer begins with."""
    special: frozenset[str]
    """The marks that are special tokens of the model; the others are text."""


@dataclass(frozen=True)
class AnswerForm:
    """JSON of a schema, calls of functions, or either; any text if there is neither schema nor function."""

    schema: dict[str, Any] | None = None
    """The JSON schema of an answer without calls; None: any text."""
    functions: tuple[Parameters, ...] = ()
    calls: CallFormat | None = None
    """How calls are written; None: there are none, or `marks` says it."""
    marks: Marks | None = None
    """The marks of thoughts and calls; None: there are none."""
    must_call: bool = False
    several_calls: bool = False

    @classmethod
    def of(cls, request: ChatRequest, calls: CallFormat, marks: Marks | None = None) -> "AnswerForm":
        """The form that a request's tools and response format ask for.

        With `marks`, calls may be damaged where the model may also answer with any text.

        Raises:
            ApiError: `tool_choice` asks for a call that no tool can be.
        """
        schema = _schema(request)
        functions = offered(request)
        must_call = request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
        if marks is not None and schema is None and not must_call:
            return cls()
        if not functions:
            return cls(schema, marks=marks)
        separate = calls.tagged if marks is None else marks.format.written.between is not None
        nothing = {"type": "object", "additionalProperties": False}
        return cls(
            schema,
            tuple(Parameters(function.name, function.parameters or nothing) for function in functions),
            None if marks else calls,
            marks,
            must_call=must_call,
            several_calls=separate and request.parallel_tool_calls is not False,
        )


def offered(request: ChatRequest) -> list[Function]:
    """The functions that may be called.

    Raises:
        ApiError: `tool_choice` asks for a call that no tool can be.
    """
    functions = [tool.function for tool in request.tools or []]
    match request.tool_choice:
        case "none":
            return []
        case "required" if not functions:
            raise invalid(
                'tool_choice is "required", and the request has no tools: give some, or leave tool_choice out',
                "tool_choice",
            )
        case NamedTool(function=wanted):
            named = [function for function in functions if function.name == wanted.name]
            if not named:
                there = ", ".join(function.name for function in functions) or "none"
                raise invalid(
                    f"tool_choice names the function {wanted.name!r}, which is not among the tools: {there}",
                    "tool_choice",
                )
            return named
    return functions


def _schema(request: ChatRequest) -> dict[str, Any] | None:
    match request.response_format:
        case None:
            return None
        case form if form.type == "json_object":
            return {"type": "object"}
        case form if form.type == "json_schema":
            return form.json_schema.schema_
    return None


def write_rules(form: AnswerForm, write: Write) -> str:
    """A form's grammar, in llguidance's dialect of Lark.

    To tell text and calls apart: text before tagged calls does not contain BEGIN; text instead of an untagged call does
    not begin with "{". A function's schema stands alone, not in the schema of the call around it, because its
    references are relative to it.

    Args:
        form: a schema, functions, or both.
        write: writes each of the schemas.
    """
    text = None if form.schema is None else f"text: {write(form.schema)}"
    if form.calls is None:
        assert text is not None
        return f"start: text\n{text}\n"
    calls, tagged = form.calls, form.calls.tagged
    call = f'"{BEGIN}\\n" call "\\n{END}"' if tagged else "call"
    either = ["calls", "text"] if not tagged or text is not None else ["text", "text calls"]
    rules = [f"start: {' | '.join(['calls'] if form.must_call else either)}"]
    rules += [f'calls: {call} ("\\n" {call})*' if form.several_calls else f"calls: {call}"]
    rules += [f"call: {' | '.join(f'call_{number}' for number in range(len(form.functions)))}"]
    for number, function in enumerate(form.functions):
        begin = json.dumps(f'{{"name":{json.dumps(function.name)},{json.dumps(calls.arguments)}:')
        rules += [f'call_{number}: {begin} arguments_{number} "}}"', f"arguments_{number}: {write(function.schema)}"]
    if not form.must_call:
        rules += [text] if text is not None else _free_text(tagged)
    return "\n".join(rules) + "\n"


def _free_text(tagged: bool) -> Sequence[str]:
    any_text = f"/(.|\\n)*/ & ~/(.|\\n)*{BEGIN}(.|\\n)*/" if tagged else "/([^{\\s](.|\\n)*)?/"
    return ["text: TEXT", f"TEXT: {any_text}"]

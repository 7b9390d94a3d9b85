# SPDX-License-Identifier: Apache-2.0
"""Chat templates as transformers renders them: Jinja's sandbox with the same settings, functions and variables.

The reference is `apply_chat_template` of transformers 5.23: this module renders what it renders. OpenAI's messages
leave three things open, and each template expects one form of them: a text is a string or a list of parts, the content
beside calls is absent, null or empty, and a call's arguments are an object or JSON. transformers passes messages on as
they are; this module tries the forms until the template takes one.

A template is untrusted code: `template_process` runs this module within bounds of time and memory.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, sandbox, utils
from jinja2.parser import Parser
from jinja2.runtime import Macro

from flownpu.generate.turns import text_of

REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a turn's reasoning; transformers fills the first two from whichever is there."""
PROBE = "flownpu-probe"
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}},
}
PART = re.compile(r"""["']type["']: *["']text["']""")
"""Matches a content part printed as a Python or JSON object: the template printed the list instead of its text."""


class _Generation(ext.Extension):
    """{% generation %}: the model's own text, which transformers marks for training; here it is only written."""

    tags = {"generation"}  # noqa: RUF012 as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """The tag's body, with a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("written"), [], [], body).set_lineno(line)

    def written(self, caller: Macro) -> str:
        """The body's text."""
        return str(caller())


class _Dictionaries:
    """The value of `dict` in a template: it makes dictionaries, and gives no access to the class."""

    def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
        """A dictionary."""
        return dict(*pairs, **named)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        """A dictionary with one value at all keys."""
        return dict.fromkeys(keys, value)


class _Namespace(utils.Namespace):
    """Jinja's namespace; it refuses names that begin with an underscore, as Python's own do."""

    def __init__(*args: Any, **named: Any) -> None:
        values = dict(*args[1:], **named)
        for name in values:
            _check_name(name)
        utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute that begins with an underscore: {name!r}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(1)
def _environment() -> sandbox.ImmutableSandboxedEnvironment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _Dictionaries(),
        "namespace": _Namespace,
    }
    return environment


@lru_cache(16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def variables(template: str) -> frozenset[str]:
    """The names that a template reads and may not have set before, except Jinja's and transformers' own functions.

    Raises:
        jinja2.TemplateSyntaxError: it is not a template.
        RecursionError: it is nested too deeply.
    """
    return frozenset(meta.find_undeclared_variables(_environment().parse(template)) - set(_environment().globals))


def render(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], values: Mapping[str, Any], most: int
) -> str:
    """A conversation as a template writes it, up to where the model's next reply begins.

    Args:
        template: the template.
        messages: the turns as OpenAI's API has them, except that a call's arguments are an object.
        tools: descriptions of functions; empty: the template is given none.
        values: the template's further variables: special tokens by name, and what the request sets.
        most: characters that the conversation may be long.

    Raises:
        jinja2.TemplateError: the template is none, or refuses the conversation with `raise_exception`.
        OverflowError: the template writes more than `most` characters.
        Exception: whatever else the template's code raises.
    """
    passed = {"documents": None, **values, "tools": list(tools) or None, "add_generation_prompt": True}
    turns = [_readable(template, turn, passed) for turn in messages]
    refused: list[Exception] = []
    for form in _forms(turns):
        try:
            return _write(template, form, passed, most)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            refused.append(error)
    # The template's message about the conversation says more than an error of its code.
    raise next((error for error in refused if type(error) is jinja2.TemplateError), refused[0])


def _write(template: str, messages: Sequence[Mapping[str, Any]], passed: Mapping[str, Any], most: int) -> str:
    pieces: list[str] = []
    length = 0
    for piece in _compiled(template).generate({**passed, "messages": messages}):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            raise OverflowError(f"it writes more than {most} characters")
    return "".join(pieces)


def _forms(turns: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The conversation in the forms that templates want where turns have calls; the first is what transformers gives.

    DeepSeek's templates compare content with none and join arguments as text; others demand a content.
    """

    def form(turn: dict[str, Any], content: dict[str, Any], *, objects: bool) -> dict[str, Any]:
        turn = {name: value for name, value in turn.items() if value is not None}
        calls = turn.get("tool_calls")
        if not calls:
            return turn
        return {**content, **turn, "tool_calls": calls if objects else [_with_text(call) for call in calls]}

    yield [form(turn, {}, objects=True) for turn in turns]
    if any(turn.get("tool_calls") for turn in turns):
        for content, objects in ((None, True), (None, False), ("", True), ("", False)):
            yield [form(turn, {"content": content}, objects=objects) for turn in turns]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are JSON."""
    function = call.get("function", {})
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _readable(template: str, turn: Mapping[str, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
    """A turn whose content is of the kind that the template reads, with its reasoning by the names that are read."""
    found = dict(turn)
    reasoning = next((turn[name] for name in REASONING if turn.get(name) is not None), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    tokens = {name: value for name, value in passed.items() if name.endswith("_token") and isinstance(value, str)}
    takes = _takes(template, str(turn.get("role")), tuple(tokens.items()), tools=passed["tools"] is not None)
    content = turn.get("content")
    if isinstance(content, list) and "parts" not in takes:
        found["content"] = text_of(content)
    elif isinstance(content, str) and takes == {"parts"}:
        found["content"] = _parts(content)
    return found


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@lru_cache(64)
def _takes(template: str, role: str, tokens: tuple[tuple[str, str], ...], *, tools: bool) -> frozenset[str]:
    """The kinds of content that a template reads from a role's turn, "text" and "parts"; found by rendering each kind.

    A template that takes no parts refuses them, or writes Python's own form of the list.
    """
    passed = {**dict(tokens), "documents": None, "tools": [TOOL] if tools else None, "add_generation_prompt": True}
    asks_in_parts = role != "user" and _takes(template, "user", tokens, tools=tools) == {"parts"}
    asks = {"role": "user", "content": _parts("a") if asks_in_parts else "a"}
    found = set()
    for kind, content in (("text", PROBE), ("parts", _parts(PROBE))):
        turns = _conversation({"role": role, "content": content}, asks)
        for form in _forms(turns):
            try:
                written = _write(template, form, passed, 1 << 20)
            except Exception:  # noqa: BLE001, S112 the template does not take it; `render` tells why if it must
                continue
            if PROBE in written and not (kind == "parts" and PART.search(written)):
                found.add(kind)
            break
    return frozenset(found)


def _conversation(turn: dict[str, Any], asks: dict[str, Any]) -> list[dict[str, Any]]:
    """The shortest conversation in which a turn of that role may stand; `asks` is a user's turn."""
    match turn["role"]:
        case "user":
            return [turn]
        case "system":
            return [turn, asks]
        case "assistant":
            return [asks, turn, asks]
    call = {"id": "callprobe", "type": "function", "function": {"name": "f", "arguments": {}}}
    return [asks, {"role": "assistant", "tool_calls": [call]}, {**turn, "name": "f", "tool_call_id": call["id"]}]

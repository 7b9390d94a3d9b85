# SPDX-License-Identifier: Apache-2.0
"""Grammars of answers with marks of thoughts and calls.

An answer may think before it has the wanted form. A mark that is a special token of the model stands in the grammar as
this token; another one is text, and the text before it ends where it first comes.
"""

import json
import re

from flownpu.generate.answer_format import MARKS
from flownpu.serve.grammars.arguments import arguments_as_elements, arguments_in_quotes, pattern_of
from flownpu.serve.grammars.form import AnswerForm, Marks, Write

_MARK = re.compile(f"({'|'.join(map(re.escape, sorted(MARKS, key=len, reverse=True)))})")
ANY = r"(.|\n)*"


def write_marked_rules(form: AnswerForm, marks: Marks, write: Write) -> tuple[str, list[str]]:
    """A form's grammar as `form.write_rules` writes it, and the places of keywords that it does not enforce.

    Args:
        form: a schema, functions, or both.
        marks: the marks.
        write: writes each of the schemas.
    """
    written, special = marks.format.written, marks.special
    answers, rules, left_out = [], _thought(marks), []
    if form.functions:
        between = literal(written.between or "", special)
        answers.append(f"call ({between} call)*" if form.several_calls else "call")
        rules.append(f"call: {' | '.join(f'call_{number}' for number in range(len(form.functions)))}")
    if form.schema is not None and not form.must_call:
        answers.append("text")
        begin, end = (literal(part, special) for part in written.text.split("{}"))
        rules += [f"text: {begin} schema {end}", f"schema: {write(form.schema)}"]
    for number, function in enumerate(form.functions):
        begin, end = (
            literal(part, special) for part in written.call.replace("{name}", function.name).split("{arguments}")
        )
        name, schema = f"arguments_{number}", write(function.schema)
        rules.append(f"call_{number}: {begin} {name} {end}")
        if written.arguments == "json":
            rules.append(f"{name}: {schema}")
            continue
        made = (arguments_in_quotes if written.arguments == "quoted" else arguments_as_elements)(name, schema, special)
        rules += made.rules
        left_out += [f"{function.name}{place}" for place in made.left_out]
    return "\n".join([*rules, f"answer: {' | '.join(answers)}"]) + "\n", list(dict.fromkeys(left_out))


def literal(text: str, special: frozenset[str]) -> str:
    """A text in a rule, with its special tokens."""
    parts = [part for part in _MARK.split(text) if part]
    return " ".join(part if part in special else json.dumps(part) for part in parts)


def _thought(marks: Marks) -> list[str]:
    """The rules `start`, an optional thought before `answer`, and of the thought."""
    begin, end = marks.format.written.thought.split("{}")
    first, *rest = (part for part in _MARK.split(end) if part)
    after = literal("".join(rest), marks.special)
    known = "|".join(map(pattern_of, marks.format.marks["thought"]))
    if first in marks.special:
        # The same names, spelt with other tokens, would end the thought for whoever reads the answer's text.
        rules = [f"rest: THOUGHT {first} {after}", f"THOUGHT: /{ANY}/ & ~/{ANY}({known}){ANY}/"]
    else:
        rules = [f"rest: thought {after}", f"thought[lazy]: /{ANY}({known})/"]
    opened = "rest" if marks.begins == "thought" else f"({literal(begin, marks.special)} rest)?"
    return [f"start: {opened} answer", *rules]

# SPDX-License-Identifier: Apache-2.0
r"""Grammars of a call's arguments that are not JSON: texts in other quotes and bare keys, or an element for each.

    quoted    {place:<|"|>Zürich<|"|>,days:3}
    elements  <parameter=place>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n

Properties stand in the schema's order, those that are not required may be left out, and there are no others. A value
that has no text in it is JSON of its own schema.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from flownpu.generate.answer_format import QUOTE

_ANY = r"(.|\n)*"
_PLAIN_KEY = re.compile(r"[^\s{}\[\],:\"<>]+")
_TEXT_KEYWORDS = ("pattern", "format", "minLength", "maxLength")
_LIST_KEYWORDS = ("minItems", "maxItems", "prefixItems")
_SCALARS = ("integer", "number", "boolean", "null")
_END = "\n</parameter>"


def pattern_of(text: str) -> str:
    """A regular expression of a text, as it stands between slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")


@dataclass
class Arguments:
    """Rules of the arguments' grammar, and the places of the schema's keywords that they do not enforce."""

    rules: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def arguments_in_quotes(name: str, schema: str, special: frozenset[str]) -> Arguments:
    """The rule `name` and those that it needs, for an object with texts in `QUOTE`.

    Args:
        name: of the rule.
        schema: the JSON schema, as the grammar has it.
        special: the marks that are special tokens of the model.
    """
    writer = _Quoted(name, schema, is_special=QUOTE in special)
    writer.made.rules.append(f"{name}: {writer.object(writer.root, '#')}")
    return writer.made


def arguments_as_elements(name: str, schema: str, _special: frozenset[str]) -> Arguments:
    """The same for an element for each argument, of which texts are not quoted."""
    writer = _Writer(name, schema)
    properties, required = writer.root.get("properties", {}), writer.root.get("required", [])
    parts = []
    for key, value in properties.items():
        begin = json.dumps(f"<parameter={key}>\n")
        if writer.is_text(value):
            texts = writer.texts(value)
            if texts is None:
                writer.leave_out(value, f"#/properties/{key}", _TEXT_KEYWORDS)
            kept = f"({'|'.join(map(pattern_of, texts))})" if texts else _ANY
            rule = writer.rule(f"/{kept}{pattern_of(_END)}/", lazy=True)
            part = f'{begin} {rule} "\\n"'
        else:
            part = f"{begin} {writer.json(value)} {json.dumps(_END + chr(10))}"
        parts.append(part if key in required else f"({part})?")
    writer.made.rules.append(f"{name}: {' '.join(parts) or chr(34) * 2}")
    return writer.made


class _Writer:
    def __init__(self, name: str, schema: str) -> None:
        self.name = name
        self.made = Arguments()
        self.root: dict[str, Any] = json.loads(schema.removeprefix("%json "))
        self._options = {"x-guidance": self.root.pop("x-guidance", {})}
        self._definitions = self.root.pop("$defs", {})

    def rule(self, body: str, *, lazy: bool = False) -> str:
        """Adds a rule; returns its name."""
        name = f"{self.name}_{len(self.made.rules)}"
        self.made.rules.append(f"{name}{'[lazy]' * lazy}: {body}")
        return name

    def json(self, schema: Any) -> str:
        """JSON of a schema inside the root."""
        inside = schema if isinstance(schema, dict) else ({} if schema else {"not": {}})
        if '"$ref"' not in json.dumps(inside):
            return f"%json {json.dumps({**self._options, **inside})}"
        # References count from this schema, which is another one than in the request.
        definitions = {"$defs": {**self._definitions, "root": self.root}}
        text = json.dumps({**self._options, **inside, **definitions})
        return "%json " + text.replace('"$ref": "#"', '"$ref": "#/$defs/root"')

    def resolved(self, schema: Any) -> Any:
        """The schema that a reference leads to."""
        for _ in range(len(self._definitions) + 1):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            target = schema["$ref"].removeprefix("#/$defs/")
            schema = self.root if target == "#" else self._definitions[target]
        return schema

    def is_text(self, schema: Any) -> bool:
        """Whether all values are texts."""
        schema = self.resolved(schema)
        return isinstance(schema, dict) and schema.get("type") == "string"

    def texts(self, schema: Any) -> list[str] | None:
        """The values that are allowed, of those that are texts; None: any."""
        schema = self.resolved(schema)
        if "const" in schema:
            return [schema["const"]]
        return [one for one in schema["enum"] if isinstance(one, str)] if "enum" in schema else None

    def leave_out(self, schema: Any, place: str, keywords: tuple[str, ...]) -> None:
        """Reports keywords of a schema that the grammar does not enforce."""
        self.made.left_out += [f"{place}/{key}" for key in keywords if key in self.resolved(schema)]


class _Quoted(_Writer):
    def __init__(self, name: str, schema: str, *, is_special: bool) -> None:
        super().__init__(name, schema)
        self._mark = QUOTE if is_special else json.dumps(QUOTE)
        self._referred: dict[str, str] = {}
        self._has_any = False
        if is_special:
            self._text = f"{self._mark} {self.name.upper()}_TEXT {self._mark}"
            self.made.rules.append(f"{self.name.upper()}_TEXT: /{_ANY}/ & ~/{_ANY}{pattern_of(QUOTE)}{_ANY}/")
        else:
            self._text = f"{self._mark} {self.rule(f'/{_ANY}{pattern_of(QUOTE)}/', lazy=True)}"

    def object(self, schema: dict[str, Any], place: str) -> str:
        """An object, whose properties stand in the schema's order."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not properties:
            return '"{}"' if schema.get("additionalProperties") is False else f"{self._any()}_object"
        parts = [
            (f"{self._key(key)} {self.value(value, f'{place}/properties/{key}')}", key in required)
            for key, value in properties.items()
        ]
        # From the last to the first: what follows a property, and an object that begins with it or a later one.
        following, beginning = '""', '""'
        for part, is_required in reversed(parts):
            one = self.rule(part)
            beginning = f"{one} {following}" if is_required else f"({one} {following} | {beginning})"
            following = self.rule(f'"," {one} {following}' if is_required else f'("," {one})? {following}')
            beginning = self.rule(beginning)
        return f'"{{" {beginning} "}}"'

    def value(self, schema: Any, place: str) -> str:
        """A value of a schema inside the root."""
        if isinstance(schema, dict) and "$ref" in schema:
            return self._reference(schema["$ref"])
        return self._either(self._choices(schema if isinstance(schema, dict) else {}, place))

    def _choices(self, schema: dict[str, Any], place: str) -> list[str]:
        """The values of a schema without a reference, as alternatives."""
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return [self.value(one, f"{place}/{key}/{i}") for i, one in enumerate(schema[key])]
        if "enum" in schema or "const" in schema:
            return [self._constant(one) for one in schema.get("enum", [schema.get("const")])]
        kinds = schema.get("type", "object" if "properties" in schema else "any")
        return [self._of_kind(kind, schema, place) for kind in (kinds if isinstance(kinds, list) else [kinds])]

    def _of_kind(self, kind: str, schema: dict[str, Any], place: str) -> str:
        match kind:
            case "string":
                self.leave_out(schema, place, _TEXT_KEYWORDS)
                made = self._text
            case "array":
                self.leave_out(schema, place, _LIST_KEYWORDS)
                item = self.rule(self.value(schema.get("items", True), f"{place}/items"))
                made = f'"[" ({item} ("," {item})*)? "]"'
            case "object":
                made = self.object(schema, place)
            case "integer" | "number" | "boolean" | "null":
                made = self.json({**schema, "type": kind})
            case _:
                made = self._any()
        return made

    def _any(self) -> str:
        """A value, of any schema."""
        name = f"{self.name}_any"
        if not self._has_any:
            self._has_any = True
            scalar, pair = self.json({"type": list(_SCALARS)}), f'/{_PLAIN_KEY.pattern}/ ":" {name}'
            self.made.rules += [
                f'{name}: {self._text} | {scalar} | "[" ({name} ("," {name})*)? "]" | {name}_object',
                f'{name}_object: "{{" ({pair} ("," {pair})*)? "}}"',
            ]
        return name

    def _reference(self, target: str) -> str:
        if target not in self._referred:
            name = self._referred[target] = f"{self.name}_referred_{len(self._referred)}"
            key = target.removeprefix("#/$defs/")
            schema = self.root if target == "#" else self._definitions[key]
            self.made.rules.append(f"{name}: {self.value(schema, target)}")
        return self._referred[target]

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._mark} {json.dumps(value)} {self._mark}" if value else f"{self._mark} {self._mark}"
        if isinstance(value, list):
            return " ".join(['"["', ' "," '.join(map(self._constant, value)), '"]"'])
        if isinstance(value, dict):
            pairs = (f"{self._key(key)} {self._constant(one)}" for key, one in value.items())
            return " ".join(['"{"', ' "," '.join(pairs), '"}"'])
        return json.dumps(json.dumps(value))

    @staticmethod
    def _key(key: str) -> str:
        return json.dumps((key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)) + ":")

    @staticmethod
    def _either(choices: list[str]) -> str:
        return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"

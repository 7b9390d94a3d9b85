# SPDX-License-Identifier: Apache-2.0
"""JSON schemas as GenAI's guidance (llguidance) can enforce them, and the keywords that it cannot enforce.

A keyword that cannot be enforced is left out, so that the answer is JSON of a wider schema, and its place is reported.
A schema that no value follows, or whose references lead nowhere, is an error.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from urllib.parse import quote

from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with

from flownpu.errors import FlowNPUError

Refusal = Callable[[str], str]
"""Why GenAI's guidance does not take a grammar; empty if it does."""

MOST_ITEMS = 10_000
"""The largest `minItems` and `maxItems`: llguidance of GenAI 0.18 has some rules for each item, 29 MB for 10,000."""
MOST_MULTIPLE = 20_000
"""The largest `multipleOf`, without its decimal point: llguidance has a state for each remainder, 0.1 s for 20,000."""
MOST_NESTED = 100
"""Schemas in one another: llguidance's reader of JSON takes 128 levels, and a property takes two."""
SAFE = 2**53 - 1
"""The largest integer whose neighbours are exact in JSON's numbers (RFC 8259, section 6)."""

KEPT = {"const", "enum", "type", "required"}
"""Keywords without schemas in them that are enforced as they are."""
NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
LENGTH = ("minLength", "maxLength")
SIZE = ("minProperties", "maxProperties")
SCHEMAS_BY_NAME = {"properties", "patternProperties"}
LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
SCHEMAS = {"additionalProperties", "additionalItems"}
COMPOSED = {"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"}
"""Keywords whose schemas decide which properties are evaluated."""
UNENFORCED: dict[str, Any] = {
    **dict.fromkeys(("not", "if", "propertyNames", "contains", "unevaluatedItems", "unevaluatedProperties"), True),
    **{key: {} for key in ("dependentRequired", "dependentSchemas", "dependencies")},
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), None),
    "uniqueItems": False,
}
"""Keywords that llguidance does not know and that would change which values are valid, with the value that changes
nothing. Any other unknown keyword is an annotation."""


@dataclass(frozen=True)
class Enforced:
    """A schema reduced to the keywords that guidance can enforce."""

    text: str
    """The schema as a grammar has it."""
    left_out: tuple[str, ...]
    """Places of the keywords that are not enforced, such as "#/properties/a/uniqueItems"."""


def enforce(schema: dict[str, Any], refusal: Refusal) -> Enforced:
    """The part of a schema that guidance can enforce.

    Raises:
        FlowNPUError: no value follows the schema, it is no JSON schema, or guidance cannot follow it.
    """
    resolver = Registry().resolver_with_root(_resource(schema))
    translation = _Translation(refusal)
    translation.names[id(schema)] = "#"
    root = translation.translate(schema, _Place("#", resolver))
    # Schemas that are referred to; translating one may find more.
    for found in iter(lambda: translation.found.pop(0) if translation.found else None, None):
        name, target, place = found
        translation.definitions[name] = translation.translate(target, place)
    translated = {**root, **({"$defs": translation.definitions} if translation.definitions else {})}
    text = _written(translated, coerce_one_of=False)
    reason = refusal(f"start: {text}\n")
    if "oneOf" in reason and translation.one_of:
        # llguidance has alternatives of which exactly one holds, but only if it sees that they exclude one another.
        translation.left_out.extend(translation.one_of)
        text = _written(translated, coerce_one_of=True)
        reason = refusal(f"start: {text}\n")
    if reason:
        raise FlowNPUError(reason)
    return Enforced(text, tuple(dict.fromkeys(translation.left_out)))


def _written(schema: dict[str, Any], *, coerce_one_of: bool) -> str:
    # White space is allowed only if the schema asks for it, because a small model might write spaces up to the limit.
    options = {"whitespace_flexible": False, "coerce_one_of": coerce_one_of}
    return f"%json {json.dumps({'x-guidance': options} | schema)}"


def _resource(schema: dict[str, Any]) -> Any:
    dialect = schema.get("$schema")
    known = specification_with(dialect, default=DRAFT202012) if isinstance(dialect, str) else DRAFT202012
    resource = known.create_resource(schema)
    try:
        resource.id()
    except AttributeError as error:
        raise FlowNPUError("expected a text as the schema's id, got another value") from error
    return resource


@dataclass(frozen=True)
class _Place:
    """A place in a schema: its JSON pointer as a URI's fragment, and how references are resolved there."""

    path: str
    resolver: Any
    """The resolver of `referencing` for references at this place."""
    depth: int = 0

    def under(self, *names: str | int) -> "_Place":
        steps = [quote(str(name).replace("~", "~0").replace("/", "~1"), safe="~$") for name in names]
        return _Place("/".join([self.path, *steps]), self.resolver, self.depth + 1)

    def error(self, expected: str, got: object) -> FlowNPUError:
        return FlowNPUError(f"expected {expected} at {self.path} of the schema, got {json.dumps(got)[:60]}")


@dataclass
class _Translation:
    refusal: Refusal
    left_out: list[str] = field(default_factory=list)
    one_of: list[str] = field(default_factory=list)
    """The places of `oneOf` in the schema."""
    names: dict[int, str] = field(default_factory=dict)
    """References to schemas, by their id()."""
    definitions: dict[str, Any] = field(default_factory=dict)
    found: list[tuple[str, Any, _Place]] = field(default_factory=list)
    """Schemas that are referred to and not translated yet: their names in `definitions`, and where they are."""

    def translate(self, schema: Any, place: _Place) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise place.error("a schema, which is an object or a truth value,", schema)
        if place.depth > MOST_NESTED:
            raise FlowNPUError(f"expected at most {MOST_NESTED} levels of schemas in one another, got more")
        if isinstance(schema.get("$id"), str) and place.depth:
            place = _Place(place.path, place.resolver.in_subresource(_resource(schema)), place.depth)
        result: dict[str, Any] = {}
        for key, value in schema.items():
            if key in KEPT:
                result[key] = value
            else:
                self._add(result, key, value, place)
        if schema.get("unevaluatedProperties", True) is not True and not COMPOSED & schema.keys():
            result.setdefault("additionalProperties", self.translate(schema["unevaluatedProperties"], place))
            self.left_out.remove(place.under("unevaluatedProperties").path)
        self._add_numbers(result, schema, place)
        self._add_text(result, schema, place)
        self._add_items(result, schema, place)
        self._check_names(result, schema, place)
        return result

    def _add(self, result: dict[str, Any], key: str, value: Any, place: _Place) -> None:
        """Adds a keyword that has schemas in it."""
        below = place.under(key)
        if key in SCHEMAS_BY_NAME:
            if not isinstance(value, dict):
                raise below.error("an object of schemas", value)
            result[key] = {name: self.translate(one, below.under(name)) for name, one in value.items()}
        elif key in LISTS or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise below.error("a list of schemas", value)
            result[key] = [self.translate(one, below.under(number)) for number, one in enumerate(value)]
            if key == "oneOf":
                self.one_of.append(below.path)
        elif key in SCHEMAS or key == "items":
            result[key] = self.translate(value, below)
        elif key == "$ref":
            result[key] = self._reference(value, below)
        elif key in UNENFORCED and value != UNENFORCED[key]:
            self.left_out.append(below.path)

    def _reference(self, reference: Any, place: _Place) -> str:
        if not isinstance(reference, str):
            raise place.error("a reference", reference)
        try:
            resolved = place.resolver.lookup(reference)
        except (Unresolvable, ValueError, TypeError, AttributeError) as error:
            raise FlowNPUError(
                f"{reference!r} at {place.path} leads to nothing in the schema; nothing outside it is fetched"
            ) from error
        name = self.names.get(id(resolved.contents))
        if name is None:
            name = self.names[id(resolved.contents)] = f"#/$defs/{len(self.names)}"
            at = _Place(reference if reference.startswith("#") else place.path, resolved.resolver, 1)
            self.found.append((name.removeprefix("#/$defs/"), resolved.contents, at))
        return name

    def _add_numbers(self, result: dict[str, Any], schema: dict[str, Any], place: _Place) -> None:
        bounds = {key: schema[key] for key in NUMBER if key in schema}
        multiple = bounds.get("multipleOf")
        if isinstance(multiple, int | float) and math.isfinite(multiple) and _digits(multiple) > MOST_MULTIPLE:
            self.left_out.append(place.under("multipleOf").path)
            del bounds["multipleOf"]
        kind = schema.get("type")
        head = {"type": kind if kind == "integer" else "number"}
        if bounds and self._refuses(head | bounds):
            # Bounds such as -2**63 are too large for llguidance. Within its bounds are all numbers on which JSON's
            # readers agree.
            nearer = {key: _safe(value) for key, value in bounds.items()}
            if self._refuses(head | nearer):
                self.left_out.extend(place.under(key).path for key in bounds)
                return
            bounds = nearer
        result.update(bounds)

    def _add_text(self, result: dict[str, Any], schema: dict[str, Any], place: _Place) -> None:
        for keys in (("pattern",), ("format",), LENGTH):
            bounds = {key: schema[key] for key in keys if key in schema}
            if bounds and self._refuses({"type": "string"} | bounds):
                self.left_out.extend(place.under(key).path for key in bounds)
            else:
                result.update(bounds)

    def _add_items(self, result: dict[str, Any], schema: dict[str, Any], place: _Place) -> None:
        for key in ("minItems", "maxItems"):
            count = schema.get(key)
            if not isinstance(count, int) or count <= MOST_ITEMS:
                result.update({key: count} if key in schema else {})
            elif key == "minItems":
                raise FlowNPUError(f"{key} at {place.path} is {count}, and this server takes up to {MOST_ITEMS}")
            else:
                self.left_out.append(place.under(key).path)

    def _check_names(self, result: dict[str, Any], schema: dict[str, Any], place: _Place) -> None:
        """Adds bounds on the number of properties; leaves out keywords on names that guidance cannot check."""
        patterns = dict.fromkeys(result.get("patternProperties", {}), True)
        if patterns and self._refuses({"type": "object", "patternProperties": patterns}):
            # Without the patterns, other properties must be allowed; otherwise properties with such names would be
            # excluded.
            for key in {"patternProperties", "additionalProperties"} & result.keys():
                del result[key]
                self.left_out.append(place.under(key).path)
        bounds = {key: schema[key] for key in SIZE if key in schema}
        shape = {key: result[key] for key in ("required", "additionalProperties") if key in result}
        named = {"properties": dict.fromkeys(result.get("properties", {}), True)}
        if bounds and self._refuses({"type": "object"} | shape | named | bounds):
            self.left_out.extend(place.under(key).path for key in bounds)
        else:
            result.update(bounds)

    def _refuses(self, schema: dict[str, Any]) -> bool:
        """Whether guidance cannot follow such a schema, although values for it may exist."""
        reason = self.refusal(f"start: {_written(schema, coerce_one_of=True)}\n")
        return bool(reason) and "unsatisfiable" not in reason.lower()


def _digits(number: float) -> int:
    """A number without its decimal point and the zeros at its end."""
    digits = Decimal(repr(number + 0)).normalize().as_tuple().digits  # + 0: True is 1
    return int("".join(map(str, digits)))


def _safe(bound: Any) -> Any:
    return max(-SAFE, min(SAFE, bound)) if isinstance(bound, int) and not isinstance(bound, bool) else bound

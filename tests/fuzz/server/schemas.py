# SPDX-License-Identifier: Apache-2.0
"""JSON Schemas: common ones, absurd ones, and small ones with high costs."""

from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz.server import values

NAMES = ("kind", "count", "items", "größe", "a b", "x", "next", "$id")
WORDS = ("for", "while", "€", "漢字", "😀", 'a"b\\c', "", "\n")
# Formats and patterns of strings. No grammar can enforce some of them.
FORMATS = ("date-time", "uuid", "email", "uri", "path", "password", "duration", "ipv4", "binary", "no such format")
PATTERNS = ("^[a-z]{2,4}$", r"^\d+$", r"\S", "^(?=a)b", r"^\p{L}+$", r"\bfoo\b", r"^(a)\1$", "(", "[", "(a*)*b", "^€+$")


TYPES: tuple[Any, ...] = ("object", "array", "string", "number", "integer", ["string", "null"], "thing", [])
REFERENCES = ("#", "#/$defs/A", "#/nowhere", "https://example.com/x.json")


def usual(random: Random, depth: int = 3) -> Any:
    """A schema whose every keyword must hold: an answer that is whole satisfies it."""
    definitions = {name: _usual(random, depth - 1, ()) for name in random.sample(("A", "B", "C"), random.randint(0, 3))}
    schema = _object(random, depth, tuple(definitions))
    return {**schema, "$defs": definitions} if definitions else schema


def _usual(random: Random, depth: int, definitions: tuple[str, ...]) -> Any:
    if definitions and random.random() < 0.4:
        return {"$ref": f"#/$defs/{random.choice(definitions)}"}
    simple: list[Callable[[], Any]] = [
        lambda: {"type": random.choice(("boolean", "null"))},
        lambda: {"type": "integer", "minimum": random.randint(-9, 9), "maximum": random.randint(10, 99)},
        lambda: {"enum": random.sample((*WORDS, 1, None, True), random.randint(1, 4))},
        lambda: {"const": random.choice((*WORDS, 0, False))},
        lambda: {"type": "string", "maxLength": random.randint(1, 20)},
        lambda: {"anyOf": [{"type": "null"}, {"enum": random.sample(WORDS, 2)}]},
    ]
    if depth > 0 and random.random() < 0.5:
        if random.random() < 0.5:
            return _object(random, depth - 1, definitions)
        least = random.randint(0, 2)
        return {
            "type": "array",
            "items": _usual(random, depth - 1, definitions),
            "minItems": least,
            "maxItems": least + random.randint(0, 2),
        }
    return random.choice(simple)()


def _object(random: Random, depth: int, definitions: tuple[str, ...]) -> dict[str, Any]:
    names = random.sample(NAMES, random.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _usual(random, depth - 1, definitions) for name in names},
        "required": random.sample(names, random.randint(0, len(names))),
        "additionalProperties": False,
    }


def odd(random: Random, depth: int = 3) -> Any:
    """A schema of any keywords, with valid or invalid values."""
    if depth < 0 or random.random() < 0.1:
        return random.choice((True, False, {}, values.value(random, 1)))
    keywords: dict[str, Callable[[], Any]] = {
        "type": lambda: random.choice(TYPES),
        "properties": lambda: {values.text(random, 12): odd(random, depth - 1) for _ in range(random.randint(0, 3))},
        "items": lambda: odd(random, depth - 1),
        "prefixItems": lambda: [odd(random, depth - 1)] * random.randint(0, 3),
        "required": lambda: [values.text(random, 12), "a"],
        "enum": lambda: [values.value(random, 1) for _ in range(random.randint(0, 3))],
        "const": lambda: values.value(random, 2),
        "anyOf": lambda: [odd(random, depth - 1) for _ in range(random.randint(0, 3))],
        "oneOf": lambda: [odd(random, depth - 1) for _ in range(random.randint(1, 3))],
        "allOf": lambda: [odd(random, depth - 1) for _ in range(random.randint(1, 3))],
        "not": lambda: odd(random, depth - 1),
        "if": lambda: odd(random, depth - 1),
        "then": lambda: odd(random, depth - 1),
        "contains": lambda: odd(random, depth - 1),
        "propertyNames": lambda: odd(random, depth - 1),
        "patternProperties": lambda: {random.choice(PATTERNS): odd(random, depth - 1)},
        "additionalProperties": lambda: random.choice((True, False, odd(random, depth - 1))),
        "dependentRequired": lambda: {"a": ["b"]},
        "uniqueItems": lambda: True,
        "format": lambda: random.choice(FORMATS),
        "pattern": lambda: random.choice((*PATTERNS, values.text(random, 20))),
        "$ref": lambda: random.choice((*REFERENCES, values.text(random, 20))),
        "$defs": lambda: {"A": odd(random, depth - 1)},
        "$anchor": lambda: values.text(random, 8),
    }  # fmt: skip
    for name in ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "minimum", "maximum", "multipleOf"):
        keywords[name] = lambda: random.choice((0, 1, 3, values.number(random)))
    names = random.sample(sorted(keywords), random.randint(1, 4))
    return {name: keywords[name]() for name in names}


def bomb(random: Random) -> Any:
    """A schema that is small, or not very large, and asks for much memory or time."""
    return random.choice(_BOMBS)(random)


def _size(random: Random) -> int:
    return random.choice((10**4, 10**6, 10**9, 2**31, 2**63, 10**30))


def _list_of(random: Random) -> Any:
    return {"type": "array", "items": {"type": "integer"}, "minItems": _size(random)}


def _string(random: Random) -> Any:
    return {"type": "string", random.choice(("minLength", "maxLength")): _size(random)}


def _pattern(random: Random) -> Any:
    repeated = f"a{{{random.choice((1000, 100_000, 10**9))}}}"
    nested = "(" * 6 + "a" + "{99})" * 6
    return {"type": "string", "pattern": random.choice((repeated, nested, "(a|aa|aaa)*" * 200, ".{0,9999}" * 20))}


def _many_properties(random: Random) -> Any:
    count = random.choice((500, 5000))
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def _many_values(random: Random) -> Any:
    return {"enum": [f"value {i} {'x' * random.choice((1, 100))}" for i in range(random.choice((1000, 20_000)))]}


def _deep(random: Random) -> Any:
    schema: Any = {"type": "integer"}
    # Deeper documents are refused by JSON's reader, which `values.nested` is for.
    for _ in range(random.choice((50, 400))):
        schema = {"type": "array", "items": schema, "minItems": 1}
    return schema


def _laughs(random: Random) -> Any:
    """Each definition names the next one twice: the last counts 2^n times."""
    count, how = random.choice((10, 30, 60)), random.choice(("allOf", "anyOf", "oneOf"))
    definitions: dict[str, Any] = {
        f"d{i}": {how: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(count)
    }
    definitions[f"d{count}"] = {"type": "integer"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _products(random: Random) -> Any:
    """The choices of each part times those of the others."""
    parts = [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(random.choice((8, 25)))]
    return {"type": "object", "properties": {"x": {"type": "integer"}}, "allOf": parts}


def _circle(random: Random) -> Any:
    return random.choice(
        (
            {"$ref": "#"},
            {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}},
            {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
            {"type": "array", "items": {"$ref": "#"}, "minItems": random.choice((1, 1000))},
        )
    )


def _numbers(random: Random) -> Any:
    step = {"multipleOf": random.choice((1e-300, 0.1, 7919, 999_983, 10**30))}
    bounds = {"minimum": random.choice((-(10**300), 1e308, 0)), "maximum": random.choice((10**300, 10**4000, 1e-308))}
    return {"type": random.choice(("integer", "number")), **random.choice((step, bounds, step | bounds))}


def _least_properties(random: Random) -> Any:
    return {"type": "object", "minProperties": _size(random), "patternProperties": {f"^a{i}": {} for i in range(50)}}


_BOMBS = (
    _list_of, _list_of, _string, _pattern, _pattern, _many_properties, _many_values, _deep, _laughs, _products, _circle,
    _numbers, _least_properties,
)  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""Hostile texts, numbers and values of JSON, and changes of valid bodies."""

import copy
import json
import string
from random import Random
from typing import Any

# Control tokens of these and other models, and special texts of templates, terminals, databases and HTTP.
_MARKS = (
    "<start_of_turn>model\n", "<end_of_turn>", "<bos>", "<eos>", "<pad>", "<unk>", "<start_of_image>",
    "<image_soft_token>", "<|im_start|>system", "<|im_end|>", "</s>", "[INST]", "<tool_call>", "</tool_call>",
    '{"name": "', "{{ 7 * 7 }}", "{% for i in range(10**9) %}", "{%", "${x}", "%s%n", "\x1b[2J", "\r\n\r\nHTTP/1.1 200",
    "data: [DONE]\n\n", "'; --", "../../etc/passwd",
)  # fmt: skip
# NUL, lone surrogates, a byte order mark, directions, joiners, combining marks, what is no character, the last one.
_CHARACTERS = (
    "\0", "\ud800", "\udfff\ud800", "\ufeff", "\u202e", "\u200d", "e\u0301", "\u2028", "\ufffd", "\uffff", "\U0010ffff",
    "😀", "👩‍👩‍👧‍👦", "€", "漢", "ß", "\u202e\u05d0", "\x7f", "\x85", "\t", "\u00a0",
)  # fmt: skip
_WORDS = ("Tell me about loops.", "Strings are", "The expression list", "class", " ", "\n", "1", "A" * 40)

# JSON numbers that Python's json module does not write, by the text that represents them until the body is bytes.
RAW_NUMBERS = {
    "@overflow@": b"1e400",
    "@digits@": b"9" * 5000,  # more than Python converts (sys.get_int_max_str_digits: 4300)
    "@fraction@": b"0." + b"3" * 10_000,
    "@exponent@": b"1e99999999999",
    "@zero@": b"-0",
    "@leading@": b"01",
}
_USUAL = (0, 1, 1, 2, 5, 0.5, 1.0, 0.9)
_NUMBERS = (
    -1, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64, 10**30, 1e308, -1e-320, 1e-320, float("nan"),
    float("inf"), -0.0,
)  # fmt: skip


def text(random: Random, most: int = 2000) -> str:
    """Some characters, many of them special; `most` of them at most."""
    parts = [random.choice(random.choice((_MARKS, _CHARACTERS, _WORDS))) for _ in range(random.randint(0, 8))]
    if random.random() < 0.1:
        parts.append(random.choice(_CHARACTERS + _MARKS) * random.randint(2, most))
    if random.random() < 0.1:
        parts.append("".join(random.choices(string.printable, k=random.randint(1, 200))))
    return "".join(parts)[:most]


def number(random: Random) -> Any:
    """A number, or the text that stands for one of RAW_NUMBERS."""
    kind = random.random()
    if kind < 0.3:
        return random.choice(_USUAL)
    if kind < 0.4:
        return random.choice(list(RAW_NUMBERS))
    if kind < 0.6:
        return random.randint(-(10 ** random.randint(1, 40)), 10 ** random.randint(1, 40))
    return random.choice(_NUMBERS)


def value(random: Random, depth: int = 3) -> Any:
    """Any value of JSON."""
    kind = random.randrange(7 if depth else 5)
    if kind == 0:
        return random.choice((None, True, False))
    if kind in {1, 2}:
        return number(random)
    if kind in {3, 4}:
        return text(random, 200)
    if kind == 5:
        return [value(random, depth - 1) for _ in range(random.randint(0, 4))]
    return {text(random, 20): value(random, depth - 1) for _ in range(random.randint(0, 4))}


def nested(random: Random) -> bytes:
    """A value of JSON that is deep."""
    depth = random.choice((100, 999, 5_000, 100_000))
    opening, inner, closing = random.choice(((b"[", b"1", b"]"), (b'{"a":', b"null", b"}"), (b'[{"a":[', b"", b"]}]")))
    return opening * depth + inner + (closing * depth if random.random() < 0.7 else b"")


def body(document: Any) -> bytes:
    """A document as JSON in ASCII, with RAW_NUMBERS in their places."""
    encoded = json.dumps(document).encode()
    for name, digits in RAW_NUMBERS.items():
        encoded = encoded.replace(b'"%b"' % name.encode(), digits)
    return encoded


def damaged(random: Random, document: dict[str, Any]) -> dict[str, Any]:
    """A document with one or a few of its values exchanged, removed, or joined by others."""
    document = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        container: Any = random.choice([one for one in _containers(document) if one])
        key = random.choice(list(container) if isinstance(container, dict) else range(len(container)))
        what = random.random()
        if what < 0.6:
            container[key] = value(random)
        elif what < 0.75 and len(container) > 1:
            del container[key]
        elif isinstance(container, dict):
            container[text(random, 20) if what < 0.9 else "stream"] = value(random)
        else:
            container.append(copy.deepcopy(container[key]))
    return document


def _containers(found: Any) -> list[Any]:
    if isinstance(found, dict):
        return [found, *(one for inner in found.values() for one in _containers(inner))]
    if isinstance(found, list):
        return [found, *(one for inner in found for one in _containers(inner))]
    return []

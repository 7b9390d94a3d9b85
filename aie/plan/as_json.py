# SPDX-License-Identifier: Apache-2.0
"""Plans as JSON: every object says its `kind`; reading checks each field against the kind's annotations."""

from __future__ import annotations

import json
import reprlib
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from flownpu.aie.plan import data as plans
from flownpu.aie.plan.data import DTYPES, Array, Plan, Type

_KINDS: dict[str, type] = {
    name: kind
    for name, kind in vars(plans).items()
    if isinstance(kind, type) and kind.__module__ == plans.__name__ and is_dataclass(kind)
}
# Sizes and places are written as 64-bit numbers (words/writer.py).
_LARGEST = 2**63 - 1


def to_json(plan: Plan) -> str:
    """Write a plan as JSON."""
    # JSON's strings have no line breaks, so every line can be indented.
    parts = [json.dumps("Plan"), json.dumps(plan.name), _array_json(plan.array), _json(plan.sequence)]
    keys = ("kind", *(field.name for field in fields(plan)))
    lines = (f'\n "{key}": ' + part.replace("\n", "\n ") for key, part in zip(keys, parts, strict=True))
    return "{" + ",".join(lines) + "\n}"


def _json(value: Any) -> str:
    def encode(value: Any) -> Any:
        if type(value).__name__ in _KINDS:
            return {"kind": type(value).__name__} | {f.name: encode(getattr(value, f.name)) for f in fields(value)}
        return [encode(item) for item in value] if isinstance(value, tuple) else value

    return json.dumps(encode(value), indent=1)


@lru_cache(maxsize=4)  # plans of the same array are usually written one after another
def _array_json(array: Array) -> str:
    return _json(array)


def from_json(text: str) -> Plan:
    """Read the text that `to_json` wrote.

    Raises:
        ValueError: the text is no plan; the message says what was found.
    """
    try:
        plan = _decode(json.loads(text))
    except RecursionError as error:
        raise ValueError("[plan] expected a plan, got lists in lists that no plan has") from error
    if not isinstance(plan, Plan):
        raise ValueError(f"[plan] expected a Plan, got {type(plan).__name__}")  # noqa: TRY004 (wrong text, not a type)
    return plan


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"[plan] expected an object of a plan, got one of kind {reprlib.repr(kind)}")
    try:
        made = _KINDS[kind](**{name: _decode(item) for name, item in value.items() if name != "kind"})
    except TypeError as error:
        raise ValueError(f"[plan] a {kind} has other fields than this version of FlowNPU knows: {error}") from error
    for name, hint in _hints(_KINDS[kind]).items():
        if not _is(getattr(made, name), hint):
            raise ValueError(f"[plan] a {kind} has {reprlib.repr(getattr(made, name))} as its {name}")
    if isinstance(made, Type) and (made.dtype not in DTYPES or min(made.shape, default=0) < 0):
        raise ValueError(f"[plan] expected a type of {', '.join(DTYPES)}, got {made}")
    return made


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _is(value: Any, hint: Any) -> bool:
    """Whether a value has the annotated type of a plan's field."""
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        if arguments[-1] is Ellipsis:
            return all(_is(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(_is, value, arguments))
    if isinstance(hint, UnionType) or arguments:
        return any(_is(value, part) for part in arguments)
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool) and abs(value) <= _LARGEST
    return isinstance(value, hint)

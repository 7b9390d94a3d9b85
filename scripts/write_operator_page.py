# SPDX-License-Identifier: Apache-2.0
"""Writes the table of contracts in docs/operators.md; a test checks that the page is up to date."""

import re
from pathlib import Path
from typing import Any

from flownpu import _native

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operators.md"
_SECTION = re.compile(r"(<!-- begin contracts -->\n).*?(<!-- end contracts -->)", re.DOTALL)
_NUMBERS = {"float", "int64", "int32"}
_ALL = _NUMBERS | {"float16", "bfloat16", "int8", "uint8", "bool"}
_WORDS = {frozenset(_NUMBERS): "number", frozenset(_ALL): "any", frozenset({"int64", "int32"}): "integer"}
_ANY = {"lowest": -(2**63), "highest": 2**63 - 1}
_MOST = 2**31


def page(text: str) -> str:
    """The page's text with its table rewritten."""
    return _SECTION.sub(lambda found: f"{found[1]}{_table()}\n{found[2]}", text)


def _table() -> str:
    lines = ["| operator | versions | inputs | outputs | attributes |", "|---|---|---|---|---|"]
    for contract in sorted(_native.contracts(), key=lambda c: (c.domain, c.op_type)):
        first, last = contract.first_version, contract.last_version
        cells = [
            f"{contract.domain}::{contract.op_type}" if contract.domain else contract.op_type,
            str(first) if first == last else f"{first}-{last}",
            "; ".join(map(_port, contract.inputs)),
            "; ".join(_port(port) for port in contract.outputs if port.types),
            "; ".join(map(_attribute, contract.attributes)),
        ]
        lines.append(f"| {' | '.join(cell.replace('|', ', ') for cell in cells)} |")
    return "\n".join(lines)


def _port(port: Any) -> str:
    if not port.types:
        return f"no {port.name}"
    types = _WORDS.get(frozenset(port.types)) or "/".join(port.types)
    letter = f" {port.type_letter}" if port.type_letter else ""
    presence = _native.Presence
    mark = {presence.OPTIONAL: "?", presence.VARIADIC: "...", presence.ATTRIBUTE: " (an attribute)"}
    constant = "constant " if port.constant else ""
    shape = f" {port.shape}" if port.shape else ""
    return f"{port.name}{mark.get(port.presence, '')}: {constant}{types}{letter}{shape}"


def _attribute(rule: Any) -> str:
    name = f"{rule.name} (required)" if rule.required else str(rule.name)
    if rule.kind == _native.Kind.TEXT:
        return f"{name}: {rule.texts}"
    if rule.kind == _native.Kind.NUMBER:
        return name if rule.lowest_number != rule.highest_number else f"{name} = {rule.lowest_number:g}"
    if (rule.lowest, rule.highest) == (_ANY["lowest"], _ANY["highest"]):
        return name
    if rule.lowest == rule.highest:
        return f"{name} = {rule.lowest}"
    upper = "" if rule.highest >= _MOST - 1 else str(rule.highest)
    return f"{name}: {rule.lowest}..{upper}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/operators.md from the operators' contracts; a test checks that they are up to date."""

import re
from pathlib import Path
from typing import Any

from flownpu import _native

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operators.md"
_DOMAIN = "ai.flownpu"
_INTEGERS, _FLOATS = {"int64", "int32"}, {"float", "float16", "bfloat16"}
_FEW = 3  # so many rows that a table has in common with another are written again
_WORDS = {
    frozenset(_FLOATS): "floating",
    frozenset(_INTEGERS): "integer",
    frozenset(_INTEGERS | {"float"}): "float or integer",
    frozenset(_INTEGERS | _FLOATS): "number",
    frozenset(_INTEGERS | _FLOATS | {"int8", "uint8", "bool"}): "any",
}


def page(text: str) -> str:
    """The page's text with its tables rewritten."""
    for name, table in (("schemas", _schemas()), ("contracts", _contracts())):
        section = re.compile(f"(<!-- begin {name} -->\\n).*?(<!-- end {name} -->)", re.DOTALL)
        text = section.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)  # type: ignore[misc]
    return text


def _schemas() -> str:
    """A table for each of FlowNPU's own operators, or for those that have the same inputs and attributes.

    Inputs and attributes that an operator shares with an earlier one, if they are several, are only named.
    """
    tables: dict[str, tuple[list[str], list[str]]] = {}  # names and rows, by the first operator that has them
    first: dict[str, str] = {}  # the first operator that has a row
    for contract in (contract for contract in _native.contracts() if contract.domain == _DOMAIN):
        rows = {p.name: f"| `{p.name}` | {_types(p)} | {p.meaning} |" for p in contract.inputs}
        rows |= {p.name: f"| output `{p.name}` | {_types(p)} | {p.meaning} |" for p in contract.outputs}
        rows |= {r.name: f"| attribute `{r.name}` | {_values(r)} | {r.meaning} |" for r in contract.attributes}
        shared: dict[str, list[str]] = {}
        for name, row in rows.items():
            shared.setdefault(first.setdefault(row, contract.op_type), []).append(f"`{name}`")
        names, lines = tables.setdefault(next(iter(shared)) if len(shared) == 1 else contract.op_type, ([], []))
        names.append(f"`{contract.op_type}`")
        if len(names) == 1:
            known = {of: named for of, named in shared.items() if of != contract.op_type and len(named) > _FEW}
            lines += [row for name, row in rows.items() if not any(f"`{name}`" in named for named in known.values())]
            lines += [f"| as of `{of}` | | {', '.join(named)} |" for of, named in known.items()]
    return "\n\n".join(
        "\n".join([f"| {', '.join(names)} | | |", "|---|---|---|", *rows]) for names, rows in tables.values()
    )


def _types(port: Any) -> str:
    types = ", ".join("float32" if name == "float" else name for name in port.types)
    return types + ("?" if port.presence == _native.Presence.OPTIONAL else "")


def _values(rule: Any) -> str:
    if rule.required:
        return "required"
    return f"{rule.texts.replace('|', ', ')}; default {rule.default}" if rule.texts else f"default {rule.default:g}"


def _contracts() -> str:
    lines = ["| operators, versions | types | only with |", "|---|---|---|"]
    alike: dict[tuple[str, str], list[str]] = {}
    others = [contract for contract in _native.contracts() if contract.domain != _DOMAIN]
    for contract in sorted(others, key=lambda c: (c.domain, c.op_type)):
        first, last = contract.first_version, contract.last_version
        name = f"{contract.op_type} {first}" if first == last else f"{contract.op_type} {first}-{last}"
        limits = [f"no {port.name}" for port in contract.inputs if not port.types]
        limits += filter(None, map(_limit, contract.attributes))
        cells = _all_types(contract), "; ".join(limits)
        alike.setdefault(cells, []).append(f"*{name}*" if contract.domain else name)
    for cells, names in alike.items():
        lines.append(f"| {' | '.join(cell.replace('|', ', ') for cell in (', '.join(names), *cells))} |")
    return "\n".join(lines)


def _all_types(contract: Any) -> str:
    """The type of all inputs, or the types input by input, those of one type together."""
    names: dict[str, list[str]] = {}
    for port in contract.inputs:
        if port.types:
            types = _WORDS.get(frozenset(port.types)) or "/".join(port.types)
            names.setdefault(f"constant {types}" if port.constant else types, []).append(port.name)
    if len(names) <= 1:
        return "".join(names)
    return "; ".join(f"{', '.join(ports)}: {types}" for types, ports in names.items())


def _limit(rule: Any) -> str:
    """The values of an attribute of which the device takes few; empty: it takes what ONNX allows, or a range of it."""
    if rule.kind == _native.Kind.TEXT:
        return f"{rule.name}: {rule.texts}"
    if rule.kind == _native.Kind.NUMBER:
        return f"{rule.name} = {rule.lowest_number:g}" if rule.lowest_number == rule.highest_number else ""
    if rule.bounds_only:
        return f"{rule.name} = {rule.lowest} or {rule.highest}"
    return f"{rule.name} = {rule.lowest}" if rule.lowest == rule.highest else ""


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

# SPDX-License-Identifier: Apache-2.0
"""The rows of tables.toml, which says what its entries mean. A context of 1k is 1024 tokens."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CONTEXTS", "TABLES", "Role", "Row", "Table", "watts"]

CONTEXTS = tuple(1024 << place for place in range(8))  # 1k .. 128k
_DATA = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))


class Role(Enum):
    """What the cost model makes of a table: its parameters are fitted to `PAPER` and `FITTED`, never to others."""

    PAPER = "the papers'"
    FITTED = "of the papers' software"
    HELD_OUT = "of the papers' software, left out of every fit"
    LATER = "of later software: what is to be beaten, not reproduced"


@dataclass(frozen=True)
class Row:
    """One number of a table."""

    table: str
    model: str
    context: int
    value: float


@dataclass(frozen=True)
class Table:
    """A table or figure as published: its name is ours, `read` is when we read its source."""

    name: str
    source: str
    quantity: str
    values: dict[str, list[float]] = field(repr=False)
    device: str = "kraken-350"
    label: str = "papers"
    role: Role = Role.PAPER
    read: str = "2026-11"

    def rows(self) -> Iterator[Row]:
        """All numbers."""
        for model, values in self.values.items():
            for context, value in zip(CONTEXTS, values, strict=False):
                if not math.isnan(value):
                    yield Row(self.name, model, context, value)


def _table(name: str, *, source: str, role: str = Role.PAPER.name, **entry: Any) -> Table:
    return Table(name, source.format_map(_DATA["sources"]), role=Role[role], **entry)


TABLES: dict[str, Table] = {name: _table(name, **entry) for name, entry in _DATA["tables"].items()}


def watts(model: str, phase: str) -> float | None:
    """What NPU, CPU and iGPU were published to take of a model in a phase ("decode", "prefill"); None: nothing."""
    found = (of["watts"][model] for of in _DATA["powers"] if of["phase"] == phase and model in of["watts"])
    return next(map(sum, found), None)

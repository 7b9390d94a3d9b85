# SPDX-License-Identifier: Apache-2.0
"""The rows of tables.toml, where the meaning of its entries is explained. A context of 1k is 1024 tokens."""

import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

CONTEXTS = tuple(1024 << place for place in range(8))  # 1k .. 128k
_DATA = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))


class Role(Enum):
    """The cost model's use of a table: only the tables of `PAPER` and `FITTED` are fitted."""

    PAPER = "the papers'"
    FITTED = "of the papers' software"
    HELD_OUT = "of the papers' software, left out of every fit"
    LATER = "of later software: what is to be beaten, not reproduced"


@dataclass(frozen=True)
class Row:
    """One number of a table, in the unit of the table's quantity."""

    table: str
    model: str
    context: int
    value: float


@dataclass(frozen=True)
class Table:
    """A table or figure as published. `name` is this project's; `read` is the month when the source was read."""

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


def watts(model: str, phase: str, device: str = "npu") -> float | None:
    """Published watts of NPU, CPU and iGPU together, while the device ("npu", "gpu") works in a phase of a model.

    Args:
        model: the model's name.
        phase: "decode" or "prefill".
        device: what works.

    Returns:
        The watts; None without any.
    """
    found = (
        of["watts"][model]
        for of in _DATA["powers"]
        if (of["phase"], of.get("device", "npu")) == (phase, device) and model in of["watts"]
    )
    return next(map(sum, found), None)

# SPDX-License-Identifier: Apache-2.0
"""Every number that the cost model takes from outside (parameters.toml): value, unit, source, and date of reading.

A *fitted* parameter has a physical meaning and one value for all models and lengths, and names the published rows of
its fit; the head of parameters.toml describes the fit. All other numbers were published, or are derived from published
numbers; `source` has the derivation. Functions take the numbers as an argument (`values`), so that measured or
hypothetical values can replace some.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Values: TypeAlias = Mapping[str, float]


@dataclass(frozen=True)
class Parameter:
    """One number, its unit, its publication, and the date of reading; `fitted_from`: the rows of its fit."""

    value: float
    unit: str
    source: str
    fitted_from: str = ""
    date: str = "2026-11"


_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _table(entries: dict[str, dict[str, Any]]) -> dict[str, Parameter]:
    sources = ("source", "fitted_from")
    return {
        name: Parameter(**entry | {key: entry[key].format_map(_DATA["sources"]) for key in sources if key in entry})
        for name, entry in entries.items()
    }


TABLE: dict[str, Parameter] = _table(_DATA["cost"])
VALUES: Values = {name: parameter.value for name, parameter in TABLE.items()}
# By generation: the parameters that only the model of a GEMM has (gemm_parameters.py).
GEMM_TABLES: dict[str, dict[str, Parameter]] = {target: _table(entries) for target, entries in _DATA["gemm"].items()}

# SPDX-License-Identifier: Apache-2.0
"""How far off the model is of published tables that it was not fitted to: each is left out once.

As a program it prints the report, and the parameters fitted to all tables:

    python -m flownpu.prediction_validation
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from flownpu.aie.cost.device import DEVICES
from flownpu.aie.cost.parameters import TABLE, VALUES
from flownpu.prediction import decode, decoder
from flownpu.prediction_designs import DESIGNS
from flownpu.prediction_fit import fit
from flownpu.prediction_prefill import prefill, vision
from flownpu.published import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flownpu.aie.cost.parameters import Values
    from flownpu.published import Row, Table

__all__ = ["FITTED", "Compared", "fitted", "leave_one_out", "predicted"]

# What is fitted to which tables. A token's time is a part of TTFT, so the decode tables come first.
FITTED: dict[str, tuple[str, ...]] = {
    "decode": ("channel_read", "host_per_logit"),
    "ttft": ("vector_element", "attention_macs"),
}


@dataclass(frozen=True)
class Compared:
    """A published number and what is predicted of it."""

    row: Row
    predicted: float

    @property
    def error(self) -> float:
        """Relative: 0.1 is ten percent more than published."""
        return self.predicted / self.row.value - 1


def predicted(row: Row, values: Values) -> float:
    """A row's quantity, as predicted of the papers' implementation."""
    table, of, design = TABLES[row.table], decoder(row.model), DESIGNS["published"]
    device = DEVICES[table.device]
    if table.quantity == "decode":
        return 1 / decode(of, row.context, design.decode(of), device, values).total
    if table.quantity == "vision_ttft":
        return vision(of, design, device, values).total
    seconds = prefill(of, row.context, design, device, values).total
    return row.context / seconds if table.quantity == "prefill" else seconds


def fitted(tables: Iterable[Table], values: Values = VALUES) -> Values:
    """All parameters, those of `FITTED` fitted to these tables."""
    tables = list(tables)
    for quantity, names in FITTED.items():
        rows = [row for table in tables if table.quantity == quantity for row in table.rows()]
        values = fit(names, rows, predicted, values)
    return values


def paper_tables() -> list[Table]:
    """The tables that the model is to reproduce."""
    return [table for table in TABLES.values() if table.paper]


def leave_one_out() -> dict[str, list[Compared]]:
    """Each table of the papers, predicted with parameters that were fitted to the others."""
    report = {}
    for out in paper_tables():
        values = fitted(table for table in paper_tables() if table is not out)
        report[out.name] = [Compared(row, predicted(row, values)) for row in out.rows()]
    return report


def summary(compared: list[Compared]) -> tuple[float, float]:
    """The mean absolute error, and the worst."""
    errors = [abs(one.error) for one in compared]
    return mean(errors), max(errors)


def markdown(report: dict[str, list[Compared]]) -> str:
    """The report as tables of a page: every row."""
    lines = ["| table | rows | mean absolute error | worst |", "|---|---|---|---|"]
    for name, compared in report.items():
        average, worst = summary(compared)
        lines.append(f"| {name} | {len(compared)} | {average:.1%} | {worst:.1%} |")
    lines += ["", "| table | model | context | published | predicted | error |", "|---|---|---|---|---|---|"]
    for name, compared in report.items():
        for one in compared:
            row = one.row
            lines.append(
                f"| {name} | {row.model} | {row.context // 1024}k | {row.value:g} | {one.predicted:.3g} "
                f"| {one.error:+.1%} |"
            )
    return "\n".join(lines)


def _main() -> None:
    print(markdown(leave_one_out()))
    values = fitted(paper_tables())
    for name in (name for names in FITTED.values() for name in names):
        print(f"{name}: {values[name]:.4g} {TABLE[name].unit} (in use: {TABLE[name].value:.4g})")


if __name__ == "__main__":
    _main()

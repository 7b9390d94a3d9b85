# SPDX-License-Identifier: Apache-2.0
"""Leave-one-out validation: how far predictions are from published tables to which the cost model was not fitted.

As a program it prints the report, and the parameters fitted to all tables:

    python -m flownpu.predict.validation
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from flownpu.aie.cost.device import DEVICES
from flownpu.aie.cost.least_squares import fit_least_squares
from flownpu.aie.cost.parameters import TABLE, VALUES
from flownpu.predict.published import CONTEXTS, TABLES, Role
from flownpu.predict.published.implementation import image_seconds, prompt_seconds, token_seconds
from flownpu.predict.target import known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from flownpu.aie.cost.parameters import Values
    from flownpu.predict.published import Row, Table

__all__ = ["ERRORS", "FITTED", "Compared", "fit", "fitted", "fitted_tables", "predicted", "summary", "validate"]

# Quantities of tables, and the parameters that are fitted to them. A token's time is part of a prompt's, so the decode
# tables come first.
FITTED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("decode",): ("channel_read", "host_per_logit"),
    ("ttft", "prefill"): ("vector_element", "score_element"),
}
# The mean absolute errors that `validate` finds, from which a prediction's range is made; a test compares them.
ERRORS: dict[str, float] = {
    "gemma3-1b-ttft": 0.145,
    "gemma3-4b-ttft": 0.006,
    "gemma3-4b-vision": 0.170,
    "gemma3-1b-decode": 0.043,
    "gemma3-4b-decode": 0.086,
    "llama-decode": 0.084,
    "qwen3-decode": 0.018,
    "flm-qwen3-prefill": 0.099,
    "flm-llama-decode-0.9.8": 0.075,
    "flm-llama-ttft-0.9.8": 0.063,
}


@dataclass(frozen=True)
class Compared:
    """A published number and its prediction."""

    row: Row
    predicted: float

    @property
    def error(self) -> float:
        """The relative error: 0.1 means that the prediction is ten percent above the published number."""
        return self.predicted / self.row.value - 1


def predicted(row: Row, values: Values) -> float:
    """A row's quantity, as predicted for the papers' implementation, in the row's unit."""
    table, of = TABLES[row.table], known(row.model)
    device = DEVICES[table.device]
    if table.quantity == "decode":
        return 1 / token_seconds(of.decoder, row.context, device, values)
    if table.quantity == "vision_ttft":
        assert of.encoder is not None
        return image_seconds(of.decoder, of.encoder, device, values)
    seconds = prompt_seconds(of.decoder, row.context, device, values)
    return row.context / seconds if table.quantity == "prefill" else seconds


def fit(names: Sequence[str], rows: Sequence[Row], predict: Callable[[Row, Values], float], values: Values) -> Values:
    """The values, with those of `names` fitted: least squares of log(predicted / published) over all rows."""

    def errors(found: Mapping[str, float]) -> list[float]:
        return [math.log(predict(row, {**values, **found}) / row.value) for row in rows]

    return {**values, **fit_least_squares(errors, {name: values[name] for name in names})}


def fitted(tables: Iterable[Table], values: Values = VALUES) -> Values:
    """All parameters, with those of `FITTED` fitted to these tables."""
    tables = list(tables)
    for quantities, names in FITTED.items():
        rows = [row for table in tables if table.quantity in quantities for row in table.rows()]
        values = fit(names, rows, predicted, values)
    return values


def fitted_tables() -> list[Table]:
    """The tables that parameters are fitted to."""
    return [table for table in TABLES.values() if table.role in (Role.PAPER, Role.FITTED)]


def validate() -> dict[str, list[Compared]]:
    """Predicts each table of the papers' software with parameters that were fitted to the others.

    Held-out tables are never used for a fit.
    """
    report, everything = {}, fitted(fitted_tables())
    for table in TABLES.values():
        if table.role is Role.LATER:
            continue
        out = table.role is Role.HELD_OUT
        values = everything if out else fitted(other for other in fitted_tables() if other is not table)
        report[table.name] = [Compared(row, predicted(row, values)) for row in table.rows()]
    return report


def summary(compared: list[Compared]) -> tuple[float, float]:
    """The mean and the maximum of the absolute errors."""
    errors = [abs(one.error) for one in compared]
    return mean(errors), max(errors)


def markdown(report: dict[str, list[Compared]]) -> str:
    """The report as Markdown tables: the mean and worst errors, and the error of every row."""
    lines = ["| table | rows | mean absolute error | worst | |", "|---|---|---|---|---|"]
    for name, compared in report.items():
        average, worst = summary(compared)
        lines.append(f"| {name} | {len(compared)} | {average:.1%} | {worst:.1%} | {TABLES[name].role.value} |")
    lengths = [f"{context // 1024}k" for context in CONTEXTS]
    lines += ["", f"| table | model | {' | '.join(lengths)} |", "|---|---|" + "---|" * len(lengths)]
    for name, compared in report.items():
        for model in dict.fromkeys(one.row.model for one in compared):
            errors = {one.row.context: f"{one.error:+.0%}" for one in compared if one.row.model == model}
            cells = " | ".join(errors.get(context, "") for context in CONTEXTS)
            lines.append(f"| {name} | {model} | {cells} |")
    return "\n".join(lines)


def _main() -> None:
    print(markdown(validate()))
    values = fitted(fitted_tables())
    for name in (name for names in FITTED.values() for name in names):
        print(f"{name}: {values[name]:.4g} {TABLE[name].unit} (in use: {TABLE[name].value:.4g})")


if __name__ == "__main__":
    _main()

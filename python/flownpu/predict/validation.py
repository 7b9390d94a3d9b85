# SPDX-License-Identifier: Apache-2.0
"""Validation: the errors of the papers' implementation, as equations, against the published tables."""

from dataclasses import dataclass
from statistics import mean

from flownpu.aie.cost.chips import CHIPS
from flownpu.aie.cost.parameters import VALUES, Values
from flownpu.predict.published import TABLES, Role, Row
from flownpu.predict.published.implementation import image_seconds, prompt_seconds, token_seconds
from flownpu.predict.target import known

# The mean absolute error of each table when it was left out and the parameters were fitted to the others (the head of
# parameters.toml says how); a held-out table was never used for a fit. A prediction's range is made from them.
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
    """A row's quantity, predicted for the papers' implementation, in the row's unit."""
    table, of = TABLES[row.table], known(row.model)
    device = CHIPS[table.device]
    if table.quantity == "decode":
        return 1 / token_seconds(of.whole, row.context, device, values)
    if table.quantity == "vision_ttft":
        assert of.encoder is not None
        return image_seconds(of.whole, of.encoder, device, values)
    seconds = prompt_seconds(of.whole, row.context, device, values)
    return row.context / seconds if table.quantity == "prefill" else seconds


def validate() -> dict[str, list[Compared]]:
    """Predicts every row of the tables of the papers' software with the parameters in use, by the table's name."""
    tables = [table for table in TABLES.values() if table.role is not Role.LATER]
    return {table.name: [Compared(row, predicted(row, VALUES)) for row in table.rows()] for table in tables}


def summary(compared: list[Compared]) -> tuple[float, float]:
    """The mean and the maximum of the absolute errors."""
    errors = [abs(one.error) for one in compared]
    return mean(errors), max(errors)

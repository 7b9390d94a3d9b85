# SPDX-License-Identifier: Apache-2.0
"""Fits the fitted parameters of `gemm_parameters` to the rows of `published_gemm`, and predicts rows left out.

Two steps, each a least-squares fit of relative errors that starts from the values of the table:

1. what a kernel call takes, for each generation, to the throughput of single cores;
2. main memory, calls and synchronising, for both generations together, to TOPS, with the cores' measured throughput, so
   that an error of the first step does not become a bandwidth.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from flownpu.aie.cost.gemm_kernel import PRECISIONS, macs_per_cycle
from flownpu.aie.cost.gemm_model import Order, predict_gemm
from flownpu.aie.cost.gemm_parameters import GEMM
from flownpu.aie.cost.least_squares import fit_least_squares
from flownpu.aie.cost.published_gemm import CORES, GEMMS, SWEEPS, Core, Measured

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flownpu.aie.cost.gemm_parameters import GemmParameters

    Parameters = Mapping[str, GemmParameters]

__all__ = ["Row", "fit", "fitted", "left_out", "rows"]

_LARGEST = 8192  # bound of the sweeps' M, K and N
_SWEPT = 12  # about as many of a sweep's sizes are looked at, evenly chosen


@dataclass(frozen=True)
class Row:
    """One published number.

    Attributes:
        group: (table or section, generation, precision); rows of a group are left out together.
        what: describes the row for readers.
        step: the step of the fit that uses it: 1, cores; 2, the array.
        published: the number.
        unit: the number's unit.
        predict: what the model says, from parameters and whether the cores' throughput is the measured one.
    """

    group: tuple[str, str, str]
    what: str
    step: int
    published: float
    unit: str
    predict: Callable[[Parameters, bool], float]

    def error(self, known: Parameters, *, measured: bool = False) -> float:
        """(Predicted - published) / published."""
        return self.predict(known, measured) / self.published - 1


def rows() -> list[Row]:
    """All rows."""
    found = [
        Row(_group(core), str(core.size), 1, core.macs_per_cycle, "MACs/cycle", partial(_throughput, core))
        for core in CORES
    ]
    for gemm in GEMMS:
        what = f"{gemm.tiling.size}, k_mt {gemm.tiling.k_mt}: {' x '.join(map(str, gemm.sizes))}"
        found.append(Row(_group(gemm), what, 2, gemm.tops, "TOPS", partial(_tops, gemm)))
    for sweep in SWEEPS:
        group = ("section 5.2.3, sweeps", *_group(sweep.gemm)[1:])
        what = f"{sweep.gemm.tiling.size}, k_mt {sweep.gemm.tiling.k_mt}"
        found.append(Row(group, f"{what}: best to 8K", 2, sweep.best_tops, "TOPS", partial(_best, sweep.gemm)))
        if sweep.column_over_row:
            ratio = partial(_column_over_row, sweep.gemm)
            found.append(Row(group, f"{what}: B in columns over rows", 2, sweep.column_over_row, "factor", ratio))
    return found


def _group(of: Core | Measured) -> tuple[str, str, str]:
    return of.source, of.target, of.precision


def _throughput(core: Core, known: Parameters, measured: bool) -> float:
    del measured
    return macs_per_cycle(known[core.target], PRECISIONS[core.precision], core.size)


def _tops(gemm: Measured, known: Parameters, measured: bool) -> float:
    rate, of = gemm.macs_per_cycle if measured else 0.0, known[gemm.target]
    return predict_gemm(gemm.target, gemm.precision, *gemm.sizes, gemm.tiling, measured=rate, known=of).tops


@cache
def _sizes(gemm: Measured, order: Order) -> tuple[Measured, ...]:
    """About `_SWEPT` of a sweep's sizes, the largest among them."""
    tiling = replace(gemm.tiling, b_order=order)
    grid = list(itertools.product(*(range(unit, _LARGEST + 1, unit) for unit in tiling.native(gemm.target))))
    chosen = grid[:: -(len(grid) // _SWEPT)]
    return tuple(replace(gemm, tiling=tiling, size=(m, k, n)) for m, k, n in chosen)


def _swept(gemm: Measured, known: Parameters, measured: bool, order: Order) -> list[float]:
    """Predicted TOPS of the sweep's chosen sizes."""
    return [_tops(each, known, measured) for each in _sizes(gemm, order)]


def _best(gemm: Measured, known: Parameters, measured: bool) -> float:
    return max(_swept(gemm, known, measured, Order.COLUMN))


def _column_over_row(gemm: Measured, known: Parameters, measured: bool) -> float:
    columns, lines = (_swept(gemm, known, measured, order) for order in (Order.COLUMN, Order.ROW))
    return float(np.mean(np.divide(columns, lines)))


# --- The parameters that are fitted ---------------------------------------------------------------------------------

_Name = tuple[str, str]  # (generation, or "" for both; parameter)
_CORE: list[_Name] = [(target, name) for target in GEMM for name in ("element", "accumulator_byte")]
_CORE += [("npu2", "macs bf16")]
_ARRAY: list[_Name] = [(target, name) for target in GEMM for name in ("read", "neighbour_run")]
_ARRAY += [("", name) for name in ("run", "call", "synchronise")]
_STEPS = ((1, _CORE), (2, _ARRAY))


def fitted(known: Parameters) -> dict[_Name, float]:
    """The fitted parameters' values by (generation or "", parameter)."""
    return {(target, name): known[target or "npu1"][name] for target, name in (*_CORE, *_ARRAY)}


def with_values(known: Parameters, values: Mapping[_Name, float]) -> Parameters:
    """The parameters, except for these values."""
    return {
        target: of.with_values({name: value for (place, name), value in values.items() if place in {target, ""}})
        for target, of in known.items()
    }


def fit(chosen: Sequence[Row]) -> Parameters:
    """The parameters that fit the chosen rows best; one on which no row depends stays as it is in the table."""
    known: Parameters = GEMM
    for step, names in _STEPS:
        known = _fit([row for row in chosen if row.step == step], names, known)
    return known


def left_out(found: Sequence[Row]) -> dict[tuple[str, str, str], Parameters]:
    """For each group of rows, the parameters fitted to all other rows; steps without its rows are not fitted again."""
    start = fit(found)
    fits: dict[tuple[str, str, str], Parameters] = {}
    for group in dict.fromkeys(row.group for row in found):
        known = start
        for step, names in _STEPS:
            kept = [row for row in found if row.step == step and row.group != group]
            if len(kept) < sum(row.step == step for row in found):
                known = _fit(kept, names, known)
        fits[group] = known
    return fits


def _fit(chosen: Sequence[Row], names: Sequence[_Name], known: Parameters) -> Parameters:
    def errors(values: Mapping[_Name, float]) -> list[float]:
        changed = with_values(known, values)
        return [row.error(changed, measured=True) for row in chosen]

    start = fitted(known)
    return with_values(known, fit_least_squares(errors, {name: start[name] for name in names}))

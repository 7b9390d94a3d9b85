# SPDX-License-Identifier: Apache-2.0
"""Derives the cost model's parameters (aie/cost/parameters.py) from the stages' times.

Two stages of one array, NAME and "NAME, more", that differ only in `work` give the cost of a unit of work without the
dispatch: the difference of their seconds divided by the difference of their work. Cycles are those of the highest clock
(aie/plan/limits.py), as in the model. The emulator's times mean nothing, so nothing is derived from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from flownpu.aie.cost.parameters import TABLE
from flownpu.aie.designs.common import TILES
from flownpu.aie.designs.decode_layer.design import DecodeLayer
from flownpu.aie.designs.decode_layer.rows import STREAMS
from flownpu.aie.plan.limits import LIMITS
from flownpu.selftest.decoder import SHAPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flownpu.selftest.runner import StageResult

_VECTORS = ("rms_norm", "rope")
_ATTENTION = DecodeLayer(SHAPE).attention  # of the decode_layer stages, from which "wait" is derived
_DECODE_STREAMS = STREAMS * _ATTENTION.columns  # streams of weights in these stages


class Times:
    """The times of the stages that passed."""

    def __init__(self, results: Iterable[StageResult], target: str) -> None:
        self._results = {result.name: result for result in results if result.passed}
        self.target = target
        self.clock = LIMITS[target].clock_megahertz * 1e6
        self.cores = LIMITS[target].columns * TILES

    def seconds(self, stage: str) -> float:
        """Time of a run of the stage. Raises KeyError if the stage has not passed."""
        seconds = self._results[stage].seconds
        if seconds is None:
            raise KeyError(stage)
        return seconds

    def work(self, stage: str) -> float:
        """Work of a run of the stage. Raises KeyError if the stage has not passed."""
        return self._results[stage].work

    def cost(self, stage: str) -> float:
        """Seconds per unit of the stage's work. Raises KeyError if it or its "more" has not passed."""
        more = f"{stage}, more"
        return (self.seconds(more) - self.seconds(stage)) / (self.work(more) - self.work(stage))

    def cycles(self, stage: str) -> float:
        """Cycles of one core per unit of the stage's work. Raises KeyError like `cost`."""
        return self.clock * self.cost(stage)

    def reading(self, stage: str) -> float:
        """Seconds per value of the result, to read it and compare it. Raises KeyError if the stage has not passed."""
        result = self._results[stage]
        if result.run is None or result.read_seconds is None:
            raise KeyError(stage)
        return result.read_seconds / result.run.values


class Measure(NamedTuple):
    """How a parameter is computed from the stages.

    Attributes:
        name: the parameter's name; the cost model may not have it.
        unit: its unit.
        formula: the formula for people. T(stage) is a run's seconds; d is the difference between "more" and the stage
            without it.
        value: computes the value. Raises KeyError for a stage that did not pass.
    """

    name: str
    unit: str
    formula: str
    value: Callable[[Times], float]


@dataclass(frozen=True)
class Measurement:
    """A parameter that was measured, or the reason why it was not.

    Attributes:
        name: the parameter's name.
        value: its value; None: it was not measured.
        unit: its unit.
        formula: how it is computed, see `Measure`.
        assumed: the value that the cost model assumes; None: it has no such parameter.
        reason: why it was not measured; "": it was.
    """

    name: str
    value: float | None
    unit: str
    formula: str
    assumed: float | None
    reason: str = ""


def measure(results: Iterable[StageResult], target: str) -> list[Measurement]:
    """All parameters, measured as far as their stages passed."""
    times = Times(results, target)
    return [_measured(each, times) for each in MEASURES]


def _measured(each: Measure, times: Times) -> Measurement:
    assumed = TABLE[each.name].value if each.name in TABLE else None
    found = Measurement(each.name, None, each.unit, each.formula, assumed)
    try:
        value = each.value(times)
    except KeyError as missing:
        return replace(found, reason=f"stage {missing} did not pass")
    except ZeroDivisionError:
        value = math.inf
    if not 0 < value < math.inf:
        return replace(found, reason=f"the times give {value:g}: their noise is larger than what they tell")
    return replace(found, value=value)


def _array_change(times: Times) -> float:
    """Seconds of a change of array: "arrays in turn" without its calls. Each array has half the changes."""
    changes = times.work("arrays in turn")
    calls = changes / 2 * (times.seconds("dequant_engine bf16") + times.seconds("gemm bf16"))
    return (times.seconds("arrays in turn") - calls) / changes


def _wait(times: Times) -> float:
    """Seconds of a wait: a layer's time without its weights on the streams; its few keys are negligible."""
    layer = times.seconds("decode_layer, two layers") - times.seconds("decode_layer")
    return (layer - SHAPE.weight_bytes() * times.cost("copy") / _DECODE_STREAMS) / _ATTENTION.waits


MEASURES = (
    Measure("dispatch", "s", "T(copy)", lambda times: times.seconds("copy")),
    Measure("channel_read", "bytes/s", "d bytes / d T(copy)", lambda times: 1 / times.cost("copy")),
    Measure("memory_read", "bytes/s", "d bytes / d T(streams)", lambda times: 1 / times.cost("streams")),
    Measure(
        "array_change", "s", "(T(arrays in turn) - 8 T(dequant_engine bf16) - 8 T(gemm bf16)) / 16 changes",
        _array_change,
    ),
    Measure(
        "wait", "s",
        f"(T(decode_layer, two layers) - T(decode_layer) - weights' bytes / {_DECODE_STREAMS} channel_read) / "
        f"{_ATTENTION.waits}",
        _wait,
    ),
    Measure(
        "own_host_per_logit", "s", "reading and comparing / values (copy, more)",
        lambda times: times.reading("copy, more"),
    ),
    Measure(
        "dequant_block", "cycles", "clock x d T(kernel q4nx_dequant_bf16) / d calls",
        lambda times: times.cycles("kernel q4nx_dequant_bf16"),
    ),
    Measure(
        "dqp_block", "cycles", "clock x d T(kernel fused_dqp) / d calls",
        lambda times: times.cycles("kernel fused_dqp"),
    ),
    Measure(
        "vector_element", "cycles", f"mean of clock x d T / d elements over kernels {', '.join(_VECTORS)}",
        lambda times: sum(times.cycles(f"kernel {kernel}") for kernel in _VECTORS) / len(_VECTORS),
    ),
    Measure(
        "gemm_operations", "operations/s", "d operations / d T(gemm bf16)", lambda times: 1 / times.cost("gemm bf16")
    ),
)  # fmt: skip

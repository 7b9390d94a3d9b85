# SPDX-License-Identifier: Apache-2.0
"""What a model is predicted to do on a chip: time to the first token, tokens a second, bandwidth, energy.

Everything here is **predicted**. What others published of the same model and chip is beside it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from flownpu.aie.cost.parameters import VALUES, Values
from flownpu.bench.plot import draw
from flownpu.errors import FlowNPUError
from flownpu.predict.prices import Prediction
from flownpu.predict.published import TABLES, watts
from flownpu.predict.validation import ERRORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.cost.device import Device
    from flownpu.aie.cost.phases import Cost
    from flownpu.predict.published import Table
    from flownpu.predict.target import Target

__all__ = ["Point", "PredictionReport", "predict", "published_of"]


@dataclass(frozen=True)
class Point:
    """One length of the context, or of the prompt.

    Attributes:
        context: tokens.
        ttft_seconds: of a prompt of so many.
        ttft_parts: seconds, by what takes them.
        ttft_changes: of array, in them.
        decode_tokens_per_second: after so many.
        decode_parts: seconds of a token, by what takes them.
        read_bytes_per_second: of main memory, while decoding.
        roof: tokens a second if nothing but reading main memory took time.
        decode_joules: of a token, NPU and CPU, at the published watts; None: none were published.
        prefill_joules: of the prompt.
        published: tokens a second (decode) and seconds (ttft) of others, by table.
    """

    context: int
    ttft_seconds: float
    ttft_parts: dict[str, float]
    ttft_changes: int
    decode_tokens_per_second: float
    decode_parts: dict[str, float]
    read_bytes_per_second: float
    roof: float
    decode_joules: float | None
    prefill_joules: float | None
    published: dict[str, dict[str, float]]

    @property
    def prefill_tokens_per_second(self) -> float:
        """Speed of reading the prompt, tokens a second."""
        return self.context / self.ttft_seconds

    @property
    def roof_share(self) -> float:
        """What decoding reaches of the roof."""
        return self.decode_tokens_per_second / self.roof


@dataclass(frozen=True)
class PredictionReport:
    """Predictions of a model.

    Attributes:
        model: its name.
        device: the chip.
        points: one for each length.
        vision_ttft_seconds: of an image and a short question; None: the model takes no images.
        errors: the cost model's mean error, of "decode" and "ttft", where there are published tables of the model.
    """

    model: str
    device: str
    points: tuple[Point, ...]
    vision_ttft_seconds: float | None
    errors: dict[str, float]

    @property
    def tables(self) -> list[Table]:
        """The published tables that the points are beside."""
        names = (name for point in self.points for of in point.published.values() for name in of)
        return [TABLES[name] for name in dict.fromkeys(names)]

    def plots(self) -> dict[str, str]:
        """SVG drawings by name: predicted beside published."""
        roof = [(float(point.context), point.roof) for point in self.points]
        decoding, first = self._series("decode", "decode_tokens_per_second"), self._series("ttft", "ttft_seconds")
        return {
            "decode": draw(f"{self.model}: decode, tokens/s (predicted)", decoding, roof),
            "ttft": draw(f"{self.model}: time to the first token, s (predicted)", first, []),
        }

    def _series(self, quantity: str, predicted: str) -> dict[str, list[tuple[float, float]]]:
        """By name, value over context: what is predicted, and each table's."""
        series = defaultdict[str, list[tuple[float, float]]](list)
        for point in self.points:
            for name, value in {"predicted": getattr(point, predicted), **point.published[quantity]}.items():
                series[name].append((float(point.context), value))
        return series


def predict(target: Target, device: Device, contexts: Sequence[int] = (), values: Values = VALUES) -> PredictionReport:
    """Predicts a model at these `Target.lengths`.

    Raises:
        FlowNPUError: as `Target.lengths`, or the NPU's designs have no place for one.
    """
    contexts = target.lengths(contexts)
    prediction = Prediction(target, max(contexts), device, values)
    try:
        points = tuple(_point(prediction, context) for context in contexts)
        image = prediction.image()
    except ValueError as error:
        raise FlowNPUError(f"{target.name}: the NPU's designs have no place for it: {error}") from error
    return PredictionReport(target.name, device.name, points, image.total if image else None, _errors(target.name))


def _point(prediction: Prediction, context: int) -> Point:
    name, costs = prediction.target.name, {"decode": prediction.token(context), "prefill": prediction.prompt(context)}
    token, prompt = costs["decode"], costs["prefill"]
    return Point(
        context=context,
        ttft_seconds=prompt.total,
        ttft_parts=_parts(prompt),
        ttft_changes=round(prompt.changes),
        decode_tokens_per_second=1 / token.total,
        decode_parts=_parts(token),
        read_bytes_per_second=token.read_bytes / token.total,
        roof=prediction.roof(context),
        decode_joules=_joules(name, "decode", token),
        prefill_joules=_joules(name, "prefill", prompt),
        published={quantity: published_of(name, context, quantity) for quantity in ("decode", "ttft")},
    )


def _parts(cost: Cost) -> dict[str, float]:
    """What takes time at all, the longest first."""
    return {name: value for name, value in sorted(cost.seconds.items(), key=lambda part: -part[1]) if value}


def _joules(model: str, phase: str, cost: Cost) -> float | None:
    taken = watts(model, phase)
    return None if taken is None else taken * cost.total


def published_of(model: str, context: int, quantity: str) -> dict[str, float]:
    """What tables have of it ("decode", "ttft"); tokens a second of a prompt are its time, too."""
    found = {}
    for table in TABLES.values():
        for row in table.rows():
            if (row.model, row.context) != (model, context):
                continue
            if table.quantity == quantity:
                found[table.name] = row.value
            elif (table.quantity, quantity) == ("prefill", "ttft"):
                found[table.name] = context / row.value
    return found


def _errors(model: str) -> dict[str, float]:
    """By quantity: the mean error of the tables that have the model, and no less than the mean of all tables'."""
    found: dict[str, float] = {}
    for quantity, of in (("decode", {"decode"}), ("ttft", {"ttft", "prefill"})):
        tables = {name: error for name, error in ERRORS.items() if TABLES[name].quantity in of}
        own = [error for name, error in tables.items() if model in TABLES[name].values]
        if own:
            found[quantity] = max(*own, mean(tables.values()))
    return found

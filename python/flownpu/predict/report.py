# SPDX-License-Identifier: Apache-2.0
"""A model's predicted time to the first token, tokens per second, bandwidth and energy on a chip.

Everything here is **predicted**. Published numbers of the same model and chip stand beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING

from flownpu.aie.cost.parameters import VALUES, Values
from flownpu.errors import FlowNPUError
from flownpu.predict.by_operators import DecoderByOperators, PredictionByOperators
from flownpu.predict.prices import Prediction
from flownpu.predict.published import TABLES, watts
from flownpu.predict.validation import ERRORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.cost.chips import Chip
    from flownpu.aie.cost.phases import Cost
    from flownpu.predict.published import Table
    from flownpu.predict.target import Target


@dataclass(frozen=True)
class Point:
    """The prediction for one length of the prompt or context.

    Attributes:
        context: the length in tokens.
        ttft_seconds: time to the first token for a prompt of this length.
        ttft_parts: seconds of the time to the first token, by what takes them.
        ttft_changes: changes of the array's configuration in this time.
        decode_tokens_per_second: decode rate at this length of the context.
        decode_parts: seconds of a decoded token, by what takes them.
        read_bytes_per_second: bytes per second read from main memory while decoding.
        roof: tokens per second if only reading main memory took time.
        decode_joules: energy of a decoded token at the published watts; None: none were published.
        prefill_joules: energy of the prompt, likewise.
        published: published tokens per second ("decode") and seconds ("ttft"), by the table's name.
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
        """Prefill rate: the prompt's tokens per second."""
        return self.context / self.ttft_seconds

    @property
    def roof_share(self) -> float:
        """The decode rate as a fraction of the roof."""
        return self.decode_tokens_per_second / self.roof


@dataclass(frozen=True)
class PredictionReport:
    """The predictions for a model.

    Attributes:
        model: the model's name.
        device: the chip's name.
        points: the prediction for each length.
        vision_ttft_seconds: time to the first token for an image and a short question; None: the model takes no images.
        errors: the cost model's mean relative error of "decode" and "ttft", if there are published tables of the model.
    """

    model: str
    device: str
    points: tuple[Point, ...]
    vision_ttft_seconds: float | None
    errors: dict[str, float]

    @property
    def tables(self) -> list[Table]:
        """The published tables whose numbers stand beside the points."""
        names = (name for point in self.points for of in point.published.values() for name in of)
        return [TABLES[name] for name in dict.fromkeys(names)]


def predict(target: Target, device: Chip, contexts: Sequence[int] = (), values: Values = VALUES) -> PredictionReport:
    """Predicts a model at these context lengths (none: see `Target.lengths`).

    Raises:
        FlowNPUError: a length is not in 1 .. the model's context, or the NPU's designs have no place for the model.
    """
    contexts = target.lengths(contexts)
    prediction: Prediction | PredictionByOperators
    if isinstance(target.decoder, DecoderByOperators):
        prediction = PredictionByOperators(target.decoder, device, values)
    else:
        prediction = Prediction(target, max(contexts), device, values)
    try:
        points = tuple(_point(target.name, prediction, context) for context in contexts)
        image = prediction.image()
    except ValueError as error:
        raise FlowNPUError(f"{target.name}: the NPU's designs have no place for it: {error}") from error
    return PredictionReport(target.name, device.name, points, image.total if image else None, _errors(target.name))


def _point(name: str, prediction: Prediction | PredictionByOperators, context: int) -> Point:
    costs = {"decode": prediction.token(context), "prefill": prediction.prompt(context)}
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
    """Seconds of all parts that take any time, the longest first."""
    return {name: value for name, value in sorted(cost.seconds.items(), key=lambda part: -part[1]) if value}


def _joules(model: str, phase: str, cost: Cost) -> float | None:
    taken = watts(model, phase)
    return None if taken is None else taken * cost.total


def published_of(model: str, context: int, quantity: str) -> dict[str, float]:
    """Published values of a quantity ("decode", "ttft") by table; published prefill rates count as "ttft", too."""
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
    """By quantity, the largest error of the tables that have the model, at least the mean error of all tables."""
    found: dict[str, float] = {}
    for quantity, of in (("decode", {"decode"}), ("ttft", {"ttft", "prefill"})):
        tables = {name: error for name, error in ERRORS.items() if TABLES[name].quantity in of}
        own = [error for name, error in tables.items() if model in TABLES[name].values]
        if own:
            found[quantity] = max(*own, mean(tables.values()))
    return found

# SPDX-License-Identifier: Apache-2.0
"""What a model is predicted to do on a chip: time to the first token, tokens a second, bandwidth, energy.

Everything here is **predicted**. What others published of the same model and chip is beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu.aie.cost.parameters import VALUES, Values
from flownpu.benchmark_plot import draw
from flownpu.prediction import decode, decoder
from flownpu.prediction_prefill import prefill, vision
from flownpu.published import CONTEXTS, TABLES, power

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.cost.device import Device
    from flownpu.prediction_designs import Design

__all__ = ["Point", "Report", "predict"]

_WITH_VISION = "gemma3-4b"


@dataclass(frozen=True)
class Point:
    """One length of the context, or of the prompt.

    Attributes:
        context: tokens.
        ttft_seconds: of a prompt of so many, and what takes them.
        ttft_parts: see there.
        decode_tokens_per_second: after so many.
        decode_parts: seconds of a token, by what takes them.
        read_bytes_per_second: of main memory, while decoding.
        roof: tokens a second if nothing but reading main memory took time.
        decode_joules: of a token, NPU and CPU, at the published watts; None: none were published.
        prefill_joules: of the prompt.
        published: tokens a second (decode) and seconds (TTFT) of others, by table.
    """

    context: int
    ttft_seconds: float
    ttft_parts: dict[str, float]
    decode_tokens_per_second: float
    decode_parts: dict[str, float]
    read_bytes_per_second: float
    roof: float
    decode_joules: float | None
    prefill_joules: float | None
    published: dict[str, dict[str, float]]

    @property
    def prefill_tokens_per_second(self) -> float:
        """Of the prompt."""
        return self.context / self.ttft_seconds

    @property
    def roof_share(self) -> float:
        """What decoding reaches of the roof."""
        return self.decode_tokens_per_second / self.roof


@dataclass(frozen=True)
class Report:
    """Predictions of a model."""

    model: str
    device: str
    design: str
    points: tuple[Point, ...]
    vision_ttft_seconds: float | None

    def plots(self) -> dict[str, str]:
        """SVG drawings by name: predicted beside published."""
        decoding = {
            "predicted": [(float(point.context), point.decode_tokens_per_second) for point in self.points],
            **self._published("decode"),
        }
        first = {
            "predicted": [(float(point.context), point.ttft_seconds) for point in self.points],
            **self._published("ttft"),
        }
        roof = [(float(point.context), point.roof) for point in self.points]
        return {
            "decode": draw(f"{self.model}: decode, tokens/s (predicted)", decoding, roof),
            "ttft": draw(f"{self.model}: time to the first token, s (predicted)", first, []),
        }

    def _published(self, quantity: str) -> dict[str, list[tuple[float, float]]]:
        names = dict.fromkeys(name for point in self.points for name in point.published[quantity])
        return {
            name: [
                (float(point.context), point.published[quantity][name])
                for point in self.points
                if name in point.published[quantity]
            ]
            for name in names
        }


def predict(
    model: str, device: Device, design: Design, contexts: Sequence[int] = (), values: Values = VALUES
) -> Report:
    """Predicts a model at these lengths; without any, at 1k, 2k and so on, as far as the model goes.

    Raises:
        ValueError: there is no such model, or a length is not in 1 .. the model's longest context.
    """
    of = decoder(model)
    contexts = list(contexts) or [context for context in CONTEXTS if context <= of.context]
    for context in contexts:
        if not 0 < context <= of.context:
            raise ValueError(f"expected contexts of 1 to {of.context} tokens, which {model} has, got {context}")
    points = []
    for context in contexts:
        token = decode(of, context, design.decode(of), device, values)
        prompt = prefill(of, context, design, device, values)
        watts = {phase: power(model, phase) for phase in ("decode", "prefill")}
        joules = {
            phase: found.total * cost.total if (found := watts[phase]) else None
            for phase, cost in (("decode", token), ("prefill", prompt))
        }
        points.append(
            Point(
                context=context,
                ttft_seconds=prompt.total,
                ttft_parts=prompt.seconds,
                decode_tokens_per_second=1 / token.total,
                decode_parts=token.seconds,
                read_bytes_per_second=token.read_bytes / token.total,
                roof=values["memory_read"] / token.read_bytes,
                decode_joules=joules["decode"],
                prefill_joules=joules["prefill"],
                published={quantity: _published(model, context, quantity) for quantity in ("decode", "ttft")},
            )
        )
    image = vision(of, design, device, values).total if model == _WITH_VISION else None
    return Report(model, device.name, design.name, tuple(points), image)


def _published(model: str, context: int, quantity: str) -> dict[str, float]:
    """What tables have of it; tokens a second of a prompt are its time, too."""
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

# SPDX-License-Identifier: Apache-2.0
"""The predicted speed of one conversation on two devices: the first reads its prompts, the second writes its tokens.

Everything here is **predicted**, from the predictions of each device alone and the bytes that a switch copies. A GPU's
are bounds (`flownpu.predict.gpu`), so that they flatter it beside an NPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu.aie.cost.chips import CHIPS, Chip
from flownpu.aie.cost.parameters import VALUES
from flownpu.predict.gpu import GPUS, Gpu, GpuPoint, predict_gpu
from flownpu.predict.report import Point, predict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.predict.target import Target

DEVICES: dict[str, Chip | Gpu] = {**CHIPS, **GPUS}
# Lengths of a prompt that are tried for `threshold`.
_PROMPTS = tuple(1 << place for place in range(1, 13))  # 2 .. 4096
_COPIES = 2
_PASSES = 2  # a copy reads and writes


@dataclass(frozen=True)
class PairPoint:
    """The prediction for one length of the prompt.

    Attributes:
        context: the length in tokens.
        ttft_seconds: time to the first token, which the first device computes.
        decode_tokens_per_second: rate of the second device at this length of the context.
        handed_over_bytes: keys and values of the prompt, which the second device takes over.
        handed_over_seconds: the time of that, once, between the first and the second token.
        prompt_joules: energy of the prompt at the published watts; None: none were published.
        token_joules: energy of a decoded token, likewise.
    """

    context: int
    ttft_seconds: float
    decode_tokens_per_second: float
    handed_over_bytes: int
    handed_over_seconds: float
    prompt_joules: float | None
    token_joules: float | None


@dataclass(frozen=True)
class PairReport:
    """The predictions for a model on two devices.

    Attributes:
        model: the model's name.
        device: "kraken-350+radeon-890m".
        points: the prediction for each length.
        threshold: from how many new tokens on the first device, with the hand-over, is faster than the second alone:
            the shortest of the powers of two up to 4096; None: at none of them.
    """

    model: str
    device: str
    points: tuple[PairPoint, ...]
    threshold: int | None


def predict_pair(target: Target, device: str, contexts: Sequence[int] = ()) -> PairReport:
    """Predicts a model at these context lengths (none: see `Target.lengths`) on "PROMPTS+TOKENS", two of `DEVICES`.

    Raises:
        KeyError: a device is not one of `DEVICES`.
        FlowNPUError: a length is not in 1 .. the model's context, or the NPU's designs have no place for the model.
    """
    first, second = (DEVICES[name] for name in device.split("+"))
    lengths = target.lengths(contexts)
    tried = [tokens for tokens in _PROMPTS if tokens <= target.decoder.positions]
    prompts, tokens = (_points(target, one, [*lengths, *tried]) for one in (first, second))
    points = []
    for length in lengths:
        prompt, token = prompts[length], tokens[length]
        points.append(
            PairPoint(
                length,
                prompt.ttft_seconds,
                token.decode_tokens_per_second,
                handed_over_bytes(target, length),
                handed_over_seconds(target, length),
                prompt.prefill_joules if isinstance(prompt, Point) else None,
                token.decode_joules if isinstance(token, Point) else None,
            )
        )
    sooner = (n for n in tried if prompts[n].ttft_seconds + handed_over_seconds(target, n) < tokens[n].ttft_seconds)
    return PairReport(target.name, device, tuple(points), next(sooner, None))


def handed_over_bytes(target: Target, tokens: int) -> int:
    """Keys and values of this many tokens in bf16, which a switch copies."""
    shape = target.decoder.shape
    return tokens * len(target.decoder.windows) * shape.kv_heads * 2 * shape.row_bytes


def handed_over_seconds(target: Target, tokens: int) -> float:
    """The time of copying them, from one device's layout to rows of the graph's type, and from these to the other's."""
    return handed_over_bytes(target, tokens) * _COPIES * _PASSES / VALUES["host_memory"]


def _points(target: Target, device: Chip | Gpu, lengths: list[int]) -> dict[int, Point | GpuPoint]:
    found = predict_gpu(target, device, lengths) if isinstance(device, Gpu) else predict(target, device, lengths).points
    return {point.context: point for point in found}

# SPDX-License-Identifier: Apache-2.0
"""The predicted speed of one conversation on two devices: the first reads its prompts, the second writes its tokens.

Everything here is **predicted**, from the predictions of each device alone and the bytes that a switch copies. A GPU's
are bounds (`flownpu.predict.gpu`), so that they flatter it beside an NPU. Joules are predicted times at published watts
of NPU, CPU and iGPU together; the GPU's watts were measured with llama.cpp, whose host is busy meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flownpu.aie.cost.chips import CHIPS, Chip
from flownpu.aie.cost.parameters import VALUES
from flownpu.bench.stages import Choice, Prices, Stages, choose
from flownpu.predict.gpu import GPUS, Gpu, GpuPoint, predict_gpu
from flownpu.predict.published import watts
from flownpu.predict.report import Point, predict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.predict.target import Target

DEVICES: dict[str, Chip | Gpu] = {**CHIPS, **GPUS}
# Lengths of a prompt that are tried for `threshold`.
_PROMPTS = tuple(1 << place for place in range(1, 13))  # 2 .. 4096
ANSWER = 128  # tokens of the conversation that `PairReport` compares
_COPIES = 2
_PASSES = 2  # a copy reads and writes


@dataclass(frozen=True)
class PairPoint:
    """The prediction for one length of the prompt.

    Attributes:
        context: the length in tokens.
        ttft_seconds: time to the first token, which the first device computes.
        decode_tokens_per_second: rate of the second device at this length of the context.
        handed_over_bytes: keys and values of the prompt that the second device takes over: in layers with a window
            those that it shows to the next token.
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
        speed: the fastest of the two devices and the pairs of them, for a prompt of the first length of `points`, or of
            4096 if that is longer, and an answer of 128 tokens; costs are seconds.
        energy: likewise, with least joules; None: no watts were published.
        prices: what both compare.
    """

    model: str
    device: str
    points: tuple[PairPoint, ...]
    speed: Choice
    energy: Choice | None
    prices: tuple[Prices, ...]


def predict_pair(target: Target, device: str, contexts: Sequence[int] = ()) -> PairReport:
    """Predicts a model at these context lengths (none: see `Target.lengths`) on "PROMPTS+TOKENS", two of `DEVICES`.

    Raises:
        KeyError: a device is not one of `DEVICES`.
        FlowNPUError: a length is not in 1 .. the model's context, or the NPU's designs have no place for the model.
    """
    first, second = (DEVICES[name] for name in device.split("+"))
    lengths = target.lengths(contexts)
    tried = [tokens for tokens in _PROMPTS if tokens <= target.whole.positions]
    prompts, tokens = found = [_points(target, one, [*lengths, *tried]) for one in (first, second)]
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
                joules(target.name, prompt)[0],
                joules(target.name, token)[1],
            )
        )
    asked = min(lengths[0], tried[-1])
    speed, energy = [], []
    for name, of in zip(device.split("+"), found, strict=True):
        known = {length: of[length] for length in (*tried, asked)}
        seconds = {length: point.ttft_seconds for length, point in known.items()}
        speed.append(Stages(name, seconds, 1 / of[asked].decode_tokens_per_second))
        prompt_joules = {length: joules(target.name, point)[0] for length, point in known.items()}
        token_joules = joules(target.name, of[asked])[1]
        if token_joules is not None and None not in prompt_joules.values():
            energy.append(Stages(name, {n: value or 0 for n, value in prompt_joules.items()}, token_joules))
    switch = {length: handed_over_seconds(target, length) for length in {*tried, asked}}
    prices = [Prices("predicted", "seconds", asked, ANSWER, tuple(speed), switch)]
    if len(energy) == len(speed):
        # A switch's copy takes some ms of one thread of the processor, a hundredth of any prompt's joules.
        prices.append(Prices("predicted", "joules", asked, ANSWER, tuple(energy), dict.fromkeys(switch, 0.0)))
    choices = [choose(table) for table in prices]
    return PairReport(
        target.name, device, tuple(points), choices[0], choices[1] if choices[1:] else None, tuple(prices)
    )


def joules(model: str, point: Point | GpuPoint) -> tuple[float | None, float | None]:
    """Energy of a point's prompt and of a decoded token at published watts; None: none were published."""
    if isinstance(point, Point):
        return point.prefill_joules, point.decode_joules
    prefill, decode = (watts(model, phase, "gpu") for phase in ("prefill", "decode"))
    return (
        None if prefill is None else prefill * point.ttft_seconds,
        None if decode is None else decode / point.decode_tokens_per_second,
    )


def handed_over_bytes(target: Target, tokens: int) -> int:
    """Keys and values in bf16 that a switch after a prompt of this many tokens copies."""
    shape = target.whole.shape
    rows = sum(min(tokens, window - 1) if window else tokens for window in target.whole.windows)
    return rows * shape.kv_heads * 2 * shape.row_bytes


def handed_over_seconds(target: Target, tokens: int) -> float:
    """The time of copying them, from one device's layout to rows of the graph's type, and from these to the other's."""
    return handed_over_bytes(target, tokens) * _COPIES * _PASSES / VALUES["host_memory"]


def _points(target: Target, device: Chip | Gpu, lengths: list[int]) -> dict[int, Point | GpuPoint]:
    found = predict_gpu(target, device, lengths) if isinstance(device, Gpu) else predict(target, device, lengths).points
    return {point.context: point for point in found}

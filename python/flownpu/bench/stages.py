# SPDX-License-Identifier: Apache-2.0
"""Finds the cheapest devices of a conversation: one for all of it, or one for prompts and another for tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flownpu import _native


@dataclass(frozen=True)
class Stages:
    """The price of prompts and tokens on a device, in seconds or in joules.

    Attributes:
        device: the device's name.
        prompts: up to the first token, by the prompt's number of new tokens.
        token: for each further token.
    """

    device: str
    prompts: Mapping[int, float]
    token: float

    def __str__(self) -> str:
        return f"{_row(self.device, self.prompts)} token={self.token:.8g}"


@dataclass(frozen=True)
class Prices:
    """The prices of a model; as text, a table of the provider's option `prices` (ops/stage_prices.h).

    Attributes:
        source: where they are from.
        unit: the unit of all prices.
        prompt: tokens of the compared prompt, for which each device has a price.
        answer: tokens that are decoded after the first.
        devices: the devices.
        switch: what handing over the keys and values of that many tokens takes; empty: pairs are no choice.
    """

    source: Literal["measured", "predicted"]
    unit: Literal["seconds", "joules"]
    prompt: int
    answer: int
    devices: tuple[Stages, ...]
    switch: Mapping[int, float]

    def __str__(self) -> str:
        rows = [f"{self.source} {self.unit} prompt={self.prompt} answer={self.answer}", *map(str, self.devices)]
        return " | ".join([*rows, _row("switch", self.switch)] if self.switch else rows)


@dataclass(frozen=True)
class Choice:
    """The cheapest devices.

    Attributes:
        device: "gpu", or "npu+gpu": the first reads prompts, the second writes tokens.
        threshold: from how many new tokens on a run is the first one's: the least length from which on all that are
            known are cheaper there, each with a switch to it; None with one device.
        costs: what prompt and answer take, by device or pair, the cheapest first.
    """

    device: str
    threshold: int | None
    costs: Mapping[str, float]


def choose(prices: Prices) -> Choice:
    """Compares all devices and pairs of them, as a session with `device=auto` does."""
    device, threshold, costs = _native.choose_stages(str(prices))
    return Choice(device, threshold, dict(costs))


def _row(name: str, prices: Mapping[int, float]) -> str:
    return " ".join([name, *(f"{tokens}={price:.8g}" for tokens, price in prices.items())])

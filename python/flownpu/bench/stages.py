# SPDX-License-Identifier: Apache-2.0
"""Finds the cheapest devices of a conversation: one for all of it, or one for prompts and another for tokens."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Stages:
    """The cost of prompts and tokens on a device, in seconds or in joules.

    Attributes:
        device: the device's name.
        prompts: up to the first token, by the prompt's number of new tokens.
        token: for each further token.
    """

    device: str
    prompts: Mapping[int, float]
    token: float


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


def choose(devices: Iterable[Stages], switch: Callable[[int], float], prompt: int, answer: int) -> Choice:
    """Compares all devices and pairs of them for a prompt of `prompt` new tokens and `answer` further ones.

    Args:
        devices: what each takes; `prompt` is among the lengths of all.
        switch: what handing over the keys and values of that many tokens takes.
        prompt: tokens of the prompt.
        answer: tokens that are decoded after the first.
    """
    found: dict[str, tuple[float, int | None]] = {}
    for first, second in product(list(devices), repeat=2):
        cost = first.prompts[prompt] + answer * second.token
        if first is second:
            found[first.device] = cost, None
            continue
        threshold = _threshold(first, second, switch)
        if threshold is not None and threshold <= prompt:
            found[f"{first.device}+{second.device}"] = cost + switch(prompt), threshold
    costs = {device: cost for device, (cost, _) in sorted(found.items(), key=lambda entry: entry[1][0])}
    device = next(iter(costs))
    return Choice(device, found[device][1], costs)


def _threshold(first: Stages, second: Stages, switch: Callable[[int], float]) -> int | None:
    """See `Choice.threshold`; None: not even the longest prompt is cheaper on the first."""
    found = None
    for tokens in sorted(first.prompts.keys() & second.prompts.keys(), reverse=True):
        if tokens < 2 or first.prompts[tokens] + switch(tokens) >= second.prompts[tokens]:
            break
        found = tokens
    return found

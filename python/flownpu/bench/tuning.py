# SPDX-License-Identifier: Apache-2.0
"""Measures a model on each device of this machine, and finds the devices on which a conversation takes least."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from flownpu.bench.measurement import Case, Measurement, Measurements, Progress, measure, own_engine
from flownpu.bench.stages import Choice, Prices, Stages, choose
from flownpu.errors import FlowNPUError
from flownpu.registration import get_ep_name

_LENGTHS = (4, 16, 64, 256)  # of shorter prompts, for the threshold
_EACH_PROMPT = {"prompt_threshold": "2"}
_UNITS: dict[Literal["speed", "energy"], Literal["seconds", "joules"]] = {"speed": "seconds", "energy": "joules"}


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`.

    Attributes:
        choice: the devices.
        switch: what a switch after the prompt took, in the choice's unit; None: no pair was measured.
        failures: the devices that could not be measured, with the reason.
        prefer: what was compared.
        prices: what was measured: seconds, and joules if there are counters.
    """

    choice: Choice
    switch: float | None
    failures: Mapping[str, str]
    prefer: Literal["speed", "energy"]
    prices: tuple[Prices, ...]

    def options(self) -> dict[str, str]:
        """The provider's options that choose these devices."""
        threshold = {} if self.choice.threshold is None else {"prompt_threshold": str(self.choice.threshold)}
        return {"device": self.choice.device, **threshold}


def tune(
    model: Path,
    *,
    devices: Mapping[str, Mapping[str, str]],
    prefer: Literal["speed", "energy"],
    prompt: int,
    answer: int,
    repeats: int,
    threads: int,
    vocabulary_size: int,
    progress: Progress = lambda _name, _done, _total: None,
) -> Tuned:
    """Measures the devices in turn, then the pair that promises most beside the best single device.

    Args:
        model: the model's folder.
        devices: the provider's options of each device, by its name; the first must not fail.
        prefer: whether to compare seconds, or joules of the processor's packages.
        prompt: tokens of the prompt.
        answer: tokens of the answer after the first, 2 or more.
        repeats: number of rounds.
        threads: threads of the CPU.
        vocabulary_size: tokens are drawn from 0 .. vocabulary_size - 1.
        progress: see `measure`.

    Raises:
        FlowNPUError: the first device failed, or there are no counters of energy.
    """
    long = Case(0, prompt, answer + 1)
    cases = [*(Case(0, length, 3) for length in _LENGTHS if length < prompt), long]

    def run(given: Mapping[str, Mapping[str, str]], of: list[Case]) -> Measurements:
        engines = [
            replace(own_engine(model, provider="flownpu", options=options), name=name)
            for name, options in given.items()
        ]
        return measure(
            engines, of, repeats=repeats, threads=threads, vocabulary_size=vocabulary_size, progress=progress
        )

    found = run(devices, cases)
    if found.interrupted:
        raise FlowNPUError("interrupted: nothing was chosen")
    working = {name: of for name, of in found.engines.items() if name not in found.failures}
    prices = {
        of: Prices("measured", _UNITS[of], prompt, answer, tuple(stages), {})
        for of in _UNITS
        if (stages := _stages(working, cases, of, needed=of == prefer))
    }
    lengths = [case.prompt for case in cases]
    first = choose(replace(prices[prefer], switch=dict.fromkeys(lengths, 0.0)))

    def tuned(choice: Choice, switch: float | None, failures: Mapping[str, str]) -> Tuned:
        return Tuned(choice, switch, failures, prefer, tuple(prices.values()))

    if first.threshold is None:
        return tuned(first, None, found.failures)
    single = next(device for device in first.costs if "+" not in device)
    prompts, _, tokens = first.device.partition("+")
    options = {**devices[tokens], **devices[prompts], "device": first.device, **_EACH_PROMPT}
    both = run({single: devices[single], first.device: options}, [long])
    if reason := both.failures.get(first.device):
        return tuned(choose(prices[prefer]), None, {**found.failures, first.device: reason})
    switches = {}
    for of, table in prices.items():
        (pair,) = _stages({first.device: both.engines[first.device]}, [long], of, needed=True)
        each = {of_one.device: of_one for of_one in table.devices}
        parts = each[prompts].prompts[prompt] + answer * each[tokens].token
        switches[of] = max(pair.prompts[prompt] + answer * pair.token - parts, 0)
        # Other pairs copy the same keys and values; their switch is not measured.
        prices[of] = replace(table, switch={count: switches[of] * count / prompt for count in lengths})
    return tuned(choose(prices[prefer]), switches[prefer], found.failures)


def _stages(
    found: Mapping[str, Measurement], cases: list[Case], prefer: Literal["speed", "energy"], *, needed: bool
) -> list[Stages]:
    """Those of each device; none without counters of energy, for which FlowNPUError is raised if they are needed."""
    try:
        return [stages_of(name, measured, cases, prefer) for name, measured in found.items()]
    except FlowNPUError:
        if needed:
            raise
        return []


def stages_of(device: str, measured: Measurement, cases: list[Case], prefer: Literal["speed", "energy"]) -> Stages:
    """The medians of a device's measurements.

    Raises:
        FlowNPUError: there are no counters of energy.
    """
    prompts, tokens = (
        (measured.first_token, measured.decode)
        if prefer == "speed"
        else (measured.prefill_joules, measured.decode_joules)
    )
    if any(case not in prompts or case not in tokens for case in cases):
        raise FlowNPUError(
            "expected counters of energy in /sys/class/powercap that this process may read, and there are none: read "
            "them as root, or use --prefer speed; `flownpu predict MODEL --device kraken-350+radeon-890m` has joules "
            "at published watts"
        )
    long = cases[-1]
    return Stages(
        device, {case.prompt: median(prompts[case]) for case in cases}, median(tokens[long]) / (long.generate - 1)
    )


def write_prices(folder: Path, settings: dict[str, Any], prices: Iterable[Prices], prefer: str) -> None:
    """Puts prices into the folder's genai_config.json, by which every session with `device=auto` chooses its devices.

    Args:
        folder: the model's folder.
        settings: the content of its genai_config.json, which is changed: the provider's `device` becomes auto, and
            other options stay, but a threshold of devices that were chosen before does not.
        prices: the prices of one unit, or of both.
        prefer: "speed" or "energy".
    """
    entries = settings["model"]["decoder"].setdefault("session_options", {}).setdefault("provider_options", [])
    entry = next((entry[get_ep_name()] for entry in entries if get_ep_name() in entry), None)
    if entry is None:
        entries.append({get_ep_name(): (entry := {})})
    entry.pop("prompt_threshold", None)
    entry.update(device="auto", prefer=prefer, prices="; ".join(map(str, prices)))
    temporary = folder / ".genai_config.json.new"
    temporary.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / "genai_config.json")

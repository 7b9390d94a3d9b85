# SPDX-License-Identifier: Apache-2.0
"""`flownpu tune`: the choice of devices from what was measured, by hand-made measurements."""

import json
from pathlib import Path
from typing import Any

import pytest

from flownpu.bench import tuning, worker
from flownpu.bench.measurement import Case, Measurement, Measurements
from flownpu.bench.stages import Choice, Prices, Stages, choose
from flownpu.errors import FlowNPUError
from flownpu.registration import get_ep_name

# Seconds: the first reads 100 tokens in a tenth of the time, and takes 3 s to begin at all.
READER = Stages("reader", {4: 3, 16: 3, 64: 4, 100: 5}, 2)
WRITER = Stages("writer", {4: 1, 16: 4, 64: 30, 100: 50}, 1)
PROMPT, ANSWER = 100, 10


def chosen(*devices: Stages, switch: float | None) -> Choice:
    """The choice with a switch of so many seconds a token; None: no pairs."""
    lengths = devices[0].prompts
    each = {} if switch is None else {length: switch * length for length in lengths}
    return choose(Prices("measured", "seconds", PROMPT, ANSWER, devices, each))


def test_pair_is_chosen_from_least_length_that_pays_with_its_switch():
    for switch, threshold in ((0, 16), (0.08, 64), (0.4, 64), (0.5, None), (None, None)):
        choice = chosen(READER, WRITER, switch=switch)
        pair = {} if threshold is None or switch is None else {"reader+writer": 5 + 10 * 1 + 100 * switch}
        costs = pair | {"reader": 5 + 10 * 2, "writer": 50 + 10 * 1}
        assert choice.costs == pytest.approx(costs)
        assert list(choice.costs) == sorted(costs, key=lambda device: costs[device])
        least = min(costs, key=lambda device: costs[device])
        assert (choice.device, choice.threshold) == (least, threshold if "+" in least else None)


def test_device_that_is_best_at_both_is_chosen_alone():
    best = Stages("best", {4: 1, 16: 1, 64: 1, 100: 1}, 0.5)
    choice = chosen(READER, best, switch=0)
    assert (choice.device, choice.threshold, list(choice.costs)) == ("best", None, ["best", "best+reader", "reader"])


class Machine:
    """Takes the place of `measure`: devices with given seconds, or joules."""

    def __init__(self, stages: dict[str, Stages], switch: float, *, energy: bool) -> None:
        self.stages, self.switch, self.energy = stages, switch, energy
        self.runs: list[dict[str, dict[str, str]]] = []

    def measure(self, engines: list[Any], cases: list[Case], **_: Any) -> Measurements:
        self.runs.append({engine.name: engine.options for engine in engines})
        found = Measurements(cases, {engine.name: Measurement() for engine in engines})
        for name, measured in found.engines.items():
            if any(part not in self.stages for part in name.split("+")):
                found.failures[name] = f"there is no {name}"
                continue
            first, _, second = name.partition("+")
            for case in cases:
                steps = (case.generate - 1) * self.stages[second or first].token
                switch = self.switch if second else 0
                prompt = self.stages[first].prompts[case.prompt]
                joules = {"prefill_joules": prompt, "decode_joules": steps + switch} if self.energy else {}
                times = {"prefill_seconds": 1, "first_token_seconds": prompt, "decode_seconds": steps + switch}
                empty = {"first_step_seconds": 1, "prefill_joules": None, "decode_joules": None}
                measured.add(case, empty | times | joules)
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*stages: Stages, switch: float = 0, energy: bool = True) -> Machine:
        made = Machine({of.device: of for of in stages}, switch, energy=energy)
        monkeypatch.setattr(tuning, "measure", made.measure)
        return made

    return make


def run(prefer: Any = "speed") -> tuning.Tuned:
    devices = {name: {"device": name, "threads": "2"} for name in ("writer", "reader", "absent")}
    return tuning.tune(
        Path(), devices=devices, prefer=prefer, prompt=PROMPT, answer=ANSWER, repeats=1, threads=1, vocabulary_size=9
    )


@pytest.mark.parametrize("prefer", ["speed", "energy"])
def test_best_pair_is_measured_beside_best_device(machine: Any, prefer: str) -> None:
    found = machine(READER, WRITER, switch=2.5)
    tuned = run(prefer)
    options = {"device": "reader+writer", "prompt_threshold": "2", "threads": "2", "provider": "flownpu"}
    assert found.runs[1] == {"reader": found.runs[0]["reader"], "reader+writer": options}
    assert tuned.options() == {"device": "reader+writer", "prompt_threshold": "16"}
    assert tuned.switch == pytest.approx(2.5)
    assert tuned.choice.costs == pytest.approx({"reader+writer": 17.5, "reader": 25, "writer": 60})
    assert tuned.failures == {"absent": "there is no absent"}
    # A session chooses the same.
    of_unit = {prices.unit: prices for prices in tuned.prices}
    assert choose(of_unit["seconds" if prefer == "speed" else "joules"]) == tuned.choice
    assert list(of_unit) == ["seconds", "joules"]


def test_pair_with_slow_switch_is_not_chosen(machine: Any) -> None:
    machine(READER, WRITER, switch=11)
    tuned = run()
    assert tuned.options() == {"device": "reader"}
    assert choose(tuned.prices[0]).device == "reader"


def test_energy_without_counters_is_refused(machine: Any) -> None:
    machine(READER, WRITER, energy=False)
    assert run().options()["device"] == "reader+writer"
    with pytest.raises(FlowNPUError, match="expected counters of energy in /sys/class/powercap"):
        run("energy")


def test_counters_of_packages_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "POWERCAP", tmp_path)
    assert worker.energy() is None
    for zone, name, joules in (("0", "package-0", 3), ("0:0", "core", 100), ("1", "package-1", 4), ("2", "psys", 50)):
        folder = tmp_path / f"intel-rapl:{zone}"
        folder.mkdir()
        (folder / "name").write_text(f"{name}\n")
        (folder / "energy_uj").write_text(f"{joules * 10**6}\n")
    assert worker.energy() == 7
    assert worker.between(7, 9.5) == 2.5
    assert worker.between(7, 1) is None, "the counter began anew"
    assert worker.between(None, 1) is None
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert worker.energy() is None


def test_sessions_choose_by_written_prices(flownpu: Any, model_copy: Path) -> None:
    found = flownpu(
        "tune", model_copy, "--devices", "cpu", "--prompt", 8, "--answer", 3, "--repeats", 1, "--write", "--json",
        "--option", "threads=1",
    )  # fmt: skip
    assert json.loads(found.out)["options"] == {"device": "cpu"}
    config = json.loads((model_copy / "genai_config.json").read_text())
    ((entry,),) = (entries.values() for entries in config["model"]["decoder"]["session_options"]["provider_options"])
    assert (entry["device"], entry["prefer"]) == ("auto", "speed")
    assert entry["prices"].startswith("measured seconds prompt=8 answer=2 | cpu 4=")
    assert "because device=auto by measured seconds: tokens: cpu " in flownpu("explain", model_copy).out.replace(
        "\n", " "
    )
    # The provider gets what is written there: it refuses a device that it does not know.
    prices = Prices("measured", "seconds", 4, 1, (Stages("reader", {4: 1}, 1),), {})
    tuning.write_prices(model_copy, config, [prices], "speed")
    assert "prices = 'reader'" in flownpu("run", model_copy, "-p", "Strings").err


def test_threshold_of_earlier_choice_goes(tmp_path: Path) -> None:
    entry = {"device": "npu+gpu", "prompt_threshold": "64", "threads": "2"}
    settings = {"model": {"decoder": {"session_options": {"provider_options": [{get_ep_name(): entry}]}}}}
    tuning.write_prices(tmp_path, settings, [Prices("predicted", "joules", 4, 1, (WRITER, READER), {4: 0.5})], "energy")
    written = json.loads((tmp_path / "genai_config.json").read_text())
    assert written["model"]["decoder"]["session_options"]["provider_options"][0][get_ep_name()] == {
        "device": "auto", "threads": "2", "prefer": "energy",
        "prices": "predicted joules prompt=4 answer=1 | writer 4=1 16=4 64=30 100=50 token=1 | "
        "reader 4=3 16=3 64=4 100=5 token=2 | switch 4=0.5",
    }  # fmt: skip

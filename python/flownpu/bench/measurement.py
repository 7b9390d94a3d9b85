# SPDX-License-Identifier: Apache-2.0
"""Measures engines side by side: each run in a separate process, the engines in turn (A B C A B C ...).

A disturbance of some seconds then slows all engines alike, and no engine inherits another's memory or threads.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from flownpu.bench.busy import busy_cores
from flownpu.bench.roofline import read_bandwidth
from flownpu.errors import FlowNPUError
from flownpu.system import NEW_GROUP

WORKER = Path(__file__).with_name("worker.py")
OWN = "flownpu"


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated measurements of one quantity."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """The spread of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Case:
    """One measurement: after `depth` tokens, `prompt` tokens are read, then `generate` tokens are generated."""

    depth: int
    prompt: int
    generate: int

    @property
    def context(self) -> int:
        """Tokens in the KV cache when generation begins."""
        return self.depth + self.prompt

    def check(self, context_length: int) -> None:
        """Raises FlowNPUError unless the case fits a model's context."""
        if self.context + self.generate > context_length:
            before = f" after {self.depth} others" if self.depth else ""
            raise FlowNPUError(
                f"{self.prompt} prompt tokens{before} and {self.generate} new ones do not fit the model's context of "
                f"{context_length}: lower --prompt, --depth or --generate"
            )


@dataclass(frozen=True)
class Engine:
    """How to start an engine.

    Attributes:
        name: the engine's name in the results.
        python: the Python interpreter of its environment.
        script: the file with its class Engine.
        model: the folder with the model in the engine's format.
        options: options of the engine.
    """

    name: str
    python: Path
    script: Path
    model: Path
    options: dict[str, str] = field(default_factory=dict)


def own_engine(model: Path, *, provider: str, options: Mapping[str, str]) -> Engine:
    """This project's engine, in this environment; `options` are those of FlowNPU's provider."""
    script = Path(__file__).with_name("engine.py")
    return Engine(OWN, Path(sys.executable), script, model, {"provider": provider, **options})


@dataclass
class Measurement:
    """Measurements of one engine; lists have one entry for each run. Times in seconds, memory in bytes."""

    version: str = ""
    placement: str = ""
    load: list[float] = field(default_factory=list)
    memory_before: list[int] = field(default_factory=list)
    """Resident before the model was opened: Python and its libraries."""
    memory_resident: list[int] = field(default_factory=list)
    """Resident at the end, including mapped pages of the model's file that were read."""
    memory_anonymous: list[int] = field(default_factory=list)
    """The part of `memory_resident` that no file backs: buffers, the KV cache, copies of weights."""
    memory_peak: list[int] = field(default_factory=list)
    prefill: dict[Case, list[float]] = field(default_factory=dict)
    """From the prompt's first token to the logits of its last."""
    first_token: dict[Case, list[float]] = field(default_factory=dict)
    """From the prompt's first token to the first new token."""
    decode: dict[Case, list[float]] = field(default_factory=dict)
    """From the first new token to the last: generate - 1 steps."""
    switch: dict[Case, list[float]] = field(default_factory=dict)
    """By how much the first of these steps is longer than the mean of the others: with two devices, a switch."""
    prefill_joules: dict[Case, list[float]] = field(default_factory=dict)
    """Energy of the processor's packages, for the time of `first_token`; without counters there are no entries."""
    decode_joules: dict[Case, list[float]] = field(default_factory=dict)
    """Likewise, for the time of `decode`."""

    def prefill_rate(self, case: Case) -> Spread | None:
        """Tokens of the prompt per second; None if the case was not measured."""
        times = self.prefill.get(case)
        return Spread.of([case.prompt / time for time in times]) if times else None

    def decode_rate(self, case: Case) -> Spread | None:
        """New tokens per second, without the first, which the prefill computes; None if the case was not measured."""
        times = self.decode.get(case)
        return Spread.of([(case.generate - 1) / time for time in times]) if times else None

    def add(self, case: Case, times: dict[str, Any]) -> None:
        """Adds a run of a case: what worker.py reports."""
        self.prefill.setdefault(case, []).append(times["prefill_seconds"])
        self.first_token.setdefault(case, []).append(times["first_token_seconds"])
        self.decode.setdefault(case, []).append(times["decode_seconds"])
        if case.generate > 2:
            others = (times["decode_seconds"] - times["first_step_seconds"]) / (case.generate - 2)
            self.switch.setdefault(case, []).append(times["first_step_seconds"] - others)
        for name, joules in (("prefill_joules", self.prefill_joules), ("decode_joules", self.decode_joules)):
            if times[name] is not None:
                joules.setdefault(case, []).append(times[name])


@dataclass
class Measurements:
    """The results of `measure`, in the order of the engines."""

    cases: list[Case]
    engines: dict[str, Measurement]
    bandwidth: list[float] = field(default_factory=list)
    """Bytes per second that all threads, but one for each busy core, read together, one entry for each round.

    An entry is the mean of measurements before and after the first engine's turn: on a virtual machine, which shares
    its memory's bandwidth, it changes within minutes.
    """
    failures: dict[str, str] = field(default_factory=dict)
    """The error messages of engines that failed, by the engine's name."""
    interrupted: bool = False


Progress = Callable[[str, int, int], None]
"""Called with the name of the engine that runs, the number of measured cases and that of all cases."""


def measure(
    engines: list[Engine],
    cases: list[Case],
    *,
    repeats: int,
    threads: int,
    vocabulary_size: int,
    busy: int = 0,
    progress: Progress = lambda _name, _done, _total: None,
) -> Measurements:
    """Measures the engines in turn, `repeats` times; Ctrl-C ends it and keeps what was measured.

    Every process reads the same random tokens, after a short run to warm up.

    Args:
        engines: the engines; the first must not fail.
        cases: what is measured of each engine.
        repeats: number of rounds.
        threads: threads that each engine may use.
        vocabulary_size: tokens are drawn from 0..vocabulary_size - 1.
        busy: processes that keep a core busy each meanwhile.
        progress: called when an engine starts, and after each case.

    Raises:
        FlowNPUError: the first engine failed; the message is that of the engine.
    """
    found = Measurements(cases, {engine.name: Measurement() for engine in engines})
    request = {
        "cases": [{"depth": c.depth, "prompt": c.prompt, "generate": c.generate} for c in cases],
        "threads": threads,
        "vocabulary_size": vocabulary_size,
    }
    done, total = 0, repeats * len(engines) * len(cases)
    readers = max(1, threads - busy)
    try:
        with busy_cores(busy):
            for _ in range(repeats):
                progress("memory", done, total)
                before = read_bandwidth(readers)
                for engine in engines:
                    if engine.name in found.failures:
                        done += len(cases)
                        continue
                    progress(engine.name, done, total)
                    try:
                        for _ in _run(engine, request, found.engines[engine.name], cases):
                            done += 1
                            progress(engine.name, done, total)
                    except FlowNPUError as error:
                        if engine is engines[0]:
                            raise
                        found.failures[engine.name] = str(error)
                    if engine is engines[0]:
                        found.bandwidth.append((before + read_bandwidth(readers)) / 2)
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def _run(engine: Engine, request: dict[str, Any], measurement: Measurement, cases: list[Case]) -> Iterator[Case]:
    """Runs an engine's process once; yields each case when it is measured."""
    pending = iter(cases)
    for answer in _answers(engine, {**request, "model": str(engine.model.resolve()), "options": engine.options}):
        if "error" in answer:
            raise FlowNPUError(answer["error"])
        if "load_seconds" in answer:
            measurement.version = answer["version"]
            measurement.load.append(answer["load_seconds"])
            measurement.memory_before.append(answer["memory"]["resident"])
        elif "prefill_seconds" in answer:
            case = next(pending)
            measurement.add(case, answer)
            yield case
        else:
            measurement.placement = answer["placement"]
            measurement.memory_resident.append(answer["memory"]["resident"])
            measurement.memory_anonymous.append(answer["memory"]["anonymous"])
            measurement.memory_peak.append(answer["memory"]["peak"])


def _answers(engine: Engine, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="flownpu-") as scratch:
        path = Path(scratch) / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        # -P excludes the worker's folder from sys.path, because its files have the names of packages.
        command: list[str | Path] = [engine.python, "-P", WORKER, engine.script, path]
        with (Path(scratch) / "stderr").open("w+", encoding="utf-8", errors="replace") as errors:
            # A separate process group keeps SIGINT of Ctrl-C from the engine; this process handles it.
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, **NEW_GROUP)
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    yield json.loads(line)
                if process.wait():
                    errors.seek(0)
                    last = (errors.read().strip() or "it said nothing").splitlines()[-1]
                    ended = f"exit code {process.returncode}" if process.returncode > 0 else _signal(process.returncode)
                    yield {"error": f"{engine.name} ended with {ended}: {last}"}
            finally:
                process.kill()
                process.wait()
                process.stdout.close()


def _signal(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if -code in list(map(int, signal.Signals)) else os.strerror(-code)

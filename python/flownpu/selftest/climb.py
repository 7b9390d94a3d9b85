# SPDX-License-Identifier: Apache-2.0
"""Climbs the ladder: builds each group of rungs, runs each rung in a process of its own, and compares its results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zlib
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from flownpu import __version__
from flownpu.aie.artifacts.compiled import write_compiled
from flownpu.aie.artifacts.emulated import write_emulated
from flownpu.aie.artifacts.folder import ArtifactFolder
from flownpu.selftest.outcome import Outcome
from flownpu.selftest.worker import FOUND, Request, Run, write_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from flownpu.aie.artifacts.toolchain import Toolchain
    from flownpu.selftest.reference.case import Deviation
    from flownpu.selftest.rung import Rung, Trial

__all__ = ["Climber", "Outcome", "Result"]

_LOG = "log.txt"
_SHOWN = 2000  # characters of a failed process's output, from its end, in a result's text
_ENDED = 5  # seconds that a killed process may take to end


@dataclass(frozen=True)
class Result:
    """The result of a rung.

    Attributes:
        rung: the rung's name.
        outcome: how it ended.
        text: what went wrong; "": nothing.
        share: the largest error as a multiple of its tolerance; None: nothing was compared.
        error: the largest error.
        work: see `Rung`.
        run: the run's times; None: it did not end.
        folder: the folder to send with a report if it went wrong.
    """

    rung: str
    outcome: Outcome
    text: str = ""
    share: float | None = None
    error: float | None = None
    work: float = 0
    run: Run | None = None
    folder: str = ""

    @property
    def passed(self) -> bool:
        """Whether its numbers are right."""
        return self.outcome is Outcome.PASSED

    @property
    def seconds(self) -> float | None:
        """Time of a run: the median without the first run, which may load what later runs find loaded."""
        return None if self.run is None else median(self.run.seconds[1:] or self.run.seconds)

    @property
    def read_seconds(self) -> float | None:
        """Median time of reading back a run's result; None if it was not read."""
        return median(self.run.read_seconds) if self.run is not None and self.run.read_seconds else None


@dataclass(frozen=True)
class Climber:
    """Runs the rungs of a ladder.

    Attributes:
        target: npu1 or npu2.
        output: folder for artifacts and results.
        toolchain: compiles for an NPU; None: the emulator runs the programs.
        seconds: time limit of all runs of a rung; None: the rung's own.
        runs: runs of each rung.
        seed: seed of the random inputs.
    """

    target: str
    output: Path
    toolchain: Toolchain | None = None
    seconds: float | None = None
    runs: int = 1
    seed: int = 0

    def climb(
        self, rungs: Sequence[Rung], report: Callable[[str, str], None] = lambda _what, _rung: None
    ) -> Iterator[Result]:
        """Yields the result of each rung; `report` is called with "build" or "run" and the rung's name."""
        for group, members in groupby(rungs, lambda rung: rung.group):
            yield from self._group(group, list(members), report)

    def _group(self, group: str, rungs: list[Rung], report: Callable[[str, str], None]) -> Iterator[Result]:
        folder = self.output / "artifacts" / _file_name(group)
        try:
            trials = []
            for rung in rungs:
                report("build", rung.name)
                # Seeded with its name, so that a rung's inputs do not depend on which other rungs are chosen.
                trials.append(rung.make(np.random.default_rng([self.seed, zlib.crc32(rung.name.encode())])))
            self._build(folder, trials)
        except Exception as error:  # noqa: BLE001 (whatever is wrong with one group, the others are to be climbed)
            text = f"{type(error).__name__}: {error}"
            yield from (Result(rung.name, Outcome.NOT_BUILT, text, folder=str(folder)) for rung in rungs)
            return
        for rung, trial in zip(rungs, trials, strict=True):
            report("run", rung.name)
            yield self._run(rung, trial, folder)

    def _build(self, folder: Path, trials: list[Trial]) -> None:
        programs = [trial.program for trial in trials]
        versions = {"flownpu": __version__}
        if self.toolchain is None:
            write_emulated(folder, self.target, programs, about={"versions": versions})
        else:
            write_compiled(ArtifactFolder(folder, self.target, self.toolchain, versions=versions), programs)

    def _run(self, rung: Rung, trial: Trial, artifacts: Path) -> Result:
        """Runs a trial in a process of its own, and compares its results."""
        folder = self.output / "rungs" / _file_name(rung.name)
        shutil.rmtree(folder, ignore_errors=True)
        request = Request(
            str(artifacts), self.toolchain is None, trial.program.kind, trial.position, list(trial.wanted),
            trial.program.made is not None, self.runs,
        )  # fmt: skip
        write_request(folder, request, dict(trial.given), trial.rows)
        result = Result(rung.name, Outcome.PASSED, work=rung.work, folder=str(folder))
        seconds = rung.seconds if self.seconds is None else self.seconds
        with (folder / _LOG).open("wb") as log:
            process = subprocess.Popen(worker_command(folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                return replace(result, outcome=Outcome.TIMED_OUT, text=_end(process, seconds))
            except BaseException:  # Ctrl-C must not leave a process that holds the device
                process.kill()
                raise
        if code != 0:
            said = (folder / _LOG).read_text(encoding="utf-8", errors="replace").strip()[-_SHOWN:]
            how = f"its process ended with signal {-code}" if code < 0 else f"its process ended with exit code {code}"
            return replace(result, outcome=Outcome.FAILED, text=said if code == 1 and said else f"{how}: {said}")
        return _compared(result, trial, folder)


def worker_command(folder: Path) -> list[str]:
    """The command that runs a rung's process."""
    return [sys.executable, "-m", "flownpu.selftest.worker", str(folder)]


def _end(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Kills a process that took too long; returns what to say, also if the process does not end, held by the driver."""
    process.kill()
    text = f"expected it to end within {seconds:g} s, and it did not"
    try:
        process.wait(_ENDED)
    except subprocess.TimeoutExpired:
        return f"{text}; its process {process.pid} could not be ended: the driver holds it, see `sudo dmesg`"
    return text


def _compared(result: Result, trial: Trial, folder: Path) -> Result:
    """Compares the buffers that a run left with the expected ones."""
    run = Run(**json.loads((folder / f"{FOUND}.json").read_text(encoding="utf-8")))
    with np.load(folder / f"{FOUND}.npz") as file:
        found = {name: file[name] for name in file.files}
    deviations = {check.what: check.compare(found) for check in trial.checks}
    wrong = [f"{what}: {deviation.text}" for what, deviation in deviations.items() if deviation.beyond]
    worst: Deviation = max(deviations.values(), key=lambda deviation: deviation.share)
    return replace(
        result, outcome=Outcome.WRONG if wrong else Outcome.PASSED, text="; ".join(wrong), share=worst.share,
        error=max(deviation.error for deviation in deviations.values()), run=run,
    )  # fmt: skip


def _file_name(name: str) -> str:
    return re.sub(r"\W+", "-", name)

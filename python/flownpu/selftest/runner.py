# SPDX-License-Identifier: Apache-2.0
"""Builds each group of stages, runs each stage in a process of its own, and compares its results."""

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
from flownpu.selftest.outcome import Outcome, Result
from flownpu.selftest.worker import OUTPUTS, Request, Run, write_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from flownpu.aie.artifacts.toolchain import Toolchain
    from flownpu.selftest.stage import Stage, Trial

_LOG = "log.txt"
_SHOWN = 2000  # characters of a failed process's output, from its end, in a result's text
_ENDED = 5  # seconds that a killed process may take to end


@dataclass(frozen=True)
class StageResult(Result):
    """The result of a stage.

    Attributes:
        work: see `Stage`.
        run: the run's times; None: it did not end.
        folder: the folder to send with a report if it went wrong.
    """

    work: float = 0
    run: Run | None = None
    folder: str = ""

    @property
    def seconds(self) -> float | None:
        """Time of a run: the median without the first run, which may load files for later runs."""
        return None if self.run is None else median(self.run.seconds[1:] or self.run.seconds)

    @property
    def read_seconds(self) -> float | None:
        """Median time of reading back a run's result; None if it was not read."""
        return median(self.run.read_seconds) if self.run is not None and self.run.read_seconds else None


@dataclass(frozen=True)
class StageRunner:
    """Runs stages.

    Attributes:
        target: npu1 or npu2.
        output: folder for artifacts and results.
        toolchain: compiles for an NPU; None: the emulator runs the programs.
        seconds: time limit of all runs of a stage; None: the stage's own.
        runs: runs of each stage.
        seed: seed of the random inputs.
    """

    target: str
    output: Path
    toolchain: Toolchain | None = None
    seconds: float | None = None
    runs: int = 1
    seed: int = 0

    def run(
        self, stages: Sequence[Stage], report: Callable[[str, str], None] = lambda _action, _stage: None
    ) -> Iterator[StageResult]:
        """Yields the result of each stage; `report` is called with "build" or "run" and the stage's name."""
        for group, members in groupby(stages, lambda stage: stage.group):
            yield from self._group(group, list(members), report)

    def _group(self, group: str, stages: list[Stage], report: Callable[[str, str], None]) -> Iterator[StageResult]:
        folder = self.output / "artifacts" / _file_name(group)
        try:
            trials = []
            for stage in stages:
                report("build", stage.name)
                # The seed includes the stage's name, so that its inputs do not depend on the selection of stages.
                trials.append(stage.make(np.random.default_rng([self.seed, zlib.crc32(stage.name.encode())])))
            self._build(folder, trials)
        except Exception as error:  # noqa: BLE001 whatever is wrong with one group, the others are run
            text = f"{type(error).__name__}: {error}"
            yield from (StageResult(stage.name, Outcome.NOT_BUILT, text, folder=str(folder)) for stage in stages)
            return
        for stage, trial in zip(stages, trials, strict=True):
            report("run", stage.name)
            yield self._run(stage, trial, folder)

    def _build(self, folder: Path, trials: list[Trial]) -> None:
        programs = [trial.program for trial in trials]
        versions = {"flownpu": __version__}
        if self.toolchain is None:
            write_emulated(folder, self.target, programs, about={"versions": versions})
        else:
            write_compiled(ArtifactFolder(folder, self.target, self.toolchain, versions=versions), programs)

    def _run(self, stage: Stage, trial: Trial, artifacts: Path) -> StageResult:
        """Runs a trial in a process of its own, and compares its results."""
        folder = self.output / "stages" / _file_name(stage.name)
        shutil.rmtree(folder, ignore_errors=True)
        request = Request(
            str(artifacts), self.toolchain is None, trial.program.kind, trial.position, list(trial.outputs),
            trial.program.made is not None, self.runs,
        )  # fmt: skip
        write_request(folder, request, dict(trial.inputs), trial.rows)
        result = StageResult(stage.name, Outcome.PASSED, work=stage.work, folder=str(folder))
        seconds = stage.seconds if self.seconds is None else self.seconds
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
            text = (folder / _LOG).read_text(encoding="utf-8", errors="replace").strip()[-_SHOWN:]
            how = f"its process ended with signal {-code}" if code < 0 else f"its process ended with exit code {code}"
            return replace(result, outcome=Outcome.FAILED, text=text if code == 1 and text else f"{how}: {text}")
        return _compared(result, trial, folder)


def worker_command(folder: Path) -> list[str]:
    """The command that runs a stage's process."""
    return [sys.executable, "-m", "flownpu.selftest.worker", str(folder)]


def _end(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Kills a process that took too long; returns the message, also if the driver keeps the process from ending."""
    process.kill()
    text = f"expected it to end within {seconds:g} s, and it did not"
    try:
        process.wait(_ENDED)
    except subprocess.TimeoutExpired:
        return f"{text}; its process {process.pid} could not be ended: the driver holds it, see `sudo dmesg`"
    return text


def _compared(result: StageResult, trial: Trial, folder: Path) -> StageResult:
    """Compares the buffers that a run left with the expected ones."""
    run = Run(**json.loads((folder / f"{OUTPUTS}.json").read_text(encoding="utf-8")))
    with np.load(folder / f"{OUTPUTS}.npz") as file:
        found = {name: file[name] for name in file.files}
    return replace(result, run=run).compared({check.name: check.compare(found) for check in trial.checks})


def _file_name(name: str) -> str:
    return re.sub(r"\W+", "-", name)

# SPDX-License-Identifier: Apache-2.0
"""Runs one program in a process of its own, so that a hang or crash on a device does not end the self-test.

    python -m flownpu.selftest.worker FOLDER

FOLDER has `request.json` and `inputs.npz`; `outputs.npz` and `outputs.json` are written there. On an error the message
is written to stderr, and the exit code is 1.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flownpu._native import ProgramRunner

REQUEST, INPUTS, OUTPUTS = "request.json", "inputs.npz", "outputs"
RESULT = "result"  # key in outputs.npz of the result that the host reads, f32; the other keys are names of buffers
ROWS = "rows"  # key in inputs.npz of the rows that the host writes, f32; no program has a buffer of this name


@dataclass(frozen=True)
class Request:
    """A program to run.

    Attributes:
        artifacts: folder of the program's artifacts.
        emulated: whether the emulator runs it, not the NPU.
        kind: the program's kind.
        position: position of the first token.
        outputs: buffers to read after the first run.
        has_result: whether the program has a result that the host reads.
        runs: number of runs; the first one's results are kept.
    """

    artifacts: str
    emulated: bool
    kind: str
    position: int
    outputs: list[str]
    has_result: bool
    runs: int


@dataclass(frozen=True)
class Run:
    """The times of a request's runs.

    Attributes:
        runtime: description of the NPU's driver or of the emulator.
        seconds: seconds of each run.
        read_seconds: seconds to read each run's result and find its largest value; empty if there is no result.
        values: number of values in the result.
    """

    runtime: str
    seconds: list[float]
    read_seconds: list[float]
    values: int


def write_request(folder: Path, request: Request, inputs: dict[str, np.ndarray], rows: np.ndarray | None) -> None:
    """Writes the request and its buffers into the worker's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REQUEST).write_text(json.dumps(asdict(request)), encoding="utf-8")
    content = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in inputs.items()}
    np.savez(folder / INPUTS, **content, **({} if rows is None else {ROWS: rows}))  # type: ignore[arg-type]


def main(folder: Path) -> None:
    """Runs a request's program, and writes its results into the folder."""
    request = Request(**json.loads((folder / REQUEST).read_text(encoding="utf-8")))
    with np.load(folder / INPUTS) as file:
        inputs = {name: file[name] for name in file.files}
    rows = inputs.pop(ROWS, None)
    runner = ProgramRunner(request.artifacts, request.emulated, request.kind, inputs)
    seconds, read_seconds, values = list[float](), list[float](), 0
    for turn in range(request.runs):
        if rows is not None:
            runner.write(rows)
        seconds.append(runner.run(request.position))
        found: dict[str, Any] = {name: runner.buffer(name) for name in request.outputs} if turn == 0 else {}
        if request.has_result:
            begin = time.perf_counter()
            result = runner.read()
            result.argmax()
            read_seconds.append(time.perf_counter() - begin)
            values = result.size
            found[RESULT] = result
        if turn == 0:
            np.savez(folder / OUTPUTS, **found)
    run = Run(runner.description, seconds, read_seconds, values)
    (folder / f"{OUTPUTS}.json").write_text(json.dumps(asdict(run)), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(str(error))

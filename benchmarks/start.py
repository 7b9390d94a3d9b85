# SPDX-License-Identifier: Apache-2.0
"""Times the start: loading a model, and the first token of a short prompt; and two sessions at the same time.

    python -m benchmarks.start gemma3-1b --prompt 32

runs at the root of the repository, on a folder that `flownpu convert` or `flownpu make-model` wrote. Every repetition
is a process of its own. `--cold` asks the system to drop the files from its page cache first, so that loading and the
first token read the disk. Two sessions generate one after the other, then at the same time, which should take no
longer.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from flownpu.generate.language_model import LanguageModel, Sampling, Timing

_NEW_TOKENS = 32


def _reply(model: LanguageModel, prompt: int) -> Timing:
    """Reads a prompt of random tokens and generates; making GenAI's generator counts in the time to the first token."""
    tokens = np.random.default_rng(0).integers(3, model.vocabulary_size, prompt, dtype=np.int32)
    timing = Timing()
    started = time.perf_counter()
    generator = model.generator(prompt + _NEW_TOKENS, Sampling(temperature=0), min_length=prompt + _NEW_TOKENS)
    made = time.perf_counter() - started
    for _ in model.stream(generator, tokens, timing):
        pass
    timing.first_token += made
    return timing


def _measure(folder: Path, prompt: int) -> dict[str, float]:
    """Seconds in one process: loading, the first token of two prompts, and the replies of two sessions."""
    model = LanguageModel(folder)
    first, second = _reply(model, prompt), _reply(model, prompt)
    models = [model, LanguageModel(folder)]
    _reply(models[1], prompt)
    started = time.perf_counter()
    for one in models:
        _reply(one, prompt)
    in_turn = time.perf_counter() - started
    workers = [threading.Thread(target=_reply, args=(one, prompt)) for one in models]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {
        "load": model.load_seconds,
        "first token": first.first_token,
        "first token of the next prompt": second.first_token,
        "two sessions in turn": in_turn,
        "two sessions at once": time.perf_counter() - started,
    }


def _forget(folder: Path) -> None:
    """Asks the system to drop the folder's files from its page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def main(
    folder: Path,
    prompt: Annotated[int, typer.Option(help="tokens of the prompt", min=1)] = 32,
    repeats: Annotated[int, typer.Option(help="processes", min=1)] = 5,
    cold: Annotated[bool, typer.Option(help="forget the file before each process")] = False,
    measure: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Prints medians in milliseconds, with minima and maxima."""
    if measure:
        print(json.dumps(_measure(folder, prompt)))
        return
    runs: list[dict[str, Any]] = []
    for _ in range(repeats):
        if cold:
            _forget(folder)
        command = [sys.executable, "-m", "benchmarks.start", str(folder), "--prompt", str(prompt), "--measure"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    for name in runs[0]:
        milliseconds = [1e3 * run[name] for run in runs]
        print(f"{name:32} {median(milliseconds):7.0f} ms  ({min(milliseconds):.0f}-{max(milliseconds):.0f})")


if __name__ == "__main__":
    typer.run(main)

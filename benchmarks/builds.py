# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of another build of FlowNPU with this one's; they run in turn, each in an environment of its own.

    flownpu make-model gemma3-1b --random --symmetric --layers 4 gemma3-1b-4
    python -m benchmarks.builds gemma3-1b-4 build/release/tests-python3.13/bin/python --repeats 10
    python -m benchmarks.builds gemma3-1b-4 build/release/windows/python3.11/python.exe

runs at the root of the repository. A Python for Windows is run by Wine (`make windows` lays it out). Ratios compare the
runs of one round, so that disturbances of the machine affect both; and the fastest runs, since disturbances only make
runs slower.
"""

from itertools import chain
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from flownpu.bench.measurement import Case, Engine, Measurement, measure
from flownpu.machine import usable_cores
from flownpu.model.folder import read_genai_config
from flownpu.peers import own_engine
from scripts.release.windows.wine import Wine


def _interpreter(python: Path) -> Path:
    """The program that starts a Python; for one of Windows, a script that runs it by Wine."""
    if python.suffix != ".exe":
        return python
    wine = Wine.find(python.parent.with_name("prefix"))
    if wine is None:
        raise typer.BadParameter("there is no Wine here (Debian, Ubuntu: apt install wine64)")
    return wine.script(python, python.with_name("by-wine.sh"))


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a converted model.")],
    other: Annotated[Path, typer.Argument(help="The Python of the environment of the other build.")],
    prompt: Annotated[int, typer.Option(help="Tokens to read.")] = 256,
    generate: Annotated[int, typer.Option(help="Tokens to generate after them.")] = 64,
    repeats: Annotated[int, typer.Option(help="Rounds.")] = 5,
    runs: Annotated[int, typer.Option(help="Runs of a process.")] = 3,
) -> None:
    """Measures both, and prints each one's medians and the medians of the ratios of rounds, with least and most."""
    here = own_engine(model, provider="flownpu", options={})
    there = Engine("other", _interpreter(other.absolute()), here.script, model, here.options)
    case = Case(0, prompt, generate)
    vocabulary = int(read_genai_config(model)["model"]["vocab_size"])
    mine: list[Measurement] = []
    others: list[Measurement] = []
    for number in range(repeats):
        # The order alternates, so that neither always runs after the other.
        order = [here, there] if number % 2 == 0 else [there, here]
        found = measure(order, [case] * runs, repeats=1, threads=usable_cores(), vocabulary_size=vocabulary)
        if found.failures:
            raise SystemExit(f"error: {found.failures['other']}")
        mine.append(found.engines[here.name])
        others.append(found.engines[there.name])
    for what, tokens, ours, theirs in (
        ("prompt", prompt, [one.prefill[case] for one in mine], [one.prefill[case] for one in others]),
        ("decode", generate - 1, [one.decode[case] for one in mine], [one.decode[case] for one in others]),
    ):
        ratios = [median(a) / median(b) for a, b in zip(ours, theirs, strict=True)]
        fastest = [tokens / min(chain.from_iterable(each)) for each in (ours, theirs)]
        middle = [tokens / median(chain.from_iterable(each)) for each in (ours, theirs)]
        print(
            f"{what}: {middle[0]:.2f} tokens/s here, {middle[1]:.2f} there; "
            f"there / here {median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f}); "
            f"fastest {fastest[0]:.2f} and {fastest[1]:.2f}: {fastest[1] / fastest[0]:.4f}"
        )


if __name__ == "__main__":
    typer.run(main)

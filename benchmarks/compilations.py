# SPDX-License-Identifier: Apache-2.0
"""What `flownpu build MODEL --for xclbin` asks the compilers for, counted with stand-ins for them.

    python -m benchmarks.compilations gemma3-1b --context 8192

runs at the root of the repository, on a folder that `flownpu convert` or `flownpu make-model` wrote. The stand-ins are
the tests' (tests/cli/stand_ins.py): they write instructions of a compiler's form. `--every-class` adds an operation
that FlowNPU does not know to them, so that all classes of positions are compiled, as before instructions were put
together of pieces. Minutes are those of `flownpu build`, at what a real aie-opt took.
"""

import os
import resource
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from flownpu.aie.artifacts.compiled import BuildCost
from flownpu.npu.artifacts import build_artifacts
from tests.cli.stand_ins import Tools


class _Environment:
    """What pytest's monkeypatch does of it."""

    def setenv(self, name: str, value: str) -> None:
        os.environ[name] = value


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a model.")],
    context: Annotated[int, typer.Option(min=1)] = 8192,
    every_class: Annotated[bool, typer.Option("--every-class", help="Without pieces of instructions.")] = False,
) -> None:
    """Builds into a folder that is thrown away, and prints what was said before it began, and what was asked for."""
    with tempfile.TemporaryDirectory(prefix="flownpu-") as folder:
        tools = Tools(Path(folder), _Environment())
        if every_class:
            tools.unknown.touch()
        built = build_artifacts(model, kind="xclbin", context=context, output=Path(folder) / "out", say=print)
        options = [option.partition("=")[0] for command in tools.commands() for option in command]
        own = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    cost = BuildCost(options.count("--pdi-name"), options.count("--npu-insts-name"))
    print(f"{built.calls} calls over {built.context} positions, {own:.0f} s of CPU time beside the compilers")
    print(f"asked for: {cost}")


if __name__ == "__main__":
    typer.run(main)

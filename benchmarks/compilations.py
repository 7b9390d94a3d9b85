# SPDX-License-Identifier: Apache-2.0
"""Counts the compilations that `flownpu build MODEL --for xclbin` needs, with stand-ins for the compilers.

    python -m benchmarks.compilations gemma3-1b --context 8192

runs at the root of the repository, on a folder that `flownpu convert` or `flownpu make-model` wrote. The stand-ins are
the tests' (tests/cli/npu/stand_ins.py): they write instructions in a compiler's format. With `--every-class` these have
an operation that FlowNPU does not know, so that instructions cannot be assembled from pieces, and every class of
positions is compiled. Minutes are estimates of `flownpu build`, from times of a real aie-opt.
"""

import os
import resource
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from flownpu.aie.artifacts.compiled import BuildCost
from flownpu.npu.artifacts import build_artifacts
from tests.cli.npu.stand_ins import Tools


class _Environment:
    """The part of pytest's monkeypatch that `Tools` uses."""

    def setenv(self, name: str, value: str) -> None:
        os.environ[name] = value


def main(
    model: Annotated[Path, typer.Argument(help="Folder of a model.")],
    context: Annotated[int, typer.Option(min=1)] = 8192,
    every_class: Annotated[bool, typer.Option("--every-class", help="Without pieces of instructions.")] = False,
) -> None:
    """Builds into a temporary folder; prints the estimate before it begins, and what the compilers were asked for."""
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

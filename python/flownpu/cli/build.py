# SPDX-License-Identifier: Apache-2.0
"""`flownpu build`: compiles the NPU's programs of a model with AMD's toolchain, or writes MLIR without it."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from flownpu.cli.options import AsJson, model_folder
from flownpu.cli.output import print_json, status
from flownpu.cli.progress import progress_bar

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


# Generations of the NPU; the device that runs a model's artifacts; the type of the weights in a prompt's products.
Target = Literal["npu1", "npu2"]
Kind = Literal["emulate", "xclbin"]
Weights = Literal["bf16", "bfp16"]


def build(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Folder that `flownpu convert` wrote, an .onnx file, or a name such as gemma3:1b.",
            callback=model_folder,
        ),
    ],
    kind: Annotated[Kind, typer.Option("--for", help="Artifacts for the emulator, or for an NPU.")] = "xclbin",
    context: Annotated[
        int | None,
        typer.Option("--context", min=1, help="Longest context on the NPU. (default: the model's, 4096 at most)"),
    ] = None,
    weights: Annotated[
        Weights | None,
        typer.Option(
            "--weights", help="Type of the weights in prompts. (default: bfp16 on npu2, bf16 on npu1)"
        ),
    ] = None,
    target: Annotated[Target, typer.Option("--target", help="XDNA is npu1, XDNA2 is npu2.")] = "npu2",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR",
            help="Folder to make. (default: MODEL/artifacts/emulate or MODEL/artifacts/TARGET)",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Build the NPU's programs of a converted model.

    For an NPU it needs AMD's open toolchain: aiecc, Peano, xclbinutil. Without it the checked plans and their MLIR are
    written, and the missing tools are named. For the emulator it needs nothing. Unchanged files are not built again.
    """
    from flownpu.npu.artifacts import build_artifacts  # noqa: PLC0415 other commands need not read the designs

    with progress_bar(*_COLUMNS) as bar:
        task = bar.add_task("calls", total=None)
        built = build_artifacts(
            model,
            kind=kind,
            target=target,
            context=context,
            weights=weights,
            output=output,
            report=lambda call, done, total: bar.update(task, description=call, completed=done, total=total),
            say=status,
        )
    if as_json:
        print_json({"for": kind, "target": target, **asdict(built), "folder": str(built.folder)})
        return
    what = f"{built.folder}: {built.calls} calls" + (f" over {built.context} positions" if built.context else "")
    for reason in built.left_out:
        status(f"left out: {reason}")
    # The default, on_unsupported=error, allows no nodes on the host.
    command = f"flownpu run {model} --device {'emulate' if kind == 'emulate' else 'npu'}"
    command += " --option on_unsupported=cpu" if any(left.on_host for left in built.left_out) else ""
    if kind == "emulate":
        status(f"{what}, {built.made} made, the others are up to date. Next: {command}")
    elif not built.missing:
        status(f"{what}, {built.made} files compiled, the others are up to date. Next: {command}")
    else:
        say_missing(f"{what}, as MLIR", built.missing)


def say_missing(what: str, missing: Iterable[object]) -> None:
    """Reports the written files, and the tools that the rest needs."""
    status(f"{what}. Nothing was compiled:")
    for tool in missing:
        status(f"  {tool}")

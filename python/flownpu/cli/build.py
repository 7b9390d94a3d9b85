# SPDX-License-Identifier: Apache-2.0
"""`flownpu build`: compiles the NPU's programs with AMD's toolchain, or writes plans and MLIR without it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from flownpu import __version__
from flownpu.aie.artifacts.folder import ArtifactFolder, write_text
from flownpu.aie.artifacts.toolchain import find_toolchain
from flownpu.aie.check import require_valid
from flownpu.aie.mlir.module import to_mlir
from flownpu.aie.plan.as_json import to_json
from flownpu.aie.plan.data import Plan
from flownpu.cli.options import AsJson, model_folder
from flownpu.cli.output import print_json, progress_bar, status

if TYPE_CHECKING:
    from flownpu.aie.programs.call import ArtifactCall

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


# Generations of the NPU; the device that runs a model's artifacts; the type of the weights in a prompt's products.
Target = Literal["npu1", "npu2"]
Kind = Literal["emulate", "xclbin"]
Weights = Literal["bf16", "bfp16"]


class Emit(StrEnum):
    """The form in which a design is written; an enumeration, since typer takes no Literal in a tuple."""

    MLIR = "mlir"
    PLAN = "plan"


Operators = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL|OPS",
        help="Folder that `flownpu convert` wrote, or an .onnx file, or with --for a name; or operators, such as gemm "
        "and flow_kv. (default: all operators)",
    ),
]
KindOption = Annotated[
    Kind | None,
    typer.Option("--for", help="MODEL's artifacts for the emulator, or for an NPU. (default: xclbin)"),
]
ContextOption = Annotated[
    int | None,
    typer.Option("--context", min=1, help="MODEL's longest context on the NPU. (default: the model's, 4096 at most)"),
]
WeightsOption = Annotated[
    Weights | None,
    typer.Option(
        "--weights",
        help="Type of MODEL's weights in prompts. (default: bfp16 on npu2, bf16 on npu1)",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="For a MODEL, the folder to make (default: MODEL/artifacts/emulate or /TARGET); for operators, where to "
        "build: the files go to DIR/TARGET (default: artifacts).",
    ),
]


def build(
    operators: Operators = None,
    kind: KindOption = None,
    context: ContextOption = None,
    weights: WeightsOption = None,
    target: Annotated[Target, typer.Option("--target", help="XDNA is npu1, XDNA2 is npu2.")] = "npu2",
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Only this model's shapes of operators, such as gemma3-1b; may be repeated. (default: all)",
        ),
    ] = None,
    output: OutputOption = None,
    emit: Annotated[
        tuple[Emit, Path] | None,
        typer.Option(
            "--emit",
            metavar="mlir|plan DIR",
            help="Write each design as MLIR or as a plan to DIR, and build nothing.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build the NPU's programs: those of a converted model, or those of operators in all models' shapes.

    For an NPU it needs AMD's open toolchain: aiecc, Peano, xclbinutil. Without it the checked plans and their MLIR are
    written, and the missing tools are named. For the emulator it needs nothing. Unchanged files are not built again.
    """
    names = operators or []
    if kind is not None or any(Path(name).is_dir() or Path(name).suffix == ".onnx" for name in names):
        if len(names) != 1 or model or emit is not None:
            raise typer.BadParameter("expected one MODEL folder, without --model and --emit")
        _build_model(model_folder(Path(names[0])), kind or "xclbin", target, context, weights, output, as_json)
        return
    if context is not None or weights is not None or as_json:
        raise typer.BadParameter("--context, --weights and --json go with a MODEL folder")
    from flownpu.npu.catalogue import catalogue  # noqa: PLC0415 other commands need not read the designs

    try:
        calls = catalogue(target, names, model or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if emit is not None:
        _emit(calls, target, *emit)
    else:
        _build(calls, target, (output or Path("artifacts")) / target)


def _build_model(
    model: Path,
    kind: Kind,
    target: Target,
    context: int | None,
    weights: Weights | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Builds the artifacts of a converted model."""
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
        say_missing(f"{what}, as plans and MLIR", built.missing)


def say_missing(what: str, missing: Iterable[object]) -> None:
    """Reports the written files, and the tools that the rest needs."""
    status(f"{what}. Nothing was compiled:")
    for tool in missing:
        status(f"  {tool}")


def _emit(calls: list["ArtifactCall"], target: Target, kind: Emit, folder: Path) -> None:
    """Writes one file a call."""
    write, suffix = (to_mlir, "mlir") if kind == "mlir" else (to_json, "json")
    count = 0
    for call, plan in _plans(calls, target):
        write_text(folder / call.array / f"{call.name}.{suffix}", write(require_valid(plan)))
        count += 1
    status(f"{folder}: {count} designs")


def _build(calls: list["ArtifactCall"], target: Target, path: Path) -> None:
    """Writes the calls, and compiles them if a toolchain is there."""
    toolchain, missing = find_toolchain()
    folder = ArtifactFolder(path, target, toolchain, versions={"flownpu": __version__}, say=status)
    arrays = Counter[str]()
    planned = _plans(sorted(calls, key=lambda call: call.array), target)
    for array, members in groupby(planned, key=lambda member: member[0].array):
        made = list(members)
        folder.add(made[0][0].operator, array, {call.name: plan for call, plan in made})
        arrays[array] = len(made)
    what = f"{arrays.total()} calls of {len(arrays)} arrays"
    if toolchain is not None:
        status(f"{path}: {what}, {len(folder.compiled)} files compiled, the others are up to date")
        return
    say_missing(f"{path}: plans and MLIR of {what}", missing)


def _plans(calls: list["ArtifactCall"], target: Target) -> Iterator[tuple["ArtifactCall", Plan]]:
    """The plan of each call. On npu1, calls that do not fit are named and left out."""
    with progress_bar(*_COLUMNS) as bar:
        task = bar.add_task("designs", total=len(calls))
        for call in calls:
            bar.update(task, description=f"{call.array} {call.name}")
            try:
                plan = call.program(0).resolve_program(f"{call.array}.{call.name}")
            except ValueError as error:
                # XDNA has half of the columns, and not every design claims it; on XDNA2 all of them must fit.
                if target != "npu1":
                    raise
                status(f"left out: {call.array} {call.name}: {error}")
            else:
                yield call, plan
            bar.advance(task)

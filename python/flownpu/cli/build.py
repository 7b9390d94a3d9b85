# SPDX-License-Identifier: Apache-2.0
"""`flownpu build`: the NPU's programs, compiled where AMD's toolchain is, as plans and MLIR where it is not."""

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from flownpu import __version__
from flownpu.aie.artifacts import ArtifactFolder, write_text
from flownpu.aie.checker import require_valid
from flownpu.aie.mlir import to_mlir
from flownpu.aie.plan import Plan, to_json
from flownpu.aie.toolchain import find_toolchain
from flownpu.cli.output import progress_bar, status

if TYPE_CHECKING:
    from flownpu.npu_catalogue import Call


class Target(StrEnum):
    """Generations of the NPU."""

    NPU1 = "npu1"
    NPU2 = "npu2"


class Emit(StrEnum):
    """What a design is written as."""

    MLIR = "mlir"
    PLAN = "plan"


def build(
    operators: Annotated[
        list[str] | None,
        typer.Argument(metavar="OPS", help="Operators, such as gemm and flow_kv. [default: all]"),
    ] = None,
    target: Annotated[Target, typer.Option("--target", help="XDNA is npu1, XDNA2 is npu2.")] = Target.NPU2,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Only this model's shapes, such as gemma3-1b; may be repeated. [default: all]",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where to build; the files go to DIR/TARGET.")
    ] = Path("artifacts"),
    emit: Annotated[
        tuple[Emit, Path] | None,
        typer.Option(
            "--emit", metavar="mlir|plan DIR", help="Write each design as MLIR, or as a plan, to DIR, and do no more."
        ),
    ] = None,
) -> None:
    """Build the NPU's programs: xclbins, instructions and a manifest.

    Needs AMD's open toolchain, aiecc and Peano. Without it the checked plans and their MLIR are written, and what is
    missing is said. What is up to date, by the contents of all that it is made of, is not built again.
    """
    from flownpu.npu_catalogue import catalogue  # noqa: PLC0415 other commands need not read the designs

    try:
        calls = catalogue(target.value, operators or (), model or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if emit is not None:
        _emit(calls, target, *emit)
    else:
        _build(calls, target, output / target.value)


def _emit(calls: list["Call"], target: Target, kind: Emit, folder: Path) -> None:
    """Writes one file a call."""
    write, suffix = (to_mlir, "mlir") if kind is Emit.MLIR else (to_json, "json")
    count = 0
    for call, plan in _plans(calls, target):
        write_text(folder / call.array / f"{call.name}.{suffix}", write(require_valid(plan)))
        count += 1
    status(f"{folder}: {count} designs")


def _build(calls: list["Call"], target: Target, path: Path) -> None:
    """Writes and, where that can be done, compiles the calls."""
    toolchain, missing = find_toolchain()
    folder = ArtifactFolder(path, target.value, toolchain, versions={"flownpu": __version__})
    arrays = Counter[str]()
    for call, plan in _plans(calls, target):
        folder.add(call.operator, call.array, call.name, plan)
        arrays[call.array] += 1
    what = f"{arrays.total()} calls of {len(arrays)} arrays"
    if toolchain is not None:
        status(f"{path}: {what}, {len(folder.compiled)} files compiled, the others are up to date")
        return
    status(f"{path}: plans and MLIR of {what}. Nothing was compiled:")
    for tool in missing:
        status(f"  {tool}")


def _plans(calls: list["Call"], target: Target) -> Iterator[tuple["Call", Plan]]:
    """The plan of each call; on npu1 those that do not fit are named and left out."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as bar:
        task = bar.add_task("designs", total=len(calls))
        for call in calls:
            bar.update(task, description=f"{call.array} {call.name}")
            try:
                plan = call.program().resolve_program(f"{call.array}.{call.name}")
            except ValueError as error:
                # XDNA has half of the columns, and not every design claims it; on XDNA2 all of them must fit.
                if target is not Target.NPU1:
                    raise
                status(f"left out: {call.array} {call.name}: {error}")
            else:
                yield call, plan
            bar.advance(task)

# SPDX-License-Identifier: Apache-2.0
"""`flownpu selftest`: from a copy through one tile to a prompt, each step compared, timed and bounded."""

import json
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from flownpu.aie.artifacts.folder import write_text
from flownpu.aie.artifacts.toolchain import find_toolchain
from flownpu.cli.build import Target, say_missing
from flownpu.cli.output import console, print_json, progress_bar, status

if TYPE_CHECKING:
    from flownpu.aie.artifacts.toolchain import Toolchain
    from flownpu.selftest.climb import Climber, Result
    from flownpu.selftest.report import SelftestReport
    from flownpu.selftest.rung import Rung

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
_RUNS = 20  # of a rung on an NPU, of which the median counts
_MICROSECONDS = 1e6


class LadderDevice(StrEnum):
    """What runs the ladder."""

    EMULATE = "emulate"
    NPU = "npu"


def selftest(
    device: Annotated[
        LadderDevice, typer.Option("--device", help="The emulator, or this machine's NPU.")
    ] = LadderDevice.EMULATE,
    target: Annotated[Target, typer.Option("--target", help="XDNA is npu1, XDNA2 is npu2.")] = Target.NPU2,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Rungs whose names are like *gemm*; may be repeated."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds", min=0.01, metavar="NUMBER", help="Bound of a rung's runs. (default: 60, of a prompt 120)"
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where to build and run: the files go to DIR/DEVICE.")
    ] = Path("selftest"),
    as_json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the report there, too; - is stdout, instead of the table."),
    ] = None,
) -> None:
    """Try an NPU, or its emulator, step by step: a copy, each kernel, each design, a layer, a token, a prompt.

    Each rung of the ladder is compared with a reference in float64 within a derived bound, and runs in a process of
    its own for a bounded time; after a failure the others go on. On an NPU, which needs AMD's toolchain as `flownpu
    build` does, times give parameters of the cost model. DIR/DEVICE/report.json has it all: it is what to send.
    """
    from flownpu.selftest.climb import Climber  # noqa: PLC0415 other commands need not read the designs
    from flownpu.selftest.report import SelftestReport  # noqa: PLC0415
    from flownpu.selftest.rungs import ladder  # noqa: PLC0415

    on_npu = device is LadderDevice.NPU
    rungs = _chosen(ladder(target.value, many=on_npu), only or [])
    toolchain: Toolchain | None = None
    if on_npu:
        toolchain, missing = find_toolchain()
        if toolchain is None:
            say_missing("The ladder for an NPU has to be compiled", missing)
            raise typer.Exit(1)
    folder = output / device.value
    climber = Climber(target.value, folder.absolute(), toolchain, seconds, _RUNS if on_npu else 1)
    versions = {} if toolchain is None else toolchain.versions
    report = SelftestReport(device.value, target.value, versions, _climb(climber, rungs))
    document = report.document()
    write_text(folder / "report.json", json.dumps(document, indent=1) + "\n")
    if as_json == "-":
        print_json(document)
    else:
        if as_json is not None:
            write_text(Path(as_json), json.dumps(document, indent=1) + "\n")
        _show(report, folder)
    if not report.passed:
        raise typer.Exit(1)


def _chosen(rungs: "list[Rung]", patterns: list[str]) -> "list[Rung]":
    """The rungs that patterns name.

    Raises:
        typer.BadParameter: a pattern names none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(rung.name, pattern) for rung in rungs):
            names = ", ".join(f"'{rung.name}'" for rung in rungs)
            raise typer.BadParameter(f"expected a pattern of one of {names}, got {pattern!r}", param_hint="--only")
    return [rung for rung in rungs if not patterns or any(fnmatchcase(rung.name, pattern) for pattern in patterns)]


def _climb(climber: "Climber", rungs: "list[Rung]") -> "list[Result]":
    """All results; failures are said when they come."""
    results = []
    with progress_bar(*_COLUMNS) as bar:
        task = bar.add_task("rungs", total=len(rungs))
        for result in climber.climb(rungs, lambda what, rung: bar.update(task, description=f"{what} {rung}")):
            results.append(result)
            bar.advance(task)
            if not result.passed:
                status(f"{result.rung}: {result.outcome}: {result.text}")
    return results


def _show(report: "SelftestReport", folder: Path) -> None:
    """The tables, and what to do next."""
    emulated = report.device == "emulate"
    table = Table(title=f"{report.device}, {report.target}", title_justify="left")
    table.add_column("rung")
    table.add_column("result")
    table.add_column("error, of its bound", justify="right")
    table.add_column("us, emulated: no speed" if emulated else "us", justify="right")
    for result in report.results:
        table.add_row(
            result.rung,
            f"[green]{result.outcome}[/]" if result.passed else f"[red]{result.outcome.upper()}[/]",
            "" if result.share is None else "exact" if result.share == 0 else f"{result.share:.2f}",
            "" if result.seconds is None else f"{result.seconds * _MICROSECONDS:.1f}",
        )
    console.print(table)
    passed = sum(result.passed for result in report.results)
    console.print(f"{passed} of {len(report.results)} rungs passed.", markup=False)
    path = folder / "report.json"
    if emulated:
        console.print(f"Report: {path}. Nothing of it was measured: time on the emulator means nothing.", markup=False)
        return
    _show_measurements(report)
    console.print(f"Please send {path}" + ("" if report.passed else f" and {folder / 'rungs'}") + ".", markup=False)
    console.print(f"Next: flownpu predict gemma3-1b --measured {path}", markup=False)


def _show_measurements(report: "SelftestReport") -> None:
    table = Table(title="measured", title_justify="left")
    for heading in ("parameter", "measured", "assumed", "unit", "from"):
        table.add_column(heading)
    for found in report.measurements:
        measured = found.reason if found.value is None else f"{found.value:.4g}"
        assumed = "" if found.assumed is None else f"{found.assumed:.4g}"
        table.add_row(found.name, measured, assumed, found.unit, found.formula)
    console.print(table)

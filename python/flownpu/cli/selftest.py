# SPDX-License-Identifier: Apache-2.0
"""`flownpu selftest`: an NPU, its emulator or a GPU tried piece by piece, each compared, timed and bounded."""

import json
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from flownpu.aie.artifacts.folder import write_text
from flownpu.aie.artifacts.toolchain import find_toolchain
from flownpu.cli.build import Target, say_missing
from flownpu.cli.output import console, print_json, progress_bar, status
from flownpu.errors import FlowNPUError

if TYPE_CHECKING:
    from flownpu import _native
    from flownpu.aie.artifacts.toolchain import Toolchain
    from flownpu.selftest.climb import Climber, Result
    from flownpu.selftest.gpu.trials import Result as KernelResult
    from flownpu.selftest.report import SelftestReport
    from flownpu.selftest.rung import Rung

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
_RUNS = 20  # of a rung on an NPU, of which the median counts
_GPU_RUNS = 5  # of a kernel, of which the median counts
_MICROSECONDS = 1e6
_Justify = Literal["left", "right"]
_GPU_COLUMNS: tuple[tuple[str, _Justify], ...] = (
    ("kernel", "left"),
    ("result", "left"),
    ("error, of its bound", "right"),
    ("us", "right"),
    ("GB/s read", "right"),
    ("GOP/s", "right"),
)


class TriedDevice(StrEnum):
    """What is tried."""

    EMULATE = "emulate"
    NPU = "npu"
    GPU = "gpu"


def selftest(
    device: Annotated[
        TriedDevice, typer.Option("--device", help="The emulator, this machine's NPU, or its GPU.")
    ] = TriedDevice.EMULATE,
    target: Annotated[Target, typer.Option("--target", help="XDNA is npu1, XDNA2 is npu2.")] = Target.NPU2,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="PATTERN", help="Rungs, or kernels, whose names match, such as *gemm*; may be repeated."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds", min=0.01, metavar="NUMBER", help="Time limit of a rung. (default: 60, for a prompt 120)"
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where to build and run: the files go to DIR/DEVICE.")
    ] = Path("selftest"),
    as_json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the report here, too; - is stdout, instead of the table."),
    ] = None,
) -> None:
    """Test an NPU, its emulator or a GPU step by step: a copy, each kernel, each design, a layer, a token, a prompt.

    Each test is compared with a float64 reference within a derived bound, and runs in a process of its own for a
    bounded time. On an NPU, which needs AMD's toolchain as `flownpu build` does, times give parameters of the cost
    model. On a GPU every kernel is tried in every variant. DIR/DEVICE/report.json has all results: send it with a
    report.
    """
    if device is TriedDevice.GPU:
        _try_gpu(only or [], output / device.value, as_json)
        return
    from flownpu.selftest.climb import Climber  # noqa: PLC0415 other commands need not read the designs
    from flownpu.selftest.report import SelftestReport  # noqa: PLC0415
    from flownpu.selftest.rungs import ladder  # noqa: PLC0415

    on_npu = device is TriedDevice.NPU
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
    if _write(report.document(), folder, as_json):
        _show(report, folder)
    if not report.passed:
        raise typer.Exit(1)


def _write(document: dict[str, Any], folder: Path, as_json: str | None) -> bool:
    """Writes the report, and tells whether tables are wanted as well."""
    text = json.dumps(document, indent=1) + "\n"
    write_text(folder / "report.json", text)
    if as_json == "-":
        print_json(document)
        return False
    if as_json is not None:
        write_text(Path(as_json), text)
    return True


def _try_gpu(patterns: list[str], folder: Path, as_json: str | None) -> None:
    """Every kernel on the OpenCL device that `device="gpu"` means."""
    from flownpu.selftest.gpu.trials import Devices, document, run_variant, variants  # noqa: PLC0415 other commands do without

    try:
        devices = Devices()
    except ValueError as error:
        raise FlowNPUError(str(error)) from None
    chosen = _chosen(variants(images=devices.first.facts.texels > 0), patterns)
    results = []
    with progress_bar(*_COLUMNS) as bar:
        task = bar.add_task("kernels", total=len(chosen))
        for variant in chosen:
            bar.update(task, description=variant.name)
            results.append(run_variant(variant, devices, _GPU_RUNS))
            bar.advance(task)
            if not results[-1].passed:
                status(f"{variant.name}: {results[-1].outcome}: {results[-1].text}")
    if _write(document(devices.first, results), folder, as_json):
        _show_gpu(devices.first, results, folder)
    if not all(result.passed for result in results):
        raise typer.Exit(1)


def _show_gpu(device: "_native.GpuDevice", results: "list[KernelResult]", folder: Path) -> None:
    """The table of kernels, and what to do next."""
    software = device.facts.kind == "cpu"
    table = Table(title=device.description, title_justify="left")
    for heading, justify in _GPU_COLUMNS:
        table.add_column(heading, justify=justify)
    for result in results:
        rates = [
            "" if not amount or not result.seconds else f"{amount / result.seconds / 1e9:.2f}"
            for amount in (result.read, result.operations)
        ]
        table.add_row(
            result.variant,
            _outcome_text(result),
            _share_text(result.share),
            "" if result.seconds is None else f"{result.seconds * _MICROSECONDS:.1f}",
            *rates,
        )
    console.print(table)
    console.print(f"{sum(result.passed for result in results)} of {len(results)} kernels passed.", markup=False)
    console.print(f"Decoders store activations as {device.stored_type()}.", markup=False)
    if device.cache_problem:
        console.print(f"Compiled kernels are not kept: {device.cache_problem}", markup=False)
    path = folder / "report.json"
    if software:
        console.print(f"Report: {path}. A CPU computed: its times say nothing of a GPU's.", markup=False)
    else:
        console.print(f"Please send {path}.", markup=False)


class _Named(Protocol):
    """What patterns are compared with."""

    @property
    def name(self) -> str:
        """A rung's, or a kernel's."""


_Tried = TypeVar("_Tried", bound=_Named)


def _chosen(rungs: list[_Tried], patterns: list[str]) -> list[_Tried]:
    """The rungs, or kernels, that patterns name.

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
            _outcome_text(result),
            _share_text(result.share),
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


def _outcome_text(result: "Result | KernelResult") -> str:
    return f"[green]{result.outcome}[/]" if result.passed else f"[red]{result.outcome.upper()}[/]"


def _share_text(share: float | None) -> str:
    return "" if share is None else "exact" if share == 0 else f"{share:.2f}"


def _show_measurements(report: "SelftestReport") -> None:
    table = Table(title="measured", title_justify="left")
    for heading in ("parameter", "measured", "assumed", "unit", "from"):
        table.add_column(heading)
    for found in report.measurements:
        measured = found.reason if found.value is None else f"{found.value:.4g}"
        assumed = "" if found.assumed is None else f"{found.assumed:.4g}"
        table.add_row(found.name, measured, assumed, found.unit, found.formula)
    console.print(table)

# SPDX-License-Identifier: Apache-2.0
"""`flownpu selftest`: tests an NPU, its emulator or a GPU part by part; compares, times and bounds each part."""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from flownpu.aie.artifacts.folder import write_text
from flownpu.aie.artifacts.toolchain import find_toolchain
from flownpu.cli.build import Target, say_missing
from flownpu.cli.output import console, print_json, print_table, status
from flownpu.cli.progress import progress_bar
from flownpu.errors import FlowNPUError

if TYPE_CHECKING:
    from flownpu import _native
    from flownpu.aie.artifacts.toolchain import Toolchain
    from flownpu.selftest.gpu.trials import KernelResult
    from flownpu.selftest.outcome import Result
    from flownpu.selftest.report import SelftestReport
    from flownpu.selftest.runner import StageResult, StageRunner
    from flownpu.selftest.stage import Stage

_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
_RUNS = 20  # of a stage on an NPU, of which the median counts
_GPU_RUNS = 5  # of a kernel, of which the median counts
_MICROSECONDS = 1e6


TriedDevice = Literal["emulate", "npu", "gpu"]
GpuApi = Literal["auto", "opencl", "vulkan"]


def selftest(
    device: Annotated[
        TriedDevice, typer.Option("--device", help="The emulator, this machine's NPU, or its GPU.")
    ] = "emulate",
    target: Annotated[Target, typer.Option("--target", help="XDNA is npu1, XDNA2 is npu2.")] = "npu2",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="PATTERN", help="Stages, or kernels, whose names match, such as *gemm*; may be repeated."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds", min=0.01, metavar="NUMBER", help="Time limit of a stage. (default: 60, for a prompt 120)"
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where to build and run: the files go to DIR/DEVICE.")
    ] = Path("selftest"),
    as_json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the report here, too; - is stdout, instead of the table."),
    ] = None,
    gpu_api: Annotated[
        GpuApi, typer.Option("--gpu-api", help="What computes on a GPU; auto takes a GPU of opencl, else of vulkan.")
    ] = "auto",
) -> None:
    """Test an NPU, its emulator or a GPU step by step: a copy, each kernel, each design, a layer, a token, a prompt.

    Each stage is compared with a float64 reference within a derived bound, and runs in a process of its own for a
    bounded time. On an NPU, which needs AMD's toolchain as `flownpu build` does, times give parameters of the cost
    model. On a GPU every kernel is tried in every variant. DIR/DEVICE/report.json has all results: send it with a
    report.
    """
    if device == "gpu":
        _try_gpu(only or [], output / device, as_json, gpu_api)
        return
    from flownpu.selftest.report import SelftestReport  # noqa: PLC0415
    from flownpu.selftest.runner import StageRunner  # noqa: PLC0415 other commands need not read the designs
    from flownpu.selftest.stages import selftest_stages  # noqa: PLC0415

    on_npu = device == "npu"
    stages = _chosen(selftest_stages(target, many=on_npu), only or [])
    toolchain: Toolchain | None = None
    if on_npu:
        toolchain, missing = find_toolchain()
        if toolchain is None:
            say_missing("The stages for an NPU have to be compiled", missing)
            raise typer.Exit(1)
    folder = output / device
    runner = StageRunner(target, folder.absolute(), toolchain, seconds, _RUNS if on_npu else 1)
    versions = {} if toolchain is None else toolchain.versions
    report = SelftestReport(device, target, versions, _run(runner, stages))
    if _write(report.document(), folder, as_json):
        _show(report, folder)
    if not report.passed:
        raise typer.Exit(1)


def _write(document: dict[str, Any], folder: Path, as_json: str | None) -> bool:
    """Writes the report, and returns whether tables are wanted as well."""
    text = json.dumps(document, indent=1) + "\n"
    write_text(folder / "report.json", text)
    if as_json == "-":
        print_json(document)
        return False
    if as_json is not None:
        write_text(Path(as_json), text)
    return True


def _try_gpu(patterns: list[str], folder: Path, as_json: str | None, gpu_api: str) -> None:
    """Every kernel on the device of `device="gpu"`."""
    from flownpu.selftest.gpu.trials import Devices, document, run_variant, variants  # noqa: PLC0415 as above

    try:
        devices = Devices({"gpu_api": gpu_api})
    except ValueError as error:
        raise FlowNPUError(str(error)) from None
    facts = devices.first.facts
    chosen = _chosen(variants(images=facts.texels > 0, matrices=bool(facts.matrices)), patterns)
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
    """The table of kernels, and the next step."""
    rows: list[tuple[str | Text, ...]] = []
    for result in results:
        amounts = (result.read, result.operations)
        rates = (f"{each / result.seconds / 1e9:.2f}" if each and result.seconds else "" for each in amounts)
        rows.append((*_cells(result, result.seconds), *rates))
    numbers = ("error, of its bound", "us", "GB/s read", "GOP/s")
    print_table(device.description, ("kernel", "result"), numbers, rows)
    console.print(f"{sum(result.passed for result in results)} of {len(results)} kernels passed.")
    console.print(f"Decoders store activations as {device.stored_type()}.")
    if device.cache_problem:
        console.print(f"Compiled kernels are not kept: {device.cache_problem}")
    path = folder / "report.json"
    if device.facts.kind == "cpu":
        console.print(f"Report: {path}. A CPU computed: its times say nothing of a GPU's.")
    else:
        console.print(f"Please send {path}.")


class _Named(Protocol):
    """A thing whose name is compared with patterns."""

    @property
    def name(self) -> str:
        """A stage's, or a kernel's."""


_Tried = TypeVar("_Tried", bound=_Named)


def _chosen(stages: list[_Tried], patterns: list[str]) -> list[_Tried]:
    """The stages, or kernels, that patterns name.

    Raises:
        typer.BadParameter: a pattern names none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(stage.name, pattern) for stage in stages):
            names = ", ".join(f"'{stage.name}'" for stage in stages)
            raise typer.BadParameter(f"expected a pattern of one of {names}, got {pattern!r}", param_hint="--only")
    return [stage for stage in stages if not patterns or any(fnmatchcase(stage.name, pattern) for pattern in patterns)]


def _run(runner: "StageRunner", stages: "list[Stage]") -> "list[StageResult]":
    """All results; failures are printed when they come."""
    results = []
    with progress_bar(*_COLUMNS) as bar:
        task = bar.add_task("stages", total=len(stages))
        for result in runner.run(stages, lambda action, stage: bar.update(task, description=f"{action} {stage}")):
            results.append(result)
            bar.advance(task)
            if not result.passed:
                status(f"{result.name}: {result.outcome}: {result.text}")
    return results


def _show(report: "SelftestReport", folder: Path) -> None:
    """The tables, and the next step."""
    emulated = report.device == "emulate"
    print_table(
        f"{report.device}, {report.target}",
        ("stage", "result"),
        ("error, of its bound", "us, emulated: no speed" if emulated else "us"),
        (_cells(result, result.seconds) for result in report.results),
    )
    passed = sum(result.passed for result in report.results)
    console.print(f"{passed} of {len(report.results)} stages passed.")
    path = folder / "report.json"
    if emulated:
        console.print(f"Report: {path}. Nothing of it was measured: time on the emulator means nothing.")
        return
    _show_measurements(report)
    console.print(f"Please send {path}" + ("" if report.passed else f" and {folder / 'stages'}") + ".")
    console.print(f"Next: flownpu predict gemma3-1b --measured {path}")


def _cells(result: "Result", seconds: float | None) -> tuple[str, Text, str, str]:
    """A table's cells for a result: name, outcome, error, microseconds."""
    outcome = Text(result.outcome, "green") if result.passed else Text(result.outcome.upper(), "red")
    error = "" if result.share is None else "exact" if result.share == 0 else f"{result.share:.2f}"
    return result.name, outcome, error, "" if seconds is None else f"{seconds * _MICROSECONDS:.1f}"


def _show_measurements(report: "SelftestReport") -> None:
    rows = []
    for found in report.measurements:
        measured = found.reason if found.value is None else f"{found.value:.4g}"
        assumed = "" if found.assumed is None else f"{found.assumed:.4g}"
        rows.append((found.name, measured, assumed, found.unit, found.formula))
    print_table("measured", ("parameter", "measured", "assumed", "unit", "from"), (), rows)

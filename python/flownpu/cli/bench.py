# SPDX-License-Identifier: Apache-2.0
"""`flownpu bench`: the speed and the memory of a model."""

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from flownpu.bench.measurement import Case, Engine, Measurements, measure, own_engine
from flownpu.bench.report import BenchReport
from flownpu.bench.roofline import DecodeTraffic, decode_traffic
from flownpu.cli import options
from flownpu.cli.output import console, status
from flownpu.cli.progress import progress_bar
from flownpu.errors import MissingDependencyError, require
from flownpu.machine import describe_machine, usable_cores
from flownpu.model.folder import read_genai_config

# The exit code by which a shell reports a command that SIGINT ended.
INTERRUPTED = 130

_WIDEST = 1000


def bench(
    model: options.ModelFolder,
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="N,N...", help="Tokens of a prompt; each is a measurement.")
    ] = "1024",
    generate: Annotated[int, typer.Option("--generate", min=2, help="Tokens to generate after the prompt.")] = 64,
    depth: Annotated[
        str,
        typer.Option("--depth", metavar="N,N...", help="Tokens in the context before each prompt."),
    ] = "0",
    repeats: Annotated[int, typer.Option(min=1, help="Runs, each in a new process.")] = 5,
    busy: Annotated[int, typer.Option(min=0, help="Other processes that keep a core busy each.")] = 0,
    provider: options.ProviderOption = "flownpu",
    device: options.DeviceOption = None,
    activations: options.ActivationsOption = None,
    threads: options.Threads = None,
    option: options.Option = None,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write all results; - is stdout.")] = "",
    markdown_file: Annotated[str, typer.Option("--markdown", metavar="FILE", help="Write the table in Markdown.")] = "",
) -> None:
    """Measure prefill, decode, load time and memory.

    Each run is a process of its own that reads random tokens; medians are shown with the least and the most. A decode
    step must at least read its bytes at the memory's speed, which is measured in the same run; the share of the roof is
    that time divided by the step's. With --busy the roof is that of the cores that remain. With two devices, a switch
    is what the first step after a prompt takes longer than the others. Joules are those of the processor's packages,
    where their counters may be read. Ctrl-C ends it and keeps what was measured.
    """
    cases = [Case(d, p, generate) for d in _numbers(depth, "--depth", 0) for p in _numbers(prompt, "--prompt", 1)]
    settings = read_genai_config(model)["model"]
    require("onnxruntime_genai", extra="genai", purpose="flownpu bench")
    count = threads or usable_cores()
    given = options.provider_options(device, activations, option)
    for case in cases:
        case.check(int(settings["context_length"]))
    own = own_engine(model, provider=provider, options=given)
    found = _measure(own, cases, repeats=repeats, threads=count, vocabulary_size=int(settings["vocab_size"]), busy=busy)
    report = BenchReport(
        machine=describe_machine(),
        model=str(model),
        settings={
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["flownpu", *sys.argv[1:]]),
            "provider": provider,
            "device": given.get("device", ""),
            "repeats": repeats,
            "threads": count,
            "busy": busy,
        },
        traffic=_traffic(model),
        found=found,
    )
    if found.engines[own.name].load:
        outputs = {
            json_file: lambda: json.dumps(report.json(), indent=2, ensure_ascii=False) + "\n",
            markdown_file: report.markdown,
        }
        _write(outputs)
        if "-" not in outputs:
            _print(report)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


def _numbers(text: str, name: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise typer.BadParameter(f"expected numbers from {least} with commas between, got {text!r}", param_hint=name)
    return sorted(set(numbers))


def _measure(engine: Engine, cases: list[Case], **settings: int) -> Measurements:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} measured"))
    with progress_bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("measuring", total=None)
        return measure(
            [engine],
            cases,
            **settings,
            progress=lambda name, done, total: bar.update(task, description=name, completed=done, total=total),
        )


def _traffic(model: Path) -> DecodeTraffic | None:
    try:
        return decode_traffic(model)
    except MissingDependencyError as error:
        status(f"without the share of the roof: {error}")
        return None


def _write(outputs: dict[str, Callable[[], str]]) -> None:
    for name, text in outputs.items():
        if name == "-":
            print(text(), end="")
        elif name:
            Path(name).write_text(text(), encoding="utf-8")


def _print(report: BenchReport) -> None:
    for line in report.header():
        console.print(line, markup=False)
    table = Table()
    for i, heading in enumerate(report.columns()):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in report.rows():
        table.add_row(*row)
    table.add_section()
    for row in report.resources():
        table.add_row(*row)
    # The table keeps its full width in any window, because a cut number is useless.
    width = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    Console(width=max(width, console.width)).print(table)
    for line in report.footer():
        console.print(line, markup=False)

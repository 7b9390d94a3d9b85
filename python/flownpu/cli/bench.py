# SPDX-License-Identifier: Apache-2.0
"""`flownpu bench`: how fast, in how much memory, and beside which peers."""

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from flownpu.bench.measurement import Case, Engine, Measurements, measure
from flownpu.bench.plot import check_plotting, plot
from flownpu.bench.report import BenchReport
from flownpu.bench.roofline import DecodeTraffic, decode_traffic
from flownpu.bench.servers import CrowdMeasurements
from flownpu.cli import options
from flownpu.cli.output import console, progress_bar, status
from flownpu.cli.serving.crowds import bench_crowds, json_text, print_crowds
from flownpu.errors import FlowNPUError, MissingDependencyError, require
from flownpu.machine import describe_machine, usable_cores
from flownpu.model.folder import read_genai_config
from flownpu.peers import PEERS, own_engine, prepare, remove_exported
from flownpu.peers.export import ExportProgress

# The exit code that shells give a command that SIGINT ended.
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
        typer.Option("--depth", metavar="N,N...", help="Tokens in the context before the prompt, each with each."),
    ] = "0",
    against: Annotated[
        str, typer.Option("--against", metavar="PEER,PEER...", help=f"Other engines: {', '.join(PEERS)}.")
    ] = "",
    serve: Annotated[bool, typer.Option("--serve", help="Measure servers that many clients ask at once.")] = False,
    clients: Annotated[
        str, typer.Option("--clients", metavar="N,N...", help="With --serve: clients at once; each is a measurement.")
    ] = "1,2,4,8,16,32",
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="With --serve: a running server of OpenAI's API; may be repeated."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each engine, in turn, each in a new process.")] = 5,
    provider: options.ProviderOption = "flownpu",
    device: options.DeviceOption = None,
    activations: options.ActivationsOption = None,
    threads: options.Threads = None,
    option: options.Option = None,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write all results; - is stdout.")] = "",
    csv_file: Annotated[str, typer.Option("--csv", metavar="FILE", help="Write a line for each run.")] = "",
    markdown_file: Annotated[str, typer.Option("--markdown", metavar="FILE", help="Write the table in Markdown.")] = "",
    plot_file: Annotated[
        str, typer.Option("--plot", metavar="FILE", help="Write tokens/s by context, as SVG; needs Matplotlib.")
    ] = "",
) -> None:
    """Measure prefill, decode, load time and memory, also side by side with other engines.

    Each run is a process of its own that reads random tokens; engines take turns; medians are shown with the least and
    the most. The share of the roof is the time that reading a decode step's bytes takes at the memory's speed, as
    measured in the same run, by the time of the step.
    A peer's packages are installed into the cache folder ($XDG_CACHE_HOME/flownpu/peers), and the model's weights
    converted for it, when it is first measured. Ctrl-C ends it and keeps what was measured.

    With --serve, each client sends a prompt of every length of --prompt, half of it common to all clients, each when
    the one before is answered. Shown are the new tokens a second of all clients, and the times to the first token and
    between tokens. Peers are openvino and llama.cpp; the key for a --server is OPENAI_API_KEY's.
    """
    cases = [Case(d, p, generate) for d in _numbers(depth, "--depth", 0) for p in _numbers(prompt, "--prompt", 1)]
    settings = read_genai_config(model)["model"]
    require("onnxruntime_genai", extra="genai", purpose="flownpu bench")
    count = threads or usable_cores()
    given = options.provider_options(device, activations, option)
    if serve:
        if csv_file or plot_file or depth != "0":
            raise typer.BadParameter("--csv, --plot and --depth are not measured with --serve: leave them out")
        crowds = bench_crowds(
            model,
            clients=_numbers(clients, "--clients", 1),
            prompts=_numbers(prompt, "--prompt", 2),
            generate=generate,
            against=against,
            addresses=server or [],
            repeats=repeats,
            provider=provider,
            options=given,
            threads=count,
            preparing=_preparing,
        )
        outputs = {json_file: lambda: json_text(crowds), markdown_file: crowds.markdown}
        _write(outputs)
        if "-" not in outputs:
            print_crowds(crowds)
        _end(crowds.found)
        return
    names = _peers(against)
    for case in cases:
        case.check(int(settings["context_length"]))
    if plot_file:
        check_plotting()
    own = own_engine(model, provider=provider, options=given)
    engines = [own, *_prepare(names, model)]
    found = _measure(engines, cases, repeats, count, int(settings["vocab_size"]))
    report = BenchReport(
        machine=describe_machine(),
        model=str(model),
        settings={
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["flownpu", *sys.argv[1:]]),
            "provider": provider,
            "repeats": repeats,
            "threads": count,
        },
        traffic=_traffic(model),
        found=found,
    )
    if found.engines[own.name].load:
        outputs = {
            json_file: lambda: json.dumps(report.json(), indent=2, ensure_ascii=False) + "\n",
            csv_file: report.csv,
            markdown_file: report.markdown,
            plot_file: lambda: plot(report),
        }
        _write(outputs)
        if "-" not in outputs:
            _print(report)
    _end(found)


def _end(found: Measurements | CrowdMeasurements) -> None:
    """Exits with the code of an interruption, or raises the error of the engines that failed."""
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)
    if found.failures:
        raise FlowNPUError("; ".join(f"{name} failed: {reason}" for name, reason in found.failures.items()))


def _numbers(text: str, name: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise typer.BadParameter(f"expected numbers from {least} with commas between, got {text!r}", param_hint=name)
    return sorted(set(numbers))


def _peers(text: str) -> list[str]:
    names = list(dict.fromkeys(part for part in text.split(",") if part))
    for name in names:
        if name not in PEERS:
            raise typer.BadParameter(f"expected some of {', '.join(PEERS)}, got {name!r}", param_hint="--against")
    return names


def _prepare(names: list[str], model: Path) -> list[Engine]:
    """The peers, installed and with the model converted."""
    if not names:
        return []
    engines = _preparing(lambda say, progress: [prepare(name, model, say=say, progress=progress) for name in names])
    remove_exported(model)
    return engines


Made = TypeVar("Made")


def _preparing(make: Callable[[Callable[[str], None], ExportProgress], list[Made]]) -> list[Made]:
    """The result of `make`, which reports what it does and how far it is."""
    with progress_bar(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("preparing", total=None)

        def say(text: str) -> None:
            # The bar is not there where stderr is no terminal; what takes minutes is said anyway.
            bar.reset(task, total=None, description=text)
            if bar.disable:
                status(text)

        return make(say, lambda done, total: bar.update(task, completed=done, total=total))


def _measure(
    engines: list[Engine], cases: list[Case], repeats: int, threads: int, vocabulary_size: int
) -> Measurements:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} measured"))
    with progress_bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("measuring", total=None)
        return measure(
            engines,
            cases,
            repeats=repeats,
            threads=threads,
            vocabulary_size=vocabulary_size,
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
    # A number that is cut is none: the table is as wide as it is, whatever the window.
    width = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    Console(width=max(width, console.width)).print(table)
    for line in report.footer():
        console.print(line, markup=False)

# SPDX-License-Identifier: Apache-2.0
"""`flownpu bench`: how fast, and in how much memory."""

from dataclasses import asdict
from typing import Annotated

import psutil
import typer
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from flownpu.benchmark import Result, measure
from flownpu.cli import options
from flownpu.cli.output import bytes_text, console, print_json, progress_bar, seconds_text
from flownpu.generation import LanguageModel
from flownpu.machine import Machine, describe_machine


def bench(
    model: options.ModelFolder,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 1024,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate after it.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements, after one run to warm up.")] = 5,
    provider: options.ProviderOption = options.Provider.FLOWNPU,
    device: options.DeviceOption = None,
    activations: options.ActivationsOption = None,
    threads: options.Threads = None,
    option: options.Option = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure prefill, decode, time to the first token, load time and memory.

    The model generates through ORT GenAI as in `flownpu run`; medians are shown with the least and the most.
    """
    resident_before = psutil.Process().memory_info().rss
    language_model = options.open_model(model, provider, device, activations, threads, option)
    columns = (TextColumn("measuring"), BarColumn(), TextColumn("{task.completed}/{task.total} runs"))
    with progress_bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("measuring", total=repeats + 1)
        result = measure(
            language_model,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            repeats=repeats,
            resident_before=resident_before,
            progress=lambda runs: bar.update(task, completed=runs),
        )
    machine = describe_machine()
    setting = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "repeats": repeats}
    if as_json:
        named = {"model": str(model), "provider": provider.value, "placement": language_model.placement}
        print_json({"machine": asdict(machine), **named, **setting, **asdict(result)})
    else:
        _print_header(machine, language_model)
        console.print(_table(result, prompt_tokens, new_tokens, repeats))


def _print_header(machine: Machine, language_model: LanguageModel) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    memory = bytes_text(machine.memory)
    console.print(f"{machine.cpu}, {machine.isa}, {machine.cores} cores, {memory}, {machine.system}", markup=False)
    console.print(f"Python {machine.python}, {versions}", markup=False)
    console.print(f"{language_model.folder}: {language_model.placement['summary']}", markup=False)


def _table(result: Result, prompt_tokens: int, new_tokens: int, repeats: int) -> Table:
    table = Table(
        title=f"{prompt_tokens} prompt tokens, {new_tokens} new tokens, {repeats} repeats", title_justify="left"
    )
    for name in ("", "median", "least", "most"):
        table.add_column(name, justify="right" if name else "left")
    for name, spread in {"prefill, tokens/s": result.prefill, "decode, tokens/s": result.decode}.items():
        table.add_row(name, *(f"{value:.1f}" for value in (spread.median, spread.minimum, spread.maximum)))
    first = result.first_token
    table.add_row("first token", *(seconds_text(value) for value in (first.median, first.minimum, first.maximum)))
    table.add_section()
    table.add_row("load", seconds_text(result.load_seconds))
    memory = result.memory
    table.add_row("memory before loading", bytes_text(memory.before))
    table.add_row("memory, resident", bytes_text(memory.resident))
    table.add_row("  not backed by a file", bytes_text(memory.anonymous))
    table.add_row("memory, peak", bytes_text(memory.peak))
    return table

# SPDX-License-Identifier: Apache-2.0
"""`flownpu tune`: chooses the device of a model, or two, by measurement."""

from dataclasses import asdict
from typing import Annotated, Literal

import typer
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from flownpu.bench.measurement import Case
from flownpu.bench.tuning import tune, write_prices
from flownpu.cli import options
from flownpu.cli.output import console, print_json, print_table
from flownpu.cli.progress import progress_bar
from flownpu.errors import require
from flownpu.machine import usable_cores
from flownpu.model.folder import read_genai_config


def tune_model(
    model: options.ModelFolder,
    prefer: Annotated[
        Literal["speed", "energy"], typer.Option("--prefer", help="Whether seconds or joules are compared.")
    ] = "speed",
    prompt: Annotated[int, typer.Option("--prompt", min=2, help="Tokens of a prompt.")] = 512,
    answer: Annotated[int, typer.Option("--answer", min=3, help="Tokens of an answer.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Runs, each in a new process.")] = 3,
    devices: Annotated[
        str, typer.Option("--devices", metavar="NAME,NAME...", help="Devices to measure; the first is needed.")
    ] = "cpu,gpu,npu",
    threads: options.Threads = None,
    option: options.Option = None,
    write: Annotated[
        bool,
        typer.Option("--write", help="Keep the prices in genai_config.json, by which sessions choose."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Choose the device of a model, or one for prompts and one for tokens, by measurement.

    Measures each device, and then the pair that promises most beside the best device alone. A device that this machine
    lacks is left out, with the reason. Energy needs counters of the processor that may be read.
    """
    settings = read_genai_config(model)
    require("onnxruntime_genai", extra="genai", purpose="flownpu tune")
    Case(0, prompt, answer).check(int(settings["model"]["context_length"]))
    given = {name: options.provider_options(None, None, [*(option or []), f"device={name}"])
             for name in devices.split(",")}  # fmt: skip
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} measured"))
    with progress_bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("measuring", total=None)
        found = tune(
            model, devices=given, prefer=prefer, prompt=prompt, answer=answer - 1, repeats=repeats,
            threads=threads or usable_cores(), vocabulary_size=int(settings["model"]["vocab_size"]),
            progress=lambda name, done, total: bar.update(task, description=name, completed=done, total=total),
        )  # fmt: skip
    if write:
        write_prices(model, settings, found.prices, prefer)
    if as_json:
        print_json({**asdict(found), "options": found.options()})
        return
    unit = "s" if prefer == "speed" else "J"
    rows = [(device, f"{cost:.3g}") for device, cost in found.choice.costs.items()]
    print_table(f"a prompt of {prompt} tokens and an answer of {answer}", ("device",), (unit,), rows, "fold")
    for device, reason in found.failures.items():
        console.print(f"{device} was left out: {reason}", markup=False)
    if found.switch is not None:
        console.print(f"A switch after the prompt: {found.switch:.3g} {unit}.")
    console.print(" ".join(f"--option {key}={value}" for key, value in found.options().items()), markup=False)

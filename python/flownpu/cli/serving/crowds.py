# SPDX-License-Identifier: Apache-2.0
"""`flownpu bench --serve`: servers that many clients ask at the same time."""

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from flownpu.bench.crowd import Crowd, check_client
from flownpu.bench.crowd_report import CrowdReport
from flownpu.bench.servers import Server, measure_servers
from flownpu.cli.output import console, progress_bar
from flownpu.errors import FlowNPUError, require
from flownpu.machine import describe_machine
from flownpu.model.folder import read_genai_config
from flownpu.peers import remove_exported
from flownpu.peers.export import ExportProgress
from flownpu.peers.servers import SERVED, own_server, peer_server

__all__ = ["bench_crowds", "json_text", "print_crowds"]

_WIDEST = 1000


def bench_crowds(
    model: Path,
    *,
    clients: list[int],
    prompts: list[int],
    generate: int,
    against: str,
    addresses: list[str],
    repeats: int,
    provider: str,
    options: dict[str, str],
    threads: int,
    preparing: Callable[[Callable[[Callable[[str], None], ExportProgress], list[Server]]], list[Server]],
) -> CrowdReport:
    """Measures this project's server, and others, with crowds of clients.

    Args:
        model: the folder.
        clients: numbers of clients; each is a crowd.
        prompts: lengths of the prompts that each client asks.
        generate: tokens of each answer.
        against: peers, with commas between.
        addresses: NAME=URL of servers that run already.
        repeats: rounds.
        provider: of this project's server.
        options: of its provider.
        threads: of each server that is started.
        preparing: shows on the terminal how far preparations are.

    Raises:
        typer.BadParameter: an option is not understood.
        FlowNPUError: the prompts do not fit the model's context, or its server failed.
    """
    names = [part for part in dict.fromkeys(against.split(",")) if part]
    for name in names:
        if name not in SERVED:
            raise typer.BadParameter(f"expected some of {', '.join(SERVED)}, got {name!r}", param_hint="--against")
    others = [_address(text) for text in addresses]
    settings = read_genai_config(model)["model"]
    context = max(prompts) + generate
    if context > int(settings["context_length"]):
        raise FlowNPUError(
            f"{max(prompts)} prompt tokens and {generate} new ones do not fit the model's context of "
            f"{settings['context_length']}: lower --prompt or --generate"
        )
    check_client()
    require("flownpu.serve.server", extra="serve", purpose="flownpu bench --serve")
    crowds = [Crowd(count, tuple(prompts), generate) for count in clients]
    size = {"threads": threads, "context": context, "clients": max(clients)}
    servers = [own_server(model, provider=provider, options=options, **size)]
    if names:
        servers += preparing(
            lambda say, progress: [peer_server(name, model, say=say, progress=progress, **size) for name in names]
        )
        remove_exported(model)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} measured"))
    with progress_bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("measuring", total=None)
        found = measure_servers(
            [*servers, *others],
            crowds,
            repeats=repeats,
            vocabulary_size=int(settings["vocab_size"]),
            progress=lambda name, done, total: bar.update(task, description=name, completed=done, total=total),
        )
    return CrowdReport(
        describe_machine(),
        str(model),
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["flownpu", *sys.argv[1:]]),
            "provider": provider,
            "repeats": repeats,
            "threads": threads,
        },
        found,
    )


def json_text(report: CrowdReport) -> str:
    """The report as one JSON document."""
    return json.dumps(report.json(), indent=2, ensure_ascii=False) + "\n"


def print_crowds(report: CrowdReport) -> None:
    """Prints the report's table."""
    for line in report.header():
        console.print(line, markup=False)
    table = Table()
    for i, heading in enumerate(report.columns()):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for rows in report.sections():
        for row in rows:
            table.add_row(*row)
        table.add_section()
    # A number that is cut is none: the table is as wide as it is, whatever the window.
    width = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    Console(width=max(width, console.width)).print(table)
    for line in report.footer():
        console.print(line, markup=False)


def _address(text: str) -> Server:
    name, separator, url = text.partition("=")
    if not separator or not url.startswith(("http://", "https://")):
        raise typer.BadParameter(
            f"expected NAME=URL, such as other=http://127.0.0.1:8000/v1, got {text!r}", param_hint="--server"
        )
    return Server(name, url=url.rstrip("/"))

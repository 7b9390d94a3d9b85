# SPDX-License-Identifier: Apache-2.0
"""`flownpu batch`: requests from a file, answers into another one."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from flownpu.cli import options
from flownpu.cli.output import status
from flownpu.cli.progress import progress_bar
from flownpu.errors import require

if TYPE_CHECKING:
    from flownpu.serve.batch import BatchProgress

# An answer has no bound but the context: it waits until it is computed.
ENDLESS_SECONDS = 10.0**8


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Requests in OpenAI's batch format, one a line.")],
    target: Annotated[
        Path,
        typer.Argument(metavar="OUT.jsonl", help="Answers; those that are there already are not computed again."),
    ],
    model: Annotated[
        list[str],
        typer.Option(
            metavar="MODEL", help="Folder that `flownpu convert` wrote, or a name, or NAME=MODEL; may be repeated."
        ),
    ],
    context: options.Context = 4096,
    slots: options.Slots = 4,
    *,
    decoding: options.DecodingOptions,
    session: options.SessionOptions,
) -> None:
    """Answer all requests of a file. After an interruption, the same command continues where it stopped.

    A wrong request gets its error in the place of an answer.
    """
    batches = require("flownpu.serve.batch", extra="serve", purpose="flownpu batch")
    settings = require("flownpu.serve.settings", extra="serve", purpose="flownpu batch")
    served = options.served_models(model, context, slots, session, decoding)
    # Any number of requests may wait in the queue.
    limits = settings.Limits(queue=10**6, request_seconds=ENDLESS_SECONDS)
    last: BatchProgress | None = None
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with progress_bar(*columns) as bar:
        task = bar.add_task("", rate="", total=None)

        def report(progress: "BatchProgress") -> None:
            nonlocal last
            last = progress
            seconds = bar.tasks[0].elapsed or 0
            rate = f"{progress.new_tokens / seconds:.1f} tokens/s" if seconds else ""
            bar.update(task, total=progress.total, completed=progress.done, rate=rate)

        try:
            asyncio.run(
                batches.run_batch(batches.Batch(source, target), settings.ServerSettings(served, limits), report)
            )
        except KeyboardInterrupt:
            if last is not None:
                status(f"{last.done} of {last.total} requests are answered; the same command goes on with the rest")
            raise
    assert last is not None
    refused = f", {last.refused} of them with an error" if last.refused else ""
    earlier = f", {last.earlier} of them before" if last.earlier else ""
    status(f"{target}: {last.done} of {last.total} requests are answered{earlier}{refused}")

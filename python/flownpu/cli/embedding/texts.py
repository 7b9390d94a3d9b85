# SPDX-License-Identifier: Apache-2.0
"""The texts of the commands `embed` and `rerank`, from the command line or stdin, and messages about them."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from flownpu.cli.output import read_all_bytes, status
from flownpu.cli.progress import progress_bar
from flownpu.errors import FlowNPUError

Texts = Annotated[
    list[str] | None, typer.Argument(metavar="TEXT", help="Texts. Without them, each line of stdin is one.")
]


def read_texts(texts: list[str] | None) -> list[str]:
    """The texts of the command line, or the lines of stdin.

    Raises:
        FlowNPUError: there is none.
    """
    if texts:
        return texts
    if sys.stdin.isatty():
        raise typer.BadParameter('expected "some text" ..., or a text on each line of stdin', param_hint="TEXT")
    read_all_bytes()
    text = sys.stdin.read()
    if not text:
        raise FlowNPUError("expected a text on each line of stdin, and it is empty")
    # Not splitlines, which would also split a text at a form feed or U+2028 and shift the results.
    return text.removesuffix("\n").split("\n")


def say_cut(cut: list[int], longest: int) -> None:
    """Reports the texts that were cut, if any."""
    if cut:
        which = ", ".join(str(index + 1) for index in cut[:10]) + (" ..." if len(cut) > 10 else "")
        count = "1 text was" if len(cut) == 1 else f"{len(cut)} texts were"
        status(f"{count} longer than the {longest} tokens that the model takes, and cut there: number {which}")


@contextlib.contextmanager
def texts_progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar of the texts that are done, and what advances it."""
    columns = (TextColumn("Texts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as bar:
        task = bar.add_task("texts", total=total)
        yield lambda count: bar.update(task, advance=count)

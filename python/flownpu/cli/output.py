# SPDX-License-Identifier: Apache-2.0
"""Output of commands: text for people, one JSON document for programs, the rest on stderr."""

import contextlib
import io
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console, OverflowMethod, RenderableType
from rich.control import Control
from rich.segment import ControlType

from flownpu.convert.progress import Progress, ProgressCallback

# Brackets in a text are printed as brackets, because names of models and messages may have them.
console = Console(highlight=False, soft_wrap=True, markup=False)
# Progress bars go to stderr, because a user may redirect stdout to a file.
progress_console = Console(stderr=True)


class LogLines(logging.Handler):
    """Prints warnings, such as the converter's about nodes that it leaves, above a progress bar that may be there."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one record."""
        from rich.logging import RichHandler  # noqa: PLC0415 few commands warn

        RichHandler(console=progress_console, show_time=False, show_path=False).emit(record)


@contextlib.contextmanager
def conversion_progress() -> Iterator[ProgressCallback]:
    """Shows each stage of a download or a conversion with its rate and the time that remains."""
    with contextlib.ExitStack() as stack:
        shown: list[ProgressCallback] = []

        def report(progress: Progress) -> None:
            if not shown:
                # Most commands take a model that is there: nothing is downloaded.
                from flownpu.cli.progress import stages  # noqa: PLC0415

                shown.append(stack.enter_context(stages()))
            shown[0](progress)

        yield report


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Shows on stderr what the command waits for, if stderr is a terminal, and removes it afterwards.

    It is a line without animation, for waits in code that lets no other thread run.
    """
    if progress_console.is_terminal:
        progress_console.print(text, end="\r", markup=False, highlight=False, no_wrap=True, overflow="ellipsis")
    try:
        yield
    finally:
        if progress_console.is_terminal:
            progress_console.control(Control((ControlType.ERASE_IN_LINE, 2)))


def print_table(
    title: str,
    left: Iterable[str],
    right: Iterable[str],
    rows: Iterable[Iterable[RenderableType]],
    overflow: OverflowMethod = "ellipsis",
) -> None:
    """Prints a table: the headings of columns of text, then those of columns of numbers; `overflow` is for text."""
    from rich.table import Table  # noqa: PLC0415 `run` has none

    table = Table(title=title, title_justify="left")
    for heading in left:
        table.add_column(heading, overflow=overflow)
    for heading in right:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_json(document: dict[str, Any]) -> None:
    """Prints one JSON document on stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def read_all_bytes() -> None:
    """Makes stdin pass on bytes that are not UTF-8, so that the reader of the text can name them in its error."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")


def status(text: str) -> None:
    """Prints a line about what happened on stderr, so that stdout holds the answer alone."""
    print(text, file=sys.stderr, flush=True)


def bytes_text(count: float) -> str:
    """A number of bytes for people, in powers of 1024: "1.4 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def seconds_text(seconds: float) -> str:
    """A duration for people: "1.8 ms", "1.24 s"."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def error_text(what: str, errors: Mapping[str, float]) -> str:
    """The errors of weights in one line."""
    import statistics  # noqa: PLC0415 see print_table

    worst = max(errors, key=errors.__getitem__)
    return (
        f"{what} (root mean square, relative to the weights'): median "
        f"{100 * statistics.median(errors.values()):.2f} %, worst {100 * errors[worst]:.2f} % in {worst}"
    )

# SPDX-License-Identifier: Apache-2.0
"""Progress bars on stderr."""

import contextlib
from collections.abc import Iterator

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from flownpu.cli.output import bytes_text, progress_console
from flownpu.convert.progress import Progress as Done
from flownpu.convert.progress import ProgressCallback


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A progress bar, gone when it is finished; nothing where stderr is not a terminal."""
    return Progress(*columns, console=progress_console, transient=True, disable=not progress_console.is_terminal)


class RateColumn(ProgressColumn):
    """Units a second: "31.4 M weights/s", "410.0 MiB/s"."""

    def render(self, task: Task) -> Text:
        """The rate of one stage."""
        if task.speed is None:
            return Text("")
        if task.fields["unit"] == "B":
            return Text(f"{bytes_text(task.speed)}/s")
        return Text(f"{task.speed / 1e6:.1f} M {task.fields['unit']}/s")


@contextlib.contextmanager
def stages() -> Iterator[ProgressCallback]:
    """A bar for each stage of a work, with its rate and the time that remains."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with progress_bar(*columns, RateColumn(), TimeRemainingColumn()) as bar:
        tasks: dict[str, TaskID] = {}

        def report(progress: Done) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bar.add_task(progress.stage, total=progress.total, unit=progress.unit)
            bar.update(tasks[progress.stage], completed=progress.done)

        yield report

# SPDX-License-Identifier: Apache-2.0
"""`flownpu doctor`: lists the parts that are there or missing, with the command that mends each fault."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flownpu.cli import options
from flownpu.cli.output import console, print_json
from flownpu.doctor.checks import Host, Status
from flownpu.doctor.diagnosis import diagnose
from flownpu.doctor.xrt import load_plugin

# A word beside the colour, for terminals and eyes without it.
MARKS = {Status.GOOD: "[green]ok  [/]", Status.NOTE: "[yellow]note[/]", Status.BAD: "[red]BAD [/]"}


def doctor(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            callback=options.named_model,
            help="Folder or name of a model to try on the NPU, or else on the emulator.",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Check this machine; each problem comes with the command that solves it.

    The exit code is 1 if something is broken. A missing NPU is no error: the cpu device is used then.
    """
    checks = list(diagnose(Host(load_plugin=load_plugin), model))
    broken = any(check.status is Status.BAD for check in checks)
    if as_json:
        print_json({"ok": not broken, "checks": [asdict(check) for check in checks]})
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            console.print(f"{MARKS[check.status]} {check.name:{width}}  ", end="", markup=True)
            console.print(check.found)
            if check.remedy:
                console.print(f"     {'':{width}}  mend it with: {check.remedy}")
        console.print("Something is broken." if broken else "All that is needed is there.")
    if broken:
        raise typer.Exit(1)

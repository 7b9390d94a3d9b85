# SPDX-License-Identifier: Apache-2.0
"""Writes docs/use/command-line.md from the command line itself; a test checks that the page is up to date."""

import inspect
import sys
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, CommandInfo, OptionInfo

from flownpu.cli import application

PAGE = Path(__file__).resolve().parent.parent / "docs" / "use" / "command-line.md"
HEAD = """\
<!-- Written by scripts/write_command_line.py from the help of the commands: change it there. -->
# Command line

Every command has `--help`; `flownpu --version` prints the versions that a bug report needs; `--debug` shows the
traceback of an error. Reading commands print one JSON document with `--json`.

Text that a model generates goes to stdout, all that is said about it to stderr. The exit code is 0, 1 if the command
failed, 2 if it was not understood, 130 after Ctrl-C and 143 after SIGTERM. An error is one line: what is wrong, where,
and what to do.

`ORT_DISABLE_TELEMETRY=1` is set before ONNX Runtime is imported, unless the variable is set already.
"""


def page() -> str:
    """The page's text."""
    return "\n".join([HEAD, *(section(command) for command in application().registered_commands)])


def section(command: CommandInfo) -> str:
    """One command: what it does, its arguments and its options."""
    assert command.callback is not None
    defaults = inspect.signature(command.callback).parameters
    usage = f"flownpu {command.name}"
    rows = ["| | |", "|---|---|"]
    for name, hint in get_type_hints(command.callback, include_extras=True).items():
        if name == "return":
            continue
        kind, info = get_args(hint)[:2]
        if isinstance(info, ArgumentInfo):
            metavar = f"{info.metavar}..." if list[str] in get_args(kind) else info.metavar
            metavar = metavar if defaults[name].default is inspect.Parameter.empty else f"[{metavar}]"
            usage += f" {metavar}"
            rows.append(f"| `{in_cell(metavar)}` | {info.help} |")
        elif isinstance(info, OptionInfo):
            rows.append(f"| {in_cell(option_text(name, kind, info))} | {option_help(info, defaults[name].default)} |")
    text = inspect.cleandoc(command.callback.__doc__ or "")
    return "\n".join([f"## {command.name}", "", f"`{usage} [OPTIONS]`", "", text, "", *rows, ""])


def in_cell(text: str | None) -> str:
    """A text for a cell of a table, with bars escaped, which would end the cell."""
    return str(text).replace("|", "\\|")


def option_text(name: str, kind: Any, option: OptionInfo) -> str:
    """An option as it is typed: "`--prompt`, `-p` TEXT"."""
    # With Annotated, typer keeps an option's first name in `default`.
    given = [text for text in (option.default, *(option.param_decls or ())) if isinstance(text, str)]
    names = given or [f"--{name.replace('_', '-')}"]
    typed = ", ".join(f"`{name}`" for name in names)
    kinds = get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)
    if bool in kinds:
        return typed
    choices = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    choices += [value.value for kind in kinds if inspect.isclass(kind) and issubclass(kind, StrEnum) for value in kind]
    return f"{typed} {option.metavar or ' or '.join(choices) or ('TEXT' if str in kinds else 'NUMBER')}"


def option_help(option: OptionInfo, default: object) -> str:
    """An option's help, and its default, unless that is empty or already in the help, or that it must be given."""
    if default is inspect.Parameter.empty:
        return f"{option.help} (required)"
    if default in (None, "", False) or "(default:" in (option.help or ""):
        return str(option.help)
    return f"{option.help} (default: {default})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name} is written\n")

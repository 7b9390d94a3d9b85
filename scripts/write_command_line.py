# SPDX-License-Identifier: Apache-2.0
"""Writes docs/use/command-line.md from the command line itself; a test checks that the page is up to date.

As a hook of MkDocs it adds all arguments and options to the page in the site; in the repository `--help` shows them.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, CommandInfo, OptionInfo

from flownpu.cli import application

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "use" / "command-line.md"
# Options and arguments of at least so many commands are in the table of common options; each command only names them.
COMMON = 2
HEAD = """\
<!-- Written by scripts/write_command_line.py from the help of the commands: change it there. -->
# Command line

`flownpu COMMAND --help` shows the arguments and options of a command. `flownpu --version` prints the versions that a
bug report needs; `--debug` shows the traceback of an error. Generated text goes to stdout, everything else to stderr.
The exit code is 0, 1 if the command failed, 2 if it was not understood, 130 after Ctrl-C and 143 after SIGTERM.
`ORT_DISABLE_TELEMETRY=1` is set before ONNX Runtime is imported, unless the variable is set already.
"""


HEADINGS = ("| | |", "|---|---|")


def page() -> str:
    """The page's text: a line for each command."""
    lines = []
    for command in application().registered_commands:
        summary = inspect.cleandoc(command.callback.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{command.name}` | {summary} |")
    return "\n".join([HEAD, *HEADINGS, *lines, ""])


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Adds the reference to the page in the site."""
    return f"{markdown}\n{reference()}" if page.file.src_uri == "use/command-line.md" else markdown


def reference() -> str:
    """Usage, help, arguments and options of each command."""
    commands = application().registered_commands
    counts = Counter(row for command in commands for row in rows(command))
    common = [row for row, count in counts.items() if count >= COMMON]
    parts = ["## Common options", "", *HEADINGS, *(f"| {text} | {meaning} |" for text, meaning in common), ""]
    return "\n".join([*parts, *(section(command, common) for command in commands)])


def rows(command: CommandInfo) -> list[tuple[str, str]]:
    """A command's arguments and options as they are typed, and their help."""
    assert command.callback is not None
    defaults = inspect.signature(command.callback).parameters
    found = []
    for name, hint in get_type_hints(command.callback, include_extras=True).items():
        if name == "return":
            continue
        kind, info = get_args(hint)[:2]
        if isinstance(info, ArgumentInfo):
            found.append((f"`{in_cell(argument_text(kind, info, defaults[name].default))}`", str(info.help)))
        elif isinstance(info, OptionInfo):
            found.append((in_cell(option_text(name, kind, info)), option_help(info, defaults[name].default)))
    return found


def section(command: CommandInfo, common: list[tuple[str, str]]) -> str:
    """One command: its usage, its help, its own arguments and options, and the names of the common options."""
    arguments = [text.strip("`") for text, _ in rows(command) if text.startswith("`") and not text.startswith("`-")]
    usage = " ".join(["flownpu", str(command.name), *arguments, "[OPTIONS]"]).replace("\\|", "|")
    table = [f"| {text} | {meaning} |" for text, meaning in rows(command) if (text, meaning) not in common]
    shared = [text.partition(" ")[0].rstrip(",") for text, meaning in rows(command) if (text, meaning) in common]
    if options := ", ".join(text for text in shared if text.startswith("`-")):
        table.append(f"| [common](#common-options) | {options} |")
    text = inspect.cleandoc(command.callback.__doc__ or "")
    return "\n".join([f"## {command.name}", "", f"`{usage}`", "", text, "", *HEADINGS, *table, ""])


def argument_text(kind: Any, argument: ArgumentInfo, default: object) -> str:
    """An argument as it is in the usage: "MODEL", "[TEXT...]"."""
    metavar = f"{argument.metavar}..." if list[str] in get_args(kind) else str(argument.metavar)
    return metavar if default is inspect.Parameter.empty else f"[{metavar}]"


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
    return f"{typed} {option.metavar or ' or '.join(choices) or ('TEXT' if str in kinds else 'NUMBER')}"


def option_help(option: OptionInfo, default: object) -> str:
    """An option's help, with its default unless that is empty or already in the help, or a note that it is required."""
    if default is inspect.Parameter.empty:
        return f"{option.help} (required)"
    if default in (None, "", False) or "(default:" in (option.help or ""):
        return str(option.help)
    return f"{option.help} (default: {default})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name} is written\n")

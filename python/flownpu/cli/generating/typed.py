# SPDX-License-Identifier: Apache-2.0
"""The lines that are typed in a conversation: messages of several lines, and the lines of earlier conversations."""

import atexit
import contextlib
import os
import sys
from pathlib import Path

MARK = '"""'
"""Begins and ends a message of several lines."""
KEPT = 1000
"""Lines that are kept for the next conversation."""


def history_file() -> Path:
    """`flownpu/chat_history` in $XDG_STATE_HOME, or in ~/.local/state."""
    given = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification says to ignore relative paths.
    base = Path(given) if given and Path(given).is_absolute() else Path.home() / ".local" / "state"
    return base / "flownpu" / "chat_history"


def remember_lines() -> None:
    """Lets the arrow keys go through earlier lines, also of earlier conversations, if a person types."""
    if not sys.stdin.isatty():
        return
    try:
        import readline  # noqa: PLC0415 Windows has none, and importing it changes the terminal
    except ImportError:
        return
    file = history_file()
    with contextlib.suppress(OSError):  # there is none yet, or it cannot be read
        readline.read_history_file(file)
    readline.set_history_length(KEPT)
    atexit.register(_keep, file)


def _keep(file: Path) -> None:
    import readline  # noqa: PLC0415 see above

    with contextlib.suppress(OSError):  # a full disk must not turn the end into an error
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)  # only its owner may read what was said
        readline.write_history_file(file)


def read_message() -> tuple[str, bool]:
    """A message, and whether it is one of several lines, which is no command whatever it begins with.

    Raises:
        EOFError: there is none.
    """
    shows = sys.stdin.isatty()
    line = input("> " if shows else "").strip()
    if not line.startswith(MARK):
        return line, False
    line = line.removeprefix(MARK)
    lines = []
    while not line.rstrip().endswith(MARK):
        lines.append(line)
        line = input(". " if shows else "")
    return "\n".join([*lines, line.rstrip().removesuffix(MARK)]).strip(), True

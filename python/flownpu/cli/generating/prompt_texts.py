# SPDX-License-Identifier: Apache-2.0
"""The texts that a prompt is made of: the command line's, files, and stdin."""

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from flownpu.cli.output import bytes_text
from flownpu.errors import FlowNPUError, check_text

MOST_BYTES = 4 * 2**20
"""Bytes of a file, or of stdin: a million tokens, the longest context of any family here, of some four bytes each."""
STDIN = Path("-")


def read_prompt(prompt: str | None, files: Sequence[Path]) -> str:
    """The prompt with the files behind it, each below its name; without either, stdin. The file "-" is stdin.

    Raises:
        typer.BadParameter: there is neither, and stdin is a terminal.
        FlowNPUError: a file cannot be read, is not UTF-8, or is too large.
    """
    if prompt is None and not files:
        if sys.stdin.isatty():
            raise typer.BadParameter('expected -p "some text", --file FILE, or text on stdin', param_hint="--prompt")
        return _read(STDIN)
    texts = [f"{path}:\n{_read(path)}" if path != STDIN else _read(path) for path in files]
    return "\n\n".join([*([prompt] if prompt else []), *texts])


def _read(path: Path) -> str:
    name = "stdin" if path == STDIN else str(path)
    try:
        if path == STDIN:
            # Tests and notebooks may have a stdin of texts.
            raw = getattr(sys.stdin, "buffer", None)
            data = sys.stdin.read(MOST_BYTES + 1).encode() if raw is None else raw.read(MOST_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise FlowNPUError(f"{name} cannot be read: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise FlowNPUError(f"{name} is larger than {bytes_text(MOST_BYTES)}, which no context holds: give a part of it")
    text: str = data.decode("utf-8", "surrogateescape")
    try:
        check_text(text)
    except FlowNPUError as error:
        raise FlowNPUError(f"{name}: {error}") from error
    return text

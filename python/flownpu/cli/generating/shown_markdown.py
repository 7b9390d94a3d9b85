# SPDX-License-Identifier: Apache-2.0
"""Markdown in a terminal, while it is written: whole blocks are laid out once, the last one again with each piece."""

from collections.abc import Iterable

from markdown_it import MarkdownIt
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

_PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
"""The parser of rich's `Markdown`, with what it enables."""


def whole_blocks(text: str) -> int:
    """How many of the first characters are blocks (paragraphs, lists, code) that further text cannot change.

    The last block is open: its next line may belong to it, or make a heading of it.
    """
    starts = [token.map[0] for token in _PARSER.parse(text) if token.map and token.level == 0]
    if len(starts) < 2:
        return 0
    return sum(len(line) + 1 for line in text.split("\n")[: starts[-1]])


def show_markdown(pieces: Iterable[str], console: Console) -> None:
    """Lays a text out as its pieces come. A block that is open and higher than the terminal is shown by its end."""
    rest, is_first = "", True
    try:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            for piece in pieces:
                rest += piece
                if "\n" in piece and (end := whole_blocks(rest)) > 0:
                    _print(rest[:end], console, is_first=is_first)
                    rest, is_first = rest[end:], False
                live.update(_open_block(rest, console, is_first=is_first), refresh=True)
    finally:  # also when Ctrl-C stops the answer
        if rest.strip():
            _print(rest, console, is_first=is_first)


def _print(blocks: str, console: Console, *, is_first: bool) -> None:
    if not is_first:
        console.print()
    console.print(Markdown(blocks, hyperlinks=False))  # a link shows where it goes


def _open_block(text: str, console: Console, *, is_first: bool) -> Text:
    """The block's last lines: what is above the terminal's upper edge could not be taken back."""
    shown = Text("" if is_first else "\n").append(text.strip("\n"))
    lines = shown.wrap(console, console.width)
    return Text("\n").join(lines[-max(1, console.height - 2) :])

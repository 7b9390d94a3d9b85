# SPDX-License-Identifier: Apache-2.0
"""Markdown that is shown while it is written, beside rich's layout of the whole text."""

import io
import sys

import pytest
from rich.console import Console
from rich.markdown import Markdown

from flownpu.cli.generating.run import print_answer
from flownpu.cli.generating.shown_markdown import show_markdown, whole_blocks

TEXT = """# Loops

A *loop* repeats
its body. [More](https://example.com/loops)

- one
- two

  still two
1. other

```python
for x in "abc":

    print(x)
```
After code.

| a | b |
|---|---|
| 1 | **2** |

> said
so

Heading
=======

    indented

    code

***
Last line\N{LINE SEPARATOR}goes on"""


def console(text=None):
    return Console(file=io.StringIO() if text is None else text, width=40, height=10, color_system=None)


def laid_out(text):
    whole = console()
    whole.print(Markdown(text, hyperlinks=False))
    return whole.file.getvalue()


@pytest.mark.parametrize("size", [1, 7, 64, len(TEXT)])
def test_text_in_pieces_is_laid_out_as_whole(size):
    shown = console()
    show_markdown((TEXT[start : start + size] for start in range(0, len(TEXT), size)), shown)
    lines = [line for line in shown.file.getvalue().splitlines() if line.strip()]
    assert lines == [line for line in laid_out(TEXT).splitlines() if line.strip()]
    assert "two" in "".join(lines)
    assert "(https://example.com/loops)" in "".join(lines)


def test_block_is_whole_only_if_no_further_text_changes_it():
    for text, blocks in (
        ("a\n", ""),
        ("a\n\n", ""),  # no other block has begun
        ("a\n\nb", "a\n\n"),
        ("a\n===", ""),
        ("```\na\n\nb\n\n", ""),
        ("- a\n\n- b\n\n  c", ""),
        ("- a\n\nb", "- a\n\n"),
        ("| a |\n|---|\n| 1 |\n", ""),
    ):
        assert text[: whole_blocks(text)] == blocks, text


def test_open_block_higher_than_terminal_shows_its_end():
    text = io.StringIO()
    terminal = Console(file=text, width=40, height=10, force_terminal=True, color_system=None)
    many = "```\n" + "".join(f"line {number}\n" for number in range(50))
    seen = []
    show_markdown((seen.append(text.getvalue()) or piece for piece in (many, "x", "y")), terminal)
    assert "line 49" in seen[1]
    assert "line 39" not in seen[1]
    assert text.getvalue().count("line 0 ") == 1  # in the end it is there as a whole


def test_interrupted_answer_stays():
    def pieces():
        yield "first\n\nsec"
        raise KeyboardInterrupt

    shown = console()
    with pytest.raises(KeyboardInterrupt):
        show_markdown(pieces(), shown)
    assert shown.file.getvalue().split() == ["first", "sec"]


@pytest.mark.parametrize("markdown", [True, False])
def test_answer_commands_no_terminal(monkeypatch, markdown):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    print_answer(iter(["a\x1b]0;bad\x07b\r\x9b2Jc", "\td\n"]), [], markdown=markdown)
    assert "]0;bad" in sys.stdout.getvalue()
    for control in ("\x1b]0", "\x07", "\x9b"):
        assert control not in sys.stdout.getvalue()


def test_answer_in_pipe_is_unchanged(capsys):
    print_answer(iter(["# a\n", "\x1b*b*"]), [], markdown=True)
    assert capsys.readouterr().out == "# a\n\x1b*b*\n"

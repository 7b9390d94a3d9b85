# SPDX-License-Identifier: Apache-2.0
"""Draws the README's picture, docs/figures/demo.svg: the real output of the commands that `make demo` runs."""

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent.parent
PICTURE = ROOT / "docs" / "figures" / "demo.svg"
COLUMNS = 110
COMMANDS = (
    ("convert", "tests/fixtures/gemma3-topics", "out/gemma3-topics"),
    ("run", "out/gemma3-topics", "--no-chat-template", "-p", 'The "for" statement is used to'),
)


def main() -> None:
    """Runs the commands in an empty folder and writes the picture."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tests").symlink_to(ROOT / "tests")
        for command in COMMANDS:
            shown = shlex.join(command)
            console.print(Text.assemble(("$ ", "green"), ("flownpu ", "bold"), (shown, "bold")))
            out, err = run(command, folder)
            console.print(Text(out), end="")
            console.print(Text(err, style="bright_black"), end="")
    svg = console.export_svg(title="FlowNPU")
    # Removes the fonts that a browser would fetch from another site; the reader's own monospace font serves as well.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(svg, encoding="utf-8")
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)} is written\n")


def run(command: tuple[str, ...], folder: str) -> tuple[str, str]:
    """A command's stdout and stderr."""
    program = Path(sys.executable).parent / "flownpu"
    environment = os.environ | {"ORT_DISABLE_TELEMETRY": "1"}
    done = subprocess.run([program, *command], cwd=folder, env=environment, check=True, capture_output=True, text=True)
    return done.stdout, done.stderr


if __name__ == "__main__":
    main()

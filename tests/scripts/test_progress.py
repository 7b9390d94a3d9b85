# SPDX-License-Identifier: Apache-2.0
"""`scripts/progress.py`: the lines of a build that it prints, and its exit code."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "progress.py"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, SCRIPT, "Compiling", *command]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_progress_prints_each_tenth_of_a_build() -> None:
    done = run("sh", "-c", 'for i in $(seq 30); do echo "[$i/30] Building $i.cc"; done; echo noise')
    lines = done.stdout.splitlines()
    assert lines[:2] == ["Compiling ...", "  3 of 30 files"]
    assert lines[-1] == "  30 of 30 files"
    assert len(lines) == 11
    assert done.returncode == 0


def test_progress_of_a_failure_prints_its_whole_output() -> None:
    done = run("sh", "-c", "echo '[1/30] Building'; echo reason >&2; exit 3")
    assert done.stdout == "Compiling ...\n[1/30] Building\nreason\n"
    assert done.returncode == 3

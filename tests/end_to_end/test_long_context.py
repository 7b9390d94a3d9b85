# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.engines.long_context` prints its table; no other test runs its worker, which is a process of its own."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_long_context_benchmark_writes_rows(converted: Callable[..., Path]):
    sizes = ["--depth", "64", "--generate", "2", "--repeats", "1", "--against", ""]
    command = [sys.executable, "-m", "benchmarks.engines.long_context", converted(), *sizes]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    heading, row = (line.split() for line in ended.stdout.splitlines() if line.startswith(("┃", "│")))
    assert heading[1] == "engine"
    assert row[1] == "flownpu"
    # Tokens a second of the prompt and of decode, and megabytes.
    assert all(float(row[column]) > 0 for column in (3, 5, 13))

# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.engines.decoders` prints a column for each engine; processes of their own run them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_decoders_prints_a_ratio_for_each_other_engine(converted: Callable[..., Path]) -> None:
    model = converted()
    others = ("--build", sys.executable, "--ort-cpu", model)
    sizes = ("--prompt", "9", "--generate", "3", "--depth", "4", "--repeats", "1")
    command = [sys.executable, "-m", "benchmarks.engines.decoders", model, *others, *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| decode at 13 |"))
    _, _, _, _, ort, ort_ratio, build, build_ratio, _ = row.split("|")
    assert all(cell.strip() for cell in (ort, ort_ratio, build, build_ratio)), done.stdout

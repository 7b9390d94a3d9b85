# SPDX-License-Identifier: Apache-2.0
"""Compares ways to wait for a running call (ops/npu/xrt/waiting.h): how late its end is noticed, and the CPU time.

    python -m benchmarks.machine.waiting --milliseconds 20 --milliseconds 60

runs at the root of the repository. A thread plays the device; its commands' times vary by 2 %. The ways take turns,
with some commands each in every round; shown are the minimum, median and maximum of the rounds' medians. It needs a C++
compiler ($CXX, or c++), and an idle machine.
"""

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

ROOT = Path(__file__).parents[2]
# In the order of their numbers in benchmarks/machine/waiting.cc.
WAYS = ("woken by the kernel", "each 16th of the time so far", "each millisecond", "learnt, as it is done")
# Commands that are not counted: the learning way still learns how long commands take.
FIRST = 5


def build(folder: Path) -> ctypes.CDLL:
    """The measuring loops, compiled with the XRT runtime's own waiting."""
    library = folder / "waiting.so"
    sources = [Path(__file__).with_suffix(".cc"), ROOT / "ops/npu/xrt/waiting.cc"]
    options = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", f"-I{ROOT}"]
    subprocess.run([os.environ.get("CXX", "c++"), *options, "-o", library, *sources], check=True)
    return ctypes.CDLL(str(library))


def measure(loops: ctypes.CDLL, way: int, milliseconds: float, commands: int) -> tuple[float, float]:
    """Medians over commands, in us: how late the end was noticed, and the wait's CPU time."""
    spread = np.random.default_rng(0).uniform(0.98, 1.02, commands + FIRST)
    durations = (spread * milliseconds * 1e6).astype(np.int64)
    late, cpu = np.zeros_like(durations), np.zeros_like(durations)
    pointers = [array.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)) for array in (durations, late, cpu)]
    loops.wait_for_commands(way, pointers[0], ctypes.c_int64(len(durations)), *pointers[1:])
    return float(np.median(late[FIRST:])) / 1000, float(np.median(cpu[FIRST:])) / 1000


def main(
    milliseconds: Annotated[list[float], typer.Option(help="How long a command takes; may be repeated.")] = [20, 60],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    commands: Annotated[int, typer.Option(min=1, help="Of each way in a round.")] = 25,
) -> None:
    """Prints a table: for each way the minimum, median and maximum of the rounds."""
    with tempfile.TemporaryDirectory(prefix="flownpu-") as folder:
        loops = build(Path(folder))
        for length in milliseconds:
            found = np.array(
                [[measure(loops, way, length, commands) for way in range(len(WAYS))] for _ in range(rounds)]
            )
            print(f"commands of {length:g} ms, {rounds} rounds of {commands}: late by us; CPU time of a wait in us")
            for way, name in enumerate(WAYS):
                low, middle, high = (np.quantile(found[:, way], q, axis=0) for q in (0, 0.5, 1))
                late, cpu = (f"{middle[i]:6.0f} ({low[i]:.0f}-{high[i]:.0f})" for i in (0, 1))
                print(f"  {name:30} {late:24} {cpu:24} {middle[1] / length / 10:5.2f} %")


if __name__ == "__main__":
    typer.run(main)

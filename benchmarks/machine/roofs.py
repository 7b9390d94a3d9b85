# SPDX-License-Identifier: Apache-2.0
"""This machine's limits: bytes and operations per second, measured with all threads together."""

import ctypes
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flownpu.bench.roofline import read_bandwidth

# Rounds that take about a tenth of a second at 4 GHz: 12 or 16 instructions per round, at one or two per cycle.
_ROUNDS = 50_000_000


@dataclass(frozen=True)
class Roofs:
    """Bytes (read) or operations per second; 0 if the processor lacks the instruction."""

    read: float
    int8_dot: float
    bf16_dot: float
    float_fma: float


def measure_roofs(threads: int) -> Roofs:
    """Measures the roofs; needs a C++ compiler ($CXX, or c++)."""
    with tempfile.TemporaryDirectory(prefix="flownpu-") as folder:
        library = Path(folder) / "roofs.so"
        source = Path(__file__).with_suffix(".cc")
        compiler = os.environ.get("CXX", "c++")
        subprocess.run(
            [compiler, "-std=c++20", "-O2", "-march=native", "-shared", "-fPIC", "-o", library, source], check=True
        )
        loops = ctypes.CDLL(str(library))
        rates = {name: _rate(loops[name], threads) for name in ("int8_dot", "bf16_dot", "float_fma")}
    return Roofs(read=read_bandwidth(threads), **rates)


def _rate(loop: "ctypes._NamedFuncPointer", threads: int) -> float:
    loop.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)]
    loop.restype = ctypes.c_int64
    with ThreadPoolExecutor(threads) as pool:
        # Threads run at the same time: ctypes releases Python's lock.
        started = time.perf_counter()
        operations = list(pool.map(lambda _: loop(_ROUNDS, ctypes.byref(ctypes.c_int64())), range(threads)))
        return sum(operations) * _ROUNDS / (time.perf_counter() - started)

# SPDX-License-Identifier: Apache-2.0
"""The time of a step's products on n cores: measured, if the machine has as many, and predicted by a model.

    python -m benchmarks.machine.cores gemma3-1b --rows 1,8,32 --cores 1,2,4,8,16,32,64 --read 200

runs at the root of the repository, with the module flownpu_testing (`make test` builds it). A product of T tasks takes

    max(bytes / min(n read_1, read), operations / rate_1 * ceil(T / n) / T) + (n - 1) job

where read_1 is the rate at which one core reads memory, rate_1 that at which it multiplies weights in its caches, and
job the cost of handing a job to a further thread and waiting for it; all are measured on this machine. read is the
memory's rate on the machine to be predicted (--read). The model leaves out clocks that fall when more cores compute,
caches and memory of several sockets, and everything that is not a product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine.kernels import Kernel, measure_seconds, products
from flownpu.bench.roofline import read_bandwidth
from flownpu.convert.decoder import Decoder
from flownpu.convert.families import read_decoder
from flownpu.machine import usable_cores
from flownpu.model.shapes import SHAPES
from flownpu.ops import q4nx
from tests.ops.device import ISAS, testing

_JOBS = 5000
# Microseconds of a task: long enough for a spinning thread to see the job.
_TASK = 10
_REPEATS = 5


@dataclass(frozen=True)
class Cores:
    """The model's parameters of a machine.

    Attributes:
        read: bytes per second that all cores read together.
        read_alone: bytes per second that one core reads.
        rate: operations per second of one core, with weights in its caches.
        job: seconds that a job costs for each thread except the first.
    """

    read: float
    read_alone: float
    rate: float
    job: float


def predict(size: int, operations: int, tasks: int, cores: int, machine: Cores) -> float:
    """Seconds of a product on `cores` cores; the equation is at the top of this file."""
    memory = size / min(cores * machine.read_alone, machine.read)
    arithmetic = operations / machine.rate * ceil(tasks / cores) / tasks
    return max(memory, arithmetic) + (cores - 1) * machine.job


def tasks_of(kernel: Kernel, cores: int) -> int:
    """Number of tasks into which a product is cut for `cores` threads."""
    m = int(kernel.shape.split(" x ")[0])
    row_parts, block_parts = testing.matmul_plan(kernel.rows, -(-m // q4nx.BLOCK_ROWS), cores)
    return row_parts * block_parts


def measure_job() -> float:
    """Seconds that two threads need for a job of one task each, less the task's own time; 0 on one core."""
    if usable_cores() < 2:
        return 0.0
    pool = testing.ThreadPool(2)
    return median(pool.seconds_of_jobs(_JOBS, _TASK) / _JOBS for _ in range(_REPEATS)) - 1e-6 * _TASK


def _step(kernels: Sequence[Kernel], layers: int, seconds: Sequence[float]) -> float:
    """Seconds of all layers and the LM head, from those of each product."""
    return sum(
        time * (1 if kernel.name == "LM head" else layers) for kernel, time in zip(kernels, seconds, strict=True)
    )


def _rate(decoder: Decoder, rows: int) -> float:
    """Operations per second of one core with a weight in its caches, measured with the output projection."""
    (kernel,) = (k for k in products(decoder, rows, ISAS[0], "int8", 1, q4nx.SYMMETRIC, copies=1) if k.name == "output")
    return kernel.operations / measure_seconds(kernel)


def main(
    model: Annotated[str, typer.Argument(metavar="SHAPE", help=f"Of {', '.join(SHAPES)}.")] = "gemma3-1b",
    rows: Annotated[str, typer.Option(help="Tokens of a step; each is a table.")] = "1,8,32",
    cores: Annotated[str, typer.Option(help="How many; those that this machine has are measured as well.")] = "1,2",
    read: Annotated[float | None, typer.Option(help="GB/s of the machine asked about. (default: this one's)")] = None,
) -> None:
    """Prints milliseconds of a step's products as predicted, and as measured."""
    decoder = read_decoder(SHAPES[model])
    here = read_bandwidth()
    alone, job = read_bandwidth(1), measure_job()
    print(f"one core reads {alone / 1e9:.1f} GB/s, all {here / 1e9:.1f}; a job costs {job * 1e6:.2f} us a thread")
    table = Table()
    for heading in ("rows", "cores", "predicted ms", "of it jobs", "uneven tasks", "measured ms", "predicted / it"):
        table.add_column(heading, justify="right")
    for count in [int(part) for part in rows.split(",")]:
        rate = _rate(decoder, count)
        for n in [int(part) for part in cores.split(",")]:
            asked = Cores(here if n <= usable_cores() or read is None else 1e9 * read, alone, rate, job)
            kernels = list(products(decoder, count, ISAS[0], "int8", n, q4nx.SYMMETRIC))
            plans = [(k.bytes, k.operations, tasks_of(k, n)) for k in kernels]
            total = _step(kernels, len(decoder.layers), [predict(*plan, n, asked) for plan in plans])
            # The same if tasks could be divided evenly among the cores.
            even = [predict(size, operations, n, n, asked) for size, operations, _ in plans]
            jobs = (n - 1) * job * _step(kernels, len(decoder.layers), [1] * len(kernels))
            row = [f"{count}", f"{n}", f"{1e3 * total:.2f}", f"{jobs / total:.0%}"]
            row.append(f"{1 - _step(kernels, len(decoder.layers), even) / total:.0%}")
            if n <= usable_cores():
                measured = _step(kernels, len(decoder.layers), [measure_seconds(kernel) for kernel in kernels])
                row += [f"{1e3 * measured:.2f}", f"{total / measured:.2f}"]
            table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)

# SPDX-License-Identifier: Apache-2.0
"""Records an IRON program as a plan: the names of `aie.iron` (generation C) that our designs use, without mlir-aie.

Each class has the constructor and the methods of its namesake in mlir-aie's python/iron, with the checks that IRON
itself makes. What a plan cannot hold (packets, cascades, hand-written DMA programs, dynamic sequences) is not here, and
options for it are refused, never ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flownpu.aie.iron.fifo import ObjectFifo, ObjectFifoHandle
from flownpu.aie.iron.resolve import assemble
from flownpu.aie.iron.runtime import Runtime
from flownpu.aie.iron.sequence import RuntimeData, Task
from flownpu.aie.iron.symbolic import RecordingError
from flownpu.aie.iron.types import (
    NPU1,
    NPU2,
    Device,
    Tile,
    refuse,
    v8bfp16ebs8,
)
from flownpu.aie.iron.worker import Buffer, Kernel, Worker, WorkerRuntimeBarrier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flownpu.aie.plan import data as plan

__all__ = [
    "NPU1",
    "NPU2",
    "Buffer",
    "Kernel",
    "ObjectFifo",
    "ObjectFifoHandle",
    "Program",
    "RecordingError",
    "Runtime",
    "RuntimeData",
    "Task",
    "Tile",
    "Worker",
    "WorkerRuntimeBarrier",
    "v8bfp16ebs8",
]


class Program:
    """A whole design (`aie.iron.Program`)."""

    def __init__(self, device: Device, rt: Runtime, workers: Sequence[Worker] | None = None, **options: Any) -> None:
        refuse("Program", options)
        self.device, self.runtime, self.workers = device, rt, list(workers or ())

    def resolve_program(self, device_name: str = "main") -> plan.Plan:
        """Choose the open places of the design, run the functions of cores and sequence once, and return the plan.

        Raises:
            RecordingError: IRON would refuse the design, or a plan cannot hold it; the message says what and where.
        """
        return assemble(device_name, self.device, self.runtime, self.workers)

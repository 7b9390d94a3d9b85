# SPDX-License-Identifier: Apache-2.0
"""The only source of IRON's names for designs: the recorder's classes, so that a design gives a plan on any machine.

Each class has the constructor and the methods of its namesake in mlir-aie's python/iron (generation C: 1.4.5 or newer),
with the checks that IRON itself makes. Options for what a plan cannot hold (packets, cascades, hand-written DMA
programs, ...) are refused, never ignored.
"""

from __future__ import annotations

from functools import lru_cache

from flownpu.aie.iron.access_pattern import TensorAccessPattern
from flownpu.aie.iron.fifo import ObjectFifo, ObjectFifoHandle
from flownpu.aie.iron.resolve import Program
from flownpu.aie.iron.runtime import Runtime
from flownpu.aie.iron.symbolic import range_
from flownpu.aie.iron.types import NPU1, NPU2, Tile, v8bfp16ebs8
from flownpu.aie.iron.worker import Buffer, Kernel, Worker, WorkerRuntimeBarrier

__all__ = [
    "NPU1", "NPU2", "Buffer", "Kernel", "ObjectFifo",
    "ObjectFifoHandle", "Program", "Runtime", "TensorAccessPattern", "Tile", "Worker",
    "WorkerRuntimeBarrier", "object_file", "range_", "shared", "v8bfp16ebs8",
]  # fmt: skip

# Decorates functions that make an array's workers and fifos: programs of the same array share them. There is room for
# the arrays of several models.
shared = lru_cache(maxsize=32)


def object_file(file: str) -> str:
    """The source `kernels/<file>.cc` of a kernel, as the argument of `Kernel`, which a build compiles."""
    return f"kernels/{file}.cc"

# SPDX-License-Identifier: Apache-2.0
"""The only source of IRON's names for designs.

By default these are the recorder's, the other files of this folder: a design gives a plan, on any machine. Each class
has the constructor and the methods of its namesake in mlir-aie's python/iron, with the checks that IRON itself makes.
Options for what a plan cannot hold (packets, cascades, hand-written DMA programs, ...) are refused, never ignored.

With the environment variable `FLOWNPU_IRON=mlir-aie` the names are the installed mlir-aie's, and the same design file
gives an MLIR module. mlir-aie's Python API changed three times in a year. Designs use generation C: layouts are
`TensorAccessPattern`s (`to_stream=`), transfers are methods of fifos' ends, `Program(device, runtime, workers=...)`.
Another generation is refused here, not somewhere inside a design.
"""

from __future__ import annotations

import inspect
import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any

__all__ = [
    "NPU1", "NPU2", "Buffer", "Kernel", "ObjectFifo",
    "ObjectFifoHandle", "Program", "Runtime", "TensorAccessPattern", "Tile", "Worker",
    "WorkerRuntimeBarrier", "object_file", "range_", "shared", "v8bfp16ebs8",
]  # fmt: skip

_CHOICE = os.environ.get("FLOWNPU_IRON", "recorder")
if _CHOICE not in {"recorder", "mlir-aie"}:
    raise ImportError(f"[FLOWNPU_IRON] expected recorder or mlir-aie, got {_CHOICE!r}")

if TYPE_CHECKING or _CHOICE == "recorder":
    from flownpu.aie.iron.access_pattern import TensorAccessPattern
    from flownpu.aie.iron.fifo import ObjectFifo, ObjectFifoHandle
    from flownpu.aie.iron.resolve import Program
    from flownpu.aie.iron.runtime import Runtime
    from flownpu.aie.iron.symbolic import range_
    from flownpu.aie.iron.types import NPU1, NPU2, Tile, v8bfp16ebs8
    from flownpu.aie.iron.worker import Buffer, Kernel, Worker, WorkerRuntimeBarrier

    # Decorates functions that make an array's workers and fifos: programs of the same array share them. There is room
    # for the arrays of several models.
    shared = lru_cache(maxsize=32)
else:

    def shared(function: Any) -> Any:
        """Return the function unchanged: with mlir-aie, every program makes its own workers and fifos."""
        return function

    try:
        from aie.helpers.taplib import TensorAccessPattern
        from aie.helpers.util import v8bfp16ebs8
        from aie.iron.controlflow import range_
        from aie.iron.dataflow import ObjectFifoHandle
        from aie.iron.device import NPU1, NPU2, Tile

        from aie.iron import (
            Buffer,
            Kernel,
            ObjectFifo,
            Program,
            Runtime,
            Worker,
            WorkerRuntimeBarrier,
        )
    except ImportError as error:
        raise ImportError(
            "[FLOWNPU_IRON] mlir-aie of generation C (1.4.5 or newer) is not installed: see its README for the wheel, "
            "or unset FLOWNPU_IRON to record plans without it"
        ) from error
    if "to_stream" not in inspect.signature(ObjectFifo.__init__).parameters:
        raise ImportError(
            "[FLOWNPU_IRON] expected mlir-aie of generation C (1.4.5 or newer, ObjectFifo(to_stream=...)), "
            "got an older one: upgrade it"
        )


def object_file(file: str) -> str:
    """The object file of a kernel's source `kernels/<file>.cc`, as the argument of `Kernel`.

    A plan names the source. mlir-aie links an object file that Peano has compiled before: a source has several entries,
    and IRON's `ExternalFunction` would compile and link the whole source for each of them.
    """
    return f"kernels/{file}.cc" if _CHOICE == "recorder" else f"{file}.o"

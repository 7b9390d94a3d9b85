# SPDX-License-Identifier: Apache-2.0
"""Helpers of all designs: types, kernels, run-time parameters, and tasks in a bounded window."""

from __future__ import annotations

import inspect
import struct
import types
from copy import copy
from typing import TYPE_CHECKING, Any, Protocol, get_args
from weakref import WeakKeyDictionary

import numpy as np
from ml_dtypes import bfloat16

from flownpu.aie.iron.compat import (
    NPU1,
    NPU2,
    Buffer,
    Kernel,
    TensorAccessPattern,
    Tile,
    Worker,
    WorkerRuntimeBarrier,
    object_file,
)
from flownpu.aie.iron.types import flatten
from flownpu.aie.plan.kernel_memory import stack_for
from flownpu.aie.plan.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flownpu.aie.plan.limits import Limits

BF16, F32, I32, U8 = bfloat16, np.float32, np.int32, np.uint8
# Words of a core's run-time parameters: what the attention kernels read (kernels/README.md), a cache line on the host.
PARAMETERS = 16
# A Q4NX block: 32 rows x 256 columns of a weight in 5 bits each.
BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_BYTES = 32, 256, 5120
# Compute tiles of a column, on both generations.
TILES = 4
# The source of each kernel, because IRON's own Kernel does not have it.
_SOURCES: WeakKeyDictionary[Kernel, str] = WeakKeyDictionary()


class _Task(Protocol):
    def await_(self) -> None: ...


def device(target: str) -> NPU1 | NPU2:
    """IRON's device for a target, with all its columns."""
    return NPU1() if target == "npu1" else NPU2()


def limits_of(target: str) -> Limits:
    """The limits of a target.

    Raises:
        ValueError: no such target.
    """
    if target not in LIMITS:
        raise ValueError(f"[design] expected a target of {', '.join(LIMITS)}, got {target!r}")
    return LIMITS[target]


def tensor(elements: int, dtype: Any = BF16) -> Any:
    """The type of a one-dimensional array of `elements` elements."""
    return types.GenericAlias(np.ndarray, ((elements,), types.GenericAlias(np.dtype, (dtype,))))


def bytes_of(kind: Any) -> int:
    """Bytes of an array of a type that `tensor` made."""
    (elements,), dtype = get_args(kind)
    return int(elements * np.dtype(get_args(dtype)[0]).itemsize)


def kernel(file: str, entry: str, *arguments: Any) -> Kernel:
    """The kernel `entry` of `kernels/<file>.cc`; `arguments`: their types."""
    made = Kernel(entry, object_file(file), list(arguments))
    _SOURCES[made] = file
    return made


def worker(core: Callable[..., None], arguments: Sequence[Any], tile: Tile) -> Worker:
    """A compute tile's program, whose loops may take their lengths from run-time parameters.

    Its stack is the largest that a kernel among its arguments needs.
    """
    stack = stack_for(_SOURCES[part] for part in flatten(arguments) if isinstance(part, Kernel))
    return Worker(core, list(arguments), tile=tile, stack_size=stack, dynamic_objfifo_lowering=True)


def named(sequence: Callable[..., None], names: Sequence[str]) -> Callable[..., None]:
    """Give a sequence's function these names of arguments, which become the names of a plan's host buffers."""
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names]
    setattr(sequence, "__signature__", inspect.Signature(parameters))  # noqa: B010 (functions have no such attribute)
    return sequence


def bits(value: float) -> int:
    """A float as the run-time parameter that carries it: its 32 bits as an int32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def ceil_div(value: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-value // divisor)


def tiled(rows: int, columns: int) -> TensorAccessPattern:
    """The walk that sends a row-major matrix as 8 x 8 sub-tiles."""
    return TensorAccessPattern([rows, columns], 0, [rows // 8, columns // 8, 8, 8], [8 * columns, 8, columns, 1])


def untiled(rows: int, columns: int) -> TensorAccessPattern:
    """The walk that sends a matrix of 8 x 8 sub-tiles row by row."""
    return TensorAccessPattern([rows, columns], 0, [rows // 8, 8, columns // 8, 8], [8 * columns, 8, 64, 1])


def run(size: int, offset: int, count: int) -> TensorAccessPattern:
    """The walk over elements offset .. offset + count of a vector of `size` elements."""
    return TensorAccessPattern([size], offset, [count], [1])


def pieces(elements: int, item_bytes: int, *, most: int = (1 << LIMITS["npu2"].shim.wrap_bits) - 1) -> tuple[int, int]:
    """Cut a contiguous run into equal pieces, for a walk that has other dimensions, too: (pieces, elements of each).

    A piece has at most `most` 32-bit words: the default is what the innermost wrap of a shim tile holds.

    Raises:
        ValueError: the run cannot be cut so: it is no multiple of words.
    """
    size, word = elements * item_bytes, LIMITS["npu2"].granule_bytes
    for count in range(1, size // word + 1):
        if size % (count * word) == 0 and size // (count * word) <= most:
            return count, elements // count
    raise ValueError(f"[design] expected a run of whole words, got {elements} elements of {item_bytes} bytes")


def equal_steps(starts: Sequence[int], step: int, most: int) -> list[tuple[int, int]]:
    """Group starts that are `step` apart into runs (first start, count), none longer than `most`."""
    runs: list[tuple[int, int]] = []
    for start in starts:
        if runs and runs[-1][0] + runs[-1][1] * step == start and runs[-1][1] < most:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((start, 1))
    return runs


class RunTimeParameters:
    """One buffer of words for each core, and the barrier at which all of them wait for the sequence.

    A core releases the barrier right after passing it. The sequence may set the barrier again once the pass's outputs
    have been awaited, and a later release would undo the new start.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.buffers = [
            Buffer(tensor(PARAMETERS, I32), name=f"{name}_parameters", use_write_rtp=True) for name in names
        ]
        self.barrier = WorkerRuntimeBarrier()
        self._written: dict[tuple[int, int], int] = {}

    def of_a_sequence(self) -> RunTimeParameters:
        """The same buffers and barrier for another sequence, at whose start no word's value is known."""
        same = copy(self)
        same._written = {}
        return same

    def write(self, core: int, words: Sequence[int | None], *, moving: int = 0) -> None:
        """In a sequence: write a core's first words, except None and those that hold their value already.

        The first `moving` words, which change with the position, are always written. If equal ones were left out, the
        steps of two positions would differ in more than numbers (programs/call_family.py).
        """
        for index, value in enumerate(words):
            if value is not None and (index < moving or self._written.get((core, index)) != value):
                self._written[core, index] = value
                self.buffers[core][index] = value

    def start(self) -> None:
        """In a sequence: let every core make one pass with what was written."""
        self.barrier.set(1)


class Window:
    """Tasks of one channel, at most as many at once as its queue holds: then the oldest is awaited first."""

    def __init__(self) -> None:
        self._tasks = list[_Task]()

    def add(self, start: Callable[..., _Task], buffer: Any, tap: TensorAccessPattern) -> None:
        """Start one more: `start` is the `fill` or `drain` of a fifo's end."""
        if len(self._tasks) == LIMITS["npu2"].task_queue:
            self._tasks.pop(0).await_()
        self._tasks.append(start(buffer, tap=tap, wait=True, managed=False))

    def finish(self) -> None:
        """Await the tasks that are left."""
        for task in self._tasks:
            task.await_()
        self._tasks.clear()

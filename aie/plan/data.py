# SPDX-License-Identifier: Apache-2.0
"""The plan: an NPU program as data.

A plan has two halves. The `Array` is the content of an xclbin: tiles, fifos, buffers, kernels and core programs. The
`Sequence` is sent for one call: the transfers between host buffers and fifos, in order, and the run-time parameters.
One array serves many sequences; that is how shapes change without compiling again.

Everything is a frozen dataclass of plain values, and compares by value.
Sizes, strides and offsets count elements, outermost dimension first, as in IRON; places are (column, row).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "i8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "i16": np.dtype(np.int16),
    "u16": np.dtype(np.uint16),
    "i32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "bfp16ebs8": np.dtype("V9"),  # one element: 8 values and the exponent they share
}


# --- The array ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Tile:
    """A place in the array; row 0 has the shim tiles, row 1 the memory tiles, the others the compute tiles."""

    column: int
    row: int

    def __str__(self) -> str:
        return f"({self.column}, {self.row})"


@dataclass(frozen=True)
class Type:
    """An array of numbers; a scalar has the shape (). `dtype` is one of `DTYPES`."""

    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def elements(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return DTYPES[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return self.elements * self.item_bytes

    def __str__(self) -> str:
        return "x".join([*map(str, self.shape), self.dtype])


@dataclass(frozen=True)
class Dimension:
    """One dimension of a DMA's walk: `size` steps of `stride` elements."""

    size: int
    stride: int


@dataclass(frozen=True)
class End:
    """One end of a fifo: the tile, how many objects it holds there, and the walk its DMA does over each object.

    An empty `walk` is linear. At a link, the walk is over one part (see `Link`).
    """

    tile: Tile
    depth: int
    walk: tuple[Dimension, ...] = ()


@dataclass(frozen=True)
class Fifo:
    """An object fifo: objects of `type` go from `producer` to every one of `consumers` in order."""

    name: str
    type: Type
    producer: End
    consumers: tuple[End, ...]


@dataclass(frozen=True)
class Link:
    """Joins fifos on a tile without a core: forward (1 to 1), split (1 to many) or join (many to 1).

    `offsets` say where each part begins in the whole object, in elements; () for forward.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    offsets: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """Return "split", "join" or "forward"."""
        if len(self.outputs) > 1:
            return "split"
        return "join" if len(self.inputs) > 1 else "forward"


@dataclass(frozen=True)
class TileBuffer:
    """Memory of a tile that belongs to no fifo. `run_time_parameter`: the sequence writes it (32-bit words)."""

    name: str
    tile: Tile
    type: Type
    run_time_parameter: bool = False
    initial_value: tuple[float, ...] = ()


@dataclass(frozen=True)
class Barrier:
    """A lock on which a core waits for the sequence; it begins at 0."""

    name: str
    tile: Tile


@dataclass(frozen=True)
class Kernel:
    """An entry point in C++: its arguments' types (a shape of () is a scalar) and its source file."""

    entry: str
    arguments: tuple[Type, ...]
    source: str


# --- A core's program: what the compiler sees, loops not unrolled --------------------------------------------------


@dataclass(frozen=True)
class Variable:
    """A loop's index, or the value that `Load` read."""

    name: str


@dataclass(frozen=True)
class Operation:
    """Integer arithmetic; `operator` is one of + - * // %."""

    operator: str
    left: Expression
    right: Expression


Expression: TypeAlias = int | Variable | Operation


@dataclass(frozen=True)
class Loop:
    """`for variable in range(start, stop, step)`."""

    variable: str
    start: Expression
    stop: Expression
    step: Expression
    body: tuple[Statement, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.variable, self.start, self.stop, self.step, self.body))

    def __hash__(self) -> int:
        """Computed once from all fields, because caches of results about programs have loops as keys."""
        return self._hash


@dataclass(frozen=True)
class Acquire:
    """Hold `count` objects of a fifo in all, waiting for missing ones; `name` is the view of them."""

    name: str
    fifo: str
    port: str  # "produce" or "consume"
    count: int


@dataclass(frozen=True)
class Release:
    """Hand the oldest `count` held objects on (produce) or back (consume)."""

    fifo: str
    port: str
    count: int


@dataclass(frozen=True)
class Element:
    """An object of an acquired view, as an argument."""

    view: str
    index: int


@dataclass(frozen=True)
class BufferArgument:
    """A buffer as an argument."""

    buffer: str


@dataclass(frozen=True)
class Call:
    """Call a kernel."""

    kernel: str
    arguments: tuple[Element | BufferArgument | Expression, ...]


@dataclass(frozen=True)
class Load:
    """`variable = buffer[index]`, integers only: a core's way to read a run-time parameter."""

    variable: str
    buffer: str
    index: Expression


@dataclass(frozen=True)
class Store:
    """`buffer[index] = value`, integers only."""

    buffer: str
    index: Expression
    value: Expression


@dataclass(frozen=True)
class BarrierWait:
    """Wait until the barrier is exactly `value`; the wait leaves the value as it is."""

    barrier: str
    value: int


@dataclass(frozen=True)
class BarrierRelease:
    """Add `value` to the barrier, so that the next wait is for the sequence's next `SetBarrier`."""

    barrier: str
    value: int


Statement: TypeAlias = Loop | Acquire | Release | Call | Load | Store | BarrierWait | BarrierRelease


def statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Every statement of a body, those in loops too."""
    for statement in body:
        yield statement
        if isinstance(statement, Loop):
            yield from statements(statement.body)


@dataclass(frozen=True)
class Core:
    """The program of a compute tile, which starts over when it ends, and so serves several calls.

    `dynamic`: the core counts at run time which object of a fifo comes next. Otherwise the compiler unrolls every loop
    with acquires until the count is known, which it cannot do for a loop whose length is a run-time parameter.
    """

    tile: Tile
    body: tuple[Statement, ...]
    stack_bytes: int = 1024
    dynamic: bool = False

    @cached_property
    def statements(self) -> tuple[Statement, ...]:
        """Every statement of the body, those in loops too."""
        return tuple(statements(self.body))

    @cached_property
    def _hash(self) -> int:
        return hash((self.tile, self.body, self.stack_bytes, self.dynamic))

    def __hash__(self) -> int:
        """Computed once from all fields, like `Loop`'s."""
        return self._hash


@dataclass(frozen=True)
class Array:
    """The compiled part of a plan: everything but the sequence."""

    target: str
    fifos: tuple[Fifo, ...]
    links: tuple[Link, ...]
    buffers: tuple[TileBuffer, ...]
    barriers: tuple[Barrier, ...]
    kernels: tuple[Kernel, ...]
    cores: tuple[Core, ...]

    @cached_property
    def _hash(self) -> int:
        places = self.fifos, self.links, self.buffers, self.barriers
        return hash((self.target, *places, self.kernels, self.cores))

    def __hash__(self) -> int:
        """Computed once from all fields, like `Loop`'s, because many programs share an array."""
        return self._hash


# --- The sequence ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostBuffer:
    """An argument of the call: a buffer in main memory."""

    name: str
    type: Type


@dataclass(frozen=True)
class Tap:
    """The elements of a host buffer in order; at most 4 dimensions, the outermost is the DMA's iteration."""

    offset: int
    walk: tuple[Dimension, ...]

    @property
    def elements(self) -> int:
        """How many elements are moved."""
        return math.prod(dimension.size for dimension in self.walk)

    @property
    def last(self) -> int:
        """The highest element index that is touched."""
        return self.offset + sum((dimension.size - 1) * dimension.stride for dimension in self.walk)


@dataclass(frozen=True)
class Transfer:
    """Start a DMA task: a fill (host to fifo) where the shim produces the fifo, a drain where it consumes it.

    `token`: the task reports its end, so that it can be awaited.
    """

    name: str
    fifo: str
    buffer: str
    tap: Tap
    token: bool


@dataclass(frozen=True)
class Await:
    """Wait for the end of a transfer that has a token; then its buffer descriptor is free again."""

    transfer: str


@dataclass(frozen=True)
class Free:
    """Release a transfer's buffer descriptor without waiting; only if the transfer is known to be complete."""

    transfer: str


@dataclass(frozen=True)
class WriteParameter:
    """`buffer[index] = value`, a 32-bit word, into a tile's memory."""

    buffer: str
    index: int
    value: int


@dataclass(frozen=True)
class SetBarrier:
    """Set a barrier to `value`."""

    barrier: str
    value: int


Step: TypeAlias = Transfer | Await | Free | WriteParameter | SetBarrier


@dataclass(frozen=True)
class Sequence:
    """The steps of one call, in order; `name` distinguishes it from others over the same array."""

    name: str
    buffers: tuple[HostBuffer, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Plan:
    """A program for the NPU."""

    name: str
    array: Array
    sequence: Sequence

# SPDX-License-Identifier: Apache-2.0
"""The shape that operators on rows share: a stream of items through one compute tile in each of a few columns.

Item i goes to core i mod `cores`. A core has two streams in and two out, as many as a compute tile has channels.
An operand may also be broadcast to all cores once a call (a norm's weight). A core without items is not started, unless
it must take a broadcast. Such a core may still be busy with it when the next call begins, so a call awaits its
broadcasts before it writes parameters: by then every core has released the broadcasts of the call before, and so has
read that call's parameters.

Run-time parameters of a core: word 0, its number of items; those of the operator follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.aie.designs.common import (
    BF16,
    RunTimeParameters,
    Window,
    device,
    limits_of,
    named,
    pieces,
    run,
    tensor,
    worker,
)
from flownpu.aie.iron.compat import ObjectFifo, Program, Runtime, TensorAccessPattern, Tile
from flownpu.aie.plan.limits import LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flownpu.aie.iron.compat import Kernel


@dataclass(frozen=True)
class Operand:
    """A host buffer and its way through the array.

    Attributes:
        name: the name of its fifos; different for each operand.
        size: elements of an object.
        dtype: the elements' type.
        host: elements of the host buffer.
        taps: gives the tasks that move a range of items; None where all of the buffer goes to every core.
        depth: objects in the memory of a core.
        ahead_of: the operand whose streams carry the buffer, before that operand's items; "" for streams of its own.
    """

    name: str
    size: int
    dtype: Any
    host: int
    taps: Callable[[range], list[TensorAccessPattern]] | None
    depth: int = 2
    ahead_of: str = ""

    @property
    def shared(self) -> bool:
        """Whether all cores take it from one stream."""
        return self.taps is None and not self.ahead_of


def each(
    name: str,
    count: int,
    size: int,
    *,
    dtype: Any = BF16,
    objects: int = 1,
    depth: int = 2,
    line: int = 0,
) -> Operand:
    """An operand of `count` items, each of them `objects` objects of `size` elements.

    `line`: elements from one item to the next in the host buffer, if they are more than an item's.

    Raises:
        ValueError: a line is shorter than an item.
    """
    item, item_bytes = objects * size, np.dtype(dtype).itemsize
    line = line or item
    if line < item:
        raise ValueError(f"[design] expected lines of an item of {name}, {item}, or more, got {line}")
    # In two pieces or more, items are the third dimension, which has no wrap register, so their number is not bounded.
    shim, granule = LIMITS["npu2"].shim, LIMITS["npu2"].granule_bytes
    cuts, piece = pieces(item, item_bytes, most=min((1 << shim.wrap_bits) - 1, item * item_bytes // granule // 2))

    def taps(items: range) -> list[TensorAccessPattern]:
        sizes, strides = [len(items), cuts, piece], [items.step * line, piece, 1]
        return [TensorAccessPattern([count * line], items.start * line, sizes, strides)]

    return Operand(name, size, dtype, count * line, taps, depth)


def once(name: str, size: int) -> Operand:
    """An object of `size` elements, bf16, that every core gets once a call."""
    return Operand(name, size, BF16, size, None, depth=1)


def ahead(name: str, size: int, operand: str, *, objects: int = 1) -> Operand:
    """`objects` objects of `size` elements, bf16, for every core, on the stream of another operand before its items."""
    return Operand(name, size, BF16, objects * size, None, ahead_of=operand)


def stream(
    target: str,
    cores: int,
    count: int,
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    body: Callable[..., None],
    kernels: Sequence[Kernel],
    words: Sequence[int] = (),
    state: Callable[[int], Sequence[Any]] = lambda _: (),
) -> Program:
    """The program: host buffers are the inputs, then the outputs.

    Args:
        target: npu1 or npu2.
        cores: compute tiles, at most the target's columns.
        count: items.
        inputs: at most two with streams of their own.
        outputs: at most two.
        body: a core's pass; gets its ends of the streams in and out, the kernels, its state, and its parameters.
        kernels: what the body calls.
        words: run-time parameters from word 1 on.
        state: gives the buffers of a core.

    Raises:
        ValueError: no core or more cores than columns, or no item.
    """
    columns = limits_of(target).columns
    if not 1 <= cores <= columns or count < 1:
        raise ValueError(f"[design] expected 1..{columns} cores on {target} and an item or more, got {cores}, {count}")
    parameters = [RunTimeParameters([f"core_{core}"]) for core in range(cores)]
    operands = [*inputs, *outputs]
    streams = [operand for operand in operands if not operand.ahead_of]
    fifos = {operand.name: _fifos(operand, cores) for operand in streams}

    def core_function(barrier: Any, rtp: Any, *arguments: Any) -> None:
        barrier.wait_for_value(1)
        barrier.release_with_value(1)
        body(*arguments, rtp)

    workers = []
    for core in range(cores):
        own = [(operand in inputs, fifos[operand.name][0 if operand.shared else core]) for operand in streams]
        places = [fifo.cons() if into else fifo.prod() for into, fifo in own]
        arguments = [parameters[core].barrier, *parameters[core].buffers, *places, *kernels, *state(core)]
        workers.append(worker(core_function, arguments, tile=Tile(core, limits_of(target).first_compute_row)))

    def sequence(*arguments: Any) -> None:
        *buffers, ends = arguments
        starts = {
            (operand.name, core): end.fill if operand in inputs else end.drain
            for operand, of_cores in zip(streams, ends, strict=True)
            for core, end in enumerate(of_cores)
        }
        shared = [pair for pair in zip(operands, buffers, strict=True) if pair[0].shared]
        loaded = [
            starts[operand.name, 0](buffer, tap=run(operand.host, 0, operand.host), wait=True, managed=False)
            for operand, buffer in shared
        ]
        for task in loaded:
            task.await_()
        for core in range(cores if shared else min(cores, count)):
            parameters[core].write(0, [len(range(core, count, cores)), *words])
            parameters[core].start()
        # Outputs first: an input may have more tasks than a channel queues, and then its first tasks are awaited before
        # its last is started. Data ahead of an operand starts before the operand.
        tasks = dict[tuple[str, int], list[tuple[Any, TensorAccessPattern]]]()
        own = [pair for pair in zip(operands, buffers, strict=True) if not pair[0].shared]
        for operand, buffer in sorted(own, key=lambda pair: (pair[0] in inputs, not pair[0].ahead_of)):
            for core in range(min(cores, count)):
                taps = operand.taps(range(core, count, cores)) if operand.taps else [run(operand.host, 0, operand.host)]
                tasks.setdefault((operand.ahead_of or operand.name, core), []).extend((buffer, tap) for tap in taps)
        windows = {place: Window() for place in tasks}
        for turn in range(max(map(len, tasks.values()))):
            for place, of_fifo in tasks.items():
                if turn < len(of_fifo):
                    windows[place].add(starts[place], *of_fifo[turn])
        for window in windows.values():
            window.finish()

    ends = [
        [
            fifo.prod(tile=Tile(core, 0)) if operand in inputs else fifo.cons(tile=Tile(core, 0))
            for core, fifo in enumerate(fifos[operand.name])
        ]
        for operand in streams
    ]
    types = [tensor(operand.host, operand.dtype) for operand in operands]
    names = [*(operand.name for operand in operands), "ends"]
    return Program(device(target), Runtime(named(sequence, names), [*types, ends]), workers)


def _fifos(operand: Operand, cores: int) -> list[ObjectFifo]:
    """The operand's fifos: one for each core, or one for all cores."""
    names = [operand.name] if operand.shared else [f"{operand.name}_{core}" for core in range(cores)]
    return [ObjectFifo(tensor(operand.size, operand.dtype), name=name, depth=operand.depth) for name in names]

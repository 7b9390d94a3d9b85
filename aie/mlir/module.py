# SPDX-License-Identifier: Apache-2.0
"""Prints a plan as MLIR of the AIE dialects: what `aiecc` compiles without IRON's Python.

The forms are those of mlir_aie 1.4.5 (`DIALECT`), read in its public tests: an acquire's results are the objects, the
values of locks and run-time parameters are operands, and a descriptor lists its sizes and strides. Each operation is
printed in its own syntax: the generic form names the groups of optional operands too, which change from one version to
the next. Fifos, links, cores and kernel calls are printed one to one; the rest as the passes want it:

- All memrefs have one dimension, as IRON hands objects to kernels, and block floats are bytes (9 for 8 values).
- Depths are printed for every end, so that the compiler takes them as they are.
- A transfer is a DMA task: its repetitions are its `repeat_count`, its length is that of one of them, and a run of
  neighbours has no dimensions.
- A barrier is a lock of the tile; a core's program is an `scf.for` without end around its statements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.aie.check.sequence import contiguous, descriptor, iteration_stride
from flownpu.aie.mlir.core import CorePrinter
from flownpu.aie.mlir.text import Lines, attributes, dimensions, memref, scalar, sizes_and_strides, units
from flownpu.aie.plan.data import Await, Free, SetBarrier, Transfer, WriteParameter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flownpu.aie.plan.data import Array, Fifo, Kernel, Link, Plan, Sequence, Tile, TileBuffer

DIALECT = (1, 4, 5)
"""The first release of mlir_aie that takes the printed forms."""


def to_mlir(plan: Plan, *others: Plan) -> str:
    """The module's text; the plans must be valid (`check.require_valid`).

    Args:
        plan: a plan.
        others: more plans of the same array, whose sequences have other names.
    """
    return _Module(plan.array, [each.sequence for each in (plan, *others)]).text()


class _Module:
    def __init__(self, array: Array, sequences: Iterable[Sequence]) -> None:
        self.array, self.sequences = array, sequences
        self.lines = Lines()
        self.tiles: dict[Tile, str] = {}
        self.buffers: dict[str, tuple[str, str]] = {}  # name: its value, its type
        self.locks: dict[str, str] = {}

    def text(self) -> str:
        array, lines = self.array, self.lines
        lines.add("module {")
        with lines.inside():
            lines.add(f"aie.device({array.target}) {{")
            with lines.inside():
                for kernel in array.kernels:
                    self._kernel(kernel)
                for tile in sorted(_tiles(array)):
                    self._tile(tile)
                for buffer in array.buffers:
                    self._buffer(buffer)
                for barrier in array.barriers:
                    value = self.locks[barrier.name] = lines.result("lock")
                    named = {"init": "0 : i32", "sym_name": f'"{barrier.name}"'}
                    lines.add(f"{value} = aie.lock({self.tiles[barrier.tile]}){attributes(named)}")
                for fifo in array.fifos:
                    self._fifo(fifo)
                for link in array.links:
                    self._link(link)
                for core in array.cores:
                    CorePrinter(array, core, lines, self.tiles[core.tile], self.buffers, self.locks).print()
                for sequence in self.sequences:
                    self._sequence(sequence)
            lines.add("}")
        lines.add("}")
        return lines.text()

    def _kernel(self, kernel: Kernel) -> None:
        types = ", ".join(memref(kind) if kind.shape else scalar(kind) for kind in kernel.arguments)
        objects = kernel.source.rpartition("/")[2].rpartition(".")[0] + ".o"
        self.lines.add(f'func.func private @{kernel.entry}({types}) attributes {{link_with = "{objects}"}}')

    def _tile(self, tile: Tile) -> None:
        value = self.tiles[tile] = f"%tile_{tile.column}_{tile.row}"
        self.lines.add(f"{value} = aie.tile({tile.column}, {tile.row})")

    def _buffer(self, buffer: TileBuffer) -> None:
        value, kind = self.lines.result("buffer"), memref(buffer.type)
        self.buffers[buffer.name] = value, kind
        values = ", ".join(str(v) for v in buffer.initial_value)
        initial = f" = dense<[{values}]>" if values else ""
        named = attributes({"sym_name": f'"{buffer.name}"'})
        self.lines.add(f"{value} = aie.buffer({self.tiles[buffer.tile]}){named} : {kind}{initial}")

    def _fifo(self, fifo: Fifo) -> None:
        ends = (fifo.producer, *fifo.consumers)
        source = self.tiles[fifo.producer.tile] + dimensions("dimensionsToStream", fifo.producer.walk, fifo.type)
        targets = ", ".join(
            self.tiles[end.tile] + dimensions("dimensionsFromStream", end.walk, fifo.type) for end in fifo.consumers
        )
        depths = ", ".join(f"{end.depth} : i32" for end in ends)
        kind = f"!aie.objectfifo<{memref(fifo.type)}>"
        self.lines.add(f"aie.objectfifo @{fifo.name}({source}, {{{targets}}}, [{depths}]) : {kind}")

    def _link(self, link: Link) -> None:
        offsets = f"[{', '.join(map(str, link.offsets))}]"
        source, target = ("[]", offsets) if link.kind == "split" else (offsets, "[]")
        inputs, outputs = (", ".join(f"@{name}" for name in names) for names in (link.inputs, link.outputs))
        self.lines.add(f"aie.objectfifo.link [{inputs}] -> [{outputs}]({source} {target})")

    # --- The sequence -------------------------------------------------------------------------------------------------

    def _sequence(self, sequence: Sequence) -> None:
        lines = self.lines
        arguments = {
            buffer.name: (f"%arg{place}", memref(buffer.type)) for place, buffer in enumerate(sequence.buffers)
        }
        listed = ", ".join(f"{value}: {kind}" for value, kind in arguments.values())
        lines.add(f"aie.runtime_sequence @{sequence.name}({listed}) {{")
        with lines.inside():
            tasks: dict[str, str] = {}
            for step in sequence.steps:
                match step:
                    case Transfer():
                        tasks[step.name] = self._transfer(step, *arguments[step.buffer])
                    case Await():
                        lines.add(f"aiex.dma_await_task({tasks[step.transfer]})")
                    case Free():
                        lines.add(f"aiex.dma_free_task({tasks[step.transfer]})")
                    case WriteParameter():
                        value = lines.constant(step.value, "i32")
                        lines.add(f"aiex.npu.rtp_write(@{step.buffer}, {step.index}, {value}) : i32")
                    case SetBarrier():
                        lines.add(f"aiex.set_lock({self.locks[step.barrier]}, {step.value})")
        lines.add("}")

    def _transfer(self, step: Transfer, argument: str, kind: str) -> str:
        """Print a task and its start; return the name of its value."""
        lines, task = self.lines, self.lines.result("task")
        fifo = next(fifo for fifo in self.array.fifos if fifo.name == step.fifo)
        repeats, walk = descriptor(step.tap)
        layout = ""
        if repeats > 1 or not contiguous(walk):
            pairs = sizes_and_strides(walk, fifo.type)
            if repeats > 1:
                # The task's outermost dimension is its repetition, whatever the walk's inner dimensions.
                outer = (repeats, units(fifo.type) * iteration_stride(step.tap))
                pairs = [outer, *[(1, 0)] * (3 - len(walk)), *pairs]
            sizes, strides = (", ".join(map(str, column)) for column in zip(*pairs, strict=True))
            layout = f" sizes = [{sizes}] strides = [{strides}]"
        length = units(fifo.type) * (step.tap.elements // repeats)
        offset = units(fifo.type) * step.tap.offset
        lines.add(f"{task} = aiex.dma_configure_task_for @{fifo.name} {{")
        with lines.inside():
            lines.add(f"aie.dma_bd({argument} : {kind} offset = {offset} len = {length}{layout})")
            lines.add("aie.end")
        more = {"issue_token": "true"} if step.token else {}
        lines.add("}" + attributes(more | ({"repeat_count": f"{repeats - 1} : i32"} if repeats > 1 else {})))
        lines.add(f"aiex.dma_start_task({task})")
        return task


def _tiles(array: Array) -> set[Tile]:
    tiles = {end.tile for fifo in array.fifos for end in (fifo.producer, *fifo.consumers)}
    return tiles | {core.tile for core in array.cores} | {buffer.tile for buffer in array.buffers}

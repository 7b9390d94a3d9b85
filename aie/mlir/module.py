# SPDX-License-Identifier: Apache-2.0
"""Prints a plan as MLIR of the AIE dialects, in generic form: what `aiecc` compiles without IRON's Python.

The generic form depends on the operations' properties only, not on their custom syntax. The operations are those of
mlir-aie in 2026 (`aie.runtime_sequence`; in 2025 it was `aiex.runtime_sequence`). Fifos, links, cores and kernel calls
are printed one to one; the rest as the passes want it:

- All memrefs have one dimension, as IRON hands objects to kernels, and block floats are bytes (9 for 8 values).
- Depths are printed for every end, so that the compiler takes them as they are.
- A transfer is a DMA task: its repetitions are its `repeat_count`, its length is that of one of them, and a run of
  neighbours has no dimensions.
- A tile asks for its buffers one behind the other where, spread over banks, they would not fit or would leave no room
  for constants (plan/buffer_addresses.py).
- A barrier is a lock of the tile; a core's program that runs forever is an `scf.for` without end around its statements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.aie.check.sequence import contiguous, descriptor, iteration_stride
from flownpu.aie.mlir.core import CorePrinter
from flownpu.aie.mlir.text import Lines, attribute_list, dimensions, memref, scalar, units
from flownpu.aie.plan.buffer_addresses import placed_buffers
from flownpu.aie.plan.data import Await, Free, SetBarrier, Transfer, WriteParameter
from flownpu.aie.plan.limits import LIMITS

if TYPE_CHECKING:
    from flownpu.aie.plan.data import Array, Fifo, Kernel, Link, Plan, Tile, TileBuffer

__all__ = ["to_mlir"]

_DEVICES = {"npu1": 4, "npu2": 8}  # AIEDevice in mlir-aie's AIEAttrs.td: all columns
_STREAM_TO_MEMORY, _MEMORY_TO_STREAM = 0, 1  # DMAChannelDir


def to_mlir(plan: Plan) -> str:
    """The module's text; the plan must be valid (`check.require_valid`)."""
    return _Module(plan).text()


class _Module:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.array = plan, plan.array
        self.lines = Lines()
        self.tiles: dict[Tile, str] = {}
        self.buffers: dict[str, tuple[str, str]] = {}  # name: its value, its type
        self.locks: dict[str, str] = {}
        self.placed = placed_buffers(plan.array, LIMITS[plan.array.target])

    def text(self) -> str:
        array, lines = self.array, self.lines
        lines.add('"builtin.module"() ({')
        with lines.inside():
            lines.add(f'"aie.device"() <{{device = {_DEVICES[array.target]} : i32, sym_name = "main"}}> ({{')
            with lines.inside():
                for kernel in array.kernels:
                    self._kernel(kernel)
                for tile in sorted(_tiles(array)):
                    self._tile(tile)
                for buffer in array.buffers:
                    self._buffer(buffer)
                for barrier in array.barriers:
                    value = lines.result("lock")
                    self.locks[barrier.name] = value
                    properties = f'init = {barrier.initial_value} : i32, sym_name = "{barrier.name}"'
                    lines.add(f'{value} = "aie.lock"({self.tiles[barrier.tile]}) <{{{properties}}}> : (index) -> index')
                for fifo in array.fifos:
                    self._fifo(fifo)
                for link in array.links:
                    self._link(link)
                for core in array.cores:
                    CorePrinter(array, core, lines, self.tiles[core.tile], self.buffers, self.locks).print()
                self._sequence()
                lines.add('"aie.end"() : () -> ()')
            lines.add("}) : () -> ()")
        lines.add("}) : () -> ()")
        return lines.text()

    def _kernel(self, kernel: Kernel) -> None:
        types = ", ".join(memref(kind) if kind.shape else scalar(kind) for kind in kernel.arguments)
        name = f'function_type = ({types}) -> (), sym_name = "{kernel.entry}", sym_visibility = "private"'
        self.lines.add(f'"func.func"() <{{{name}}}> ({{')
        objects = kernel.source.rpartition("/")[2].rpartition(".")[0] + ".o"
        self.lines.add(f'}}) {{link_with = "{objects}"}} : () -> ()')

    def _tile(self, tile: Tile) -> None:
        value = f"%tile_{tile.column}_{tile.row}"
        self.tiles[tile] = value
        placed = self.placed.get(tile)
        scheme = f'allocation_scheme = "{placed.scheme}", ' if placed and placed.scheme else ""
        place = f"{scheme}col = {tile.column} : i32, row = {tile.row} : i32"
        self.lines.add(f'{value} = "aie.tile"() <{{{place}}}> : () -> index')

    def _buffer(self, buffer: TileBuffer) -> None:
        value, kind = self.lines.result("buffer"), memref(buffer.type)
        self.buffers[buffer.name] = value, kind
        initial = ""
        if buffer.initial_value:
            values = ", ".join(str(v) for v in buffer.initial_value)
            initial = f"initial_value = dense<[{values}]> : {kind.replace('memref', 'tensor')}, "
        properties = f'{initial}sym_name = "{buffer.name}"'
        self.lines.add(f'{value} = "aie.buffer"({self.tiles[buffer.tile]}) <{{{properties}}}> : (index) -> {kind}')

    def _fifo(self, fifo: Fifo) -> None:
        ends = (fifo.producer, *fifo.consumers)
        walks = ", ".join(f"[{dimensions(end.walk, fifo.type)}]" for end in fifo.consumers)
        properties = {
            "dimensionsFromStreamPerConsumer": f"#aie<bd_dim_layout_array_array[{walks}]>",
            "dimensionsToStream": f"#aie<bd_dim_layout_array[{dimensions(fifo.producer.walk, fifo.type)}]>",
            "disable_synchronization": "false",
            "elemNumber": attribute_list(f"{end.depth} : i32" for end in ends),
            "elemType": f"!aie.objectfifo<{memref(fifo.type)}>",
            "plio": "false",
            "sym_name": f'"{fifo.name}"',
            "via_DMA": "true" if fifo.via_dma else "false",
        }
        if fifo.padding:
            pads = [f"<const_pad_before = {before}, const_pad_after = {after}>" for before, after in fifo.padding]
            properties["padDimensions"] = f"#aie<bd_pad_layout_array[{', '.join(pads)}]>"
        if fifo.repeat_count > 1:
            properties["repeat_count"] = f"{fifo.repeat_count} : i32"
        tiles = ", ".join(self.tiles[end.tile] for end in ends)
        types = ", ".join(["index"] * len(ends))
        text = ", ".join(f"{name} = {value}" for name, value in sorted(properties.items()))
        self.lines.add(f'"aie.objectfifo"({tiles}) <{{{text}}}> : ({types}) -> ()')
        if fifo.delegate is not None:
            name = f"objFifo_name = @{fifo.name}"
            self.lines.add(f'"aie.objectfifo.allocate"({self.tiles[fifo.delegate]}) <{{{name}}}> : (index) -> ()')

    def _link(self, link: Link) -> None:
        offsets = attribute_list(str(offset) for offset in link.offsets)
        source, target = ("[]", offsets) if link.kind == "split" else (offsets, "[]")
        inputs, outputs = (attribute_list(f"@{name}" for name in names) for names in (link.inputs, link.outputs))
        properties = f"dst_offsets = {target}, fifoIns = {inputs}, fifoOuts = {outputs}, src_offsets = {source}"
        self.lines.add(f'"aie.objectfifo.link"() <{{{properties}}}> : () -> ()')

    # --- The sequence -------------------------------------------------------------------------------------------------

    def _sequence(self) -> None:
        sequence, lines = self.plan.sequence, self.lines
        arguments = {
            buffer.name: (f"%arg{place}", memref(buffer.type)) for place, buffer in enumerate(sequence.buffers)
        }
        lines.add(f'"aie.runtime_sequence"() <{{sym_name = "{sequence.name}"}}> ({{')
        with lines.inside():
            lines.add(f"^bb0({', '.join(f'{value}: {kind}' for value, kind in arguments.values())}):")
            tasks: dict[str, str] = {}
            for step in sequence.steps:
                match step:
                    case Transfer():
                        tasks[step.name] = self._transfer(step, *arguments[step.buffer])
                    case Await():
                        lines.add(f'"aiex.dma_await_task"({tasks[step.transfer]}) : (index) -> ()')
                    case Free():
                        lines.add(f'"aiex.dma_free_task"({tasks[step.transfer]}) : (index) -> ()')
                    case WriteParameter():
                        value = step.value - (1 << 32) if step.value >= 1 << 31 else step.value
                        place = f"buffer = @{step.buffer}, index = {step.index} : ui32, value = {value} : i32"
                        lines.add(f'"aiex.npu.rtp_write"() <{{{place}}}> : () -> ()')
                    case SetBarrier():
                        lock = self.locks[step.barrier]
                        lines.add(f'"aiex.set_lock"({lock}) <{{value = {step.value} : i32}}> : (index) -> ()')
        lines.add("}) : () -> ()")

    def _transfer(self, step: Transfer, argument: str, kind: str) -> str:
        """Print a task and its start; return the name of its value."""
        lines, task = self.lines, self.lines.result("task")
        fifo = next(fifo for fifo in self.array.fifos if fifo.name == step.fifo)
        repeats, walk = descriptor(step.tap)
        token = "true" if step.token else "false"
        repeat = f", repeat_count = {repeats - 1} : i32" if repeats > 1 else ""
        lines.add(
            f'{task} = "aiex.dma_configure_task_for"() <{{alloc = @{fifo.name}, issue_token = {token}{repeat}}}> ({{'
        )
        with lines.inside():
            length = units(fifo.type) * (step.tap.elements // repeats)
            offset = units(fifo.type) * step.tap.offset
            layout = ""
            if repeats > 1 or not contiguous(walk):
                inner = dimensions(walk, fifo.type)
                # The task's outermost dimension is its repetition, whatever the walk has inside.
                missing = "<size = 1, stride = 0>, " * (3 - len(walk)) if repeats > 1 else ""
                outer = f"<size = {repeats}, stride = {units(fifo.type) * iteration_stride(step.tap)}>, "
                text = f"{outer if repeats > 1 else ''}{missing}{inner}"
                layout = f"dimensions = #aie<bd_dim_layout_array[{text}]>, "
            properties = f"burst_length = 0 : i32, {layout}len = {length} : i32, offset = {offset} : i32"
            lines.add(f'"aie.dma_bd"({argument}) <{{{properties}}}> : ({kind}) -> ()')
            lines.add('"aie.end"() : () -> ()')
        lines.add("}) : () -> index")
        lines.add(f'"aiex.dma_start_task"({task}) : (index) -> ()')
        return task


def _tiles(array: Array) -> set[Tile]:
    tiles = {end.tile for fifo in array.fifos for end in (fifo.producer, *fifo.consumers)}
    tiles |= {fifo.delegate for fifo in array.fifos if fifo.delegate is not None}
    return tiles | {core.tile for core in array.cores} | {buffer.tile for buffer in array.buffers}

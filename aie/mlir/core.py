# SPDX-License-Identifier: Apache-2.0
"""Prints a core's program: `scf` loops, acquires and releases, loads and calls."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from flownpu.aie.mlir.text import Lines, attributes, memref
from flownpu.aie.plan.data import (
    Acquire,
    BarrierRelease,
    BarrierWait,
    BufferArgument,
    Call,
    Element,
    Load,
    Loop,
    Operation,
    Release,
    Statement,
    Store,
    Variable,
)

if TYPE_CHECKING:
    from flownpu.aie.plan.data import Array, Core, Expression, Type

_PORTS = {"produce": "Produce", "consume": "Consume"}
_ACQUIRE, _RELEASE = "Acquire", "Release"  # LockAction: "wait for an equal value" and "add"
_OPERATIONS = {"+": "addi", "-": "subi", "*": "muli", "//": "floordivsi", "%": "remsi"}


class CorePrinter:
    """Prints one core; `buffers` (value, type) and `locks` have the SSA values of those of the array, by name."""

    def __init__(
        self,
        array: Array,
        core: Core,
        lines: Lines,
        tile: str,
        buffers: dict[str, tuple[str, str]],
        locks: dict[str, str],
    ) -> None:
        self.core, self.lines, self.tile = core, lines, tile
        self.buffers, self.locks = buffers, locks
        self.types: dict[str, Type] = {fifo.name: fifo.type for fifo in array.fifos}
        self.kernels = {kernel.entry: kernel for kernel in array.kernels}
        self.objects: dict[str, tuple[list[str], str]] = {}  # view: the values of its objects, the type of each
        self.variables: dict[str, str] = {}  # index values

    def print(self) -> None:
        """Add the core's lines."""
        lines, core = self.lines, self.core
        lines.add(f"{lines.result('core')} = aie.core({self.tile}) {{")
        with lines.inside():
            self._loop(Loop("pass", 0, sys.maxsize, 1, core.body))
            lines.add("aie.end")
        dynamic = {"dynamic_objfifo_lowering": "true"} if core.dynamic else {}
        lines.add("}" + attributes(dynamic | {"stack_size": f"{core.stack_bytes} : i32"}))

    def _body(self, body: tuple[Statement, ...]) -> None:
        for statement in body:
            match statement:
                case Loop():
                    self._loop(statement)
                case Acquire():
                    self._acquire(statement)
                case Release():
                    end = f"({_PORTS[statement.port]}, {statement.count})"
                    self.lines.add(f"aie.objectfifo.release @{statement.fifo}{end}")
                case Call():
                    self._call(statement)
                case Load():
                    self._load(statement)
                case Store():
                    self._store(statement)
                case BarrierWait():
                    self._lock(statement.barrier, _ACQUIRE, statement.value)
                case BarrierRelease():
                    self._lock(statement.barrier, _RELEASE, statement.value)

    def _loop(self, loop: Loop) -> None:
        start, stop, step = (self._index(bound) for bound in (loop.start, loop.stop, loop.step))
        variable = self.lines.result("i")
        self.lines.add(f"scf.for {variable} = {start} to {stop} step {step} {{")
        with self.lines.inside():
            self.variables[loop.variable] = variable
            self._body(loop.body)
        self.lines.add("}")

    def _acquire(self, statement: Acquire) -> None:
        kind = memref(self.types[statement.fifo])
        values = [self.lines.result("object") for _ in range(statement.count)]
        self.objects[statement.name] = values, kind
        end = f"@{statement.fifo}({_PORTS[statement.port]}, {statement.count})"
        types = ", ".join([kind] * statement.count)
        self.lines.add(f"{', '.join(values)} = aie.objectfifo.acquire {end} : {types}")

    def _lock(self, barrier: str, action: str, value: int) -> None:
        self.lines.add(f"aie.use_lock({self.locks[barrier]}, {action}, {self._integer(value)})")

    def _call(self, statement: Call) -> None:
        values, types = [], []
        for argument, kind in zip(statement.arguments, self.kernels[statement.kernel].arguments, strict=True):
            if isinstance(argument, Element):
                objects, element = self.objects[argument.view]
                values.append(objects[argument.index])
                types.append(element)
            elif isinstance(argument, BufferArgument):
                value, element = self.buffers[argument.buffer]
                values.append(value)
                types.append(element)
            else:
                values.append(self._integer(argument))
                types.append("i32")
            assert types[-1] == (memref(kind) if kind.shape else "i32")
        self.lines.add(f"func.call @{statement.kernel}({', '.join(values)}) : ({', '.join(types)}) -> ()")

    # --- Integers: `index` for loops, i32 in memory and for kernels --------------------------------------------------

    def _load(self, statement: Load) -> None:
        buffer, kind = self.buffers[statement.buffer]
        index = self._index(statement.index)
        word, value = self.lines.result("word"), self.lines.result("value")
        self.lines.add(f"{word} = memref.load {buffer}[{index}] : {kind}")
        self.lines.add(f"{value} = arith.index_cast {word} : i32 to index")
        self.variables[statement.variable] = value

    def _store(self, statement: Store) -> None:
        buffer, kind = self.buffers[statement.buffer]
        value, index = self._integer(statement.value), self._index(statement.index)
        self.lines.add(f"memref.store {value}, {buffer}[{index}] : {kind}")

    def _index(self, value: Expression) -> str:
        if isinstance(value, Variable):
            return self.variables[value.name]
        if isinstance(value, Operation):
            left, right = self._index(value.left), self._index(value.right)
            result = self.lines.result("n")
            self.lines.add(f"{result} = arith.{_OPERATIONS[value.operator]} {left}, {right} : index")
            return result
        return self.lines.constant(value, "index")

    def _integer(self, value: Expression) -> str:
        if isinstance(value, int):
            return self.lines.constant(value, "i32")
        index, result = self._index(value), self.lines.result("n")
        self.lines.add(f"{result} = arith.index_cast {index} : index to i32")
        return result

# SPDX-License-Identifier: Apache-2.0
"""Prints a core's program: `scf` loops, acquires and releases, loads and calls."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from flownpu.aie.mlir.text import Lines, memref
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

__all__ = ["CorePrinter"]

_PORTS = {"produce": 0, "consume": 1}
_ACQUIRE, _RELEASE = 0, 1  # LockAction: wait for a value that is equal, add
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
        self.views: dict[str, tuple[str, str]] = {}  # view: its value, the memref of an object
        self.variables: dict[str, str] = {}  # index values

    def print(self) -> None:
        """Add the core's lines."""
        lines, core = self.lines, self.core
        value = lines.result("core")
        dynamic = "dynamic_objfifo_lowering = true, " if core.dynamic else ""
        lines.add(f'{value} = "aie.core"({self.tile}) <{{{dynamic}stack_size = {core.stack_bytes} : i32}}> ({{')
        with lines.inside():
            if core.forever:
                self._loop(Loop("pass", 0, sys.maxsize, 1, core.body))
            else:
                self._body(core.body)
            lines.add('"aie.end"() : () -> ()')
        lines.add("}) : (index) -> index")

    def _body(self, body: tuple[Statement, ...]) -> None:
        for statement in body:
            match statement:
                case Loop():
                    self._loop(statement)
                case Acquire():
                    self._acquire(statement)
                case Release():
                    properties = self._end(statement.fifo, statement.port, statement.count)
                    self.lines.add(f'"aie.objectfifo.release"() <{{{properties}}}> : () -> ()')
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
        bounds = ", ".join(self._index(bound) for bound in (loop.start, loop.stop, loop.step))
        variable = self.lines.result("i")
        self.lines.add(f'"scf.for"({bounds}) ({{')
        with self.lines.inside():
            self.lines.add(f"^bb0({variable}: index):")
            self.variables[loop.variable] = variable
            self._body(loop.body)
            self.lines.add('"scf.yield"() : () -> ()')
        self.lines.add("}) : (index, index, index) -> ()")

    def _end(self, fifo: str, port: str, count: int) -> str:
        return f"objFifo_name = @{fifo}, port = {_PORTS[port]} : i32, size = {count} : i32"

    def _acquire(self, statement: Acquire) -> None:
        value, kind = self.lines.result("view"), memref(self.types[statement.fifo])
        self.views[statement.name] = value, kind
        properties = self._end(statement.fifo, statement.port, statement.count)
        subview = f"!aie.objectfifosubview<{kind}>"
        self.lines.add(f'{value} = "aie.objectfifo.acquire"() <{{{properties}}}> : () -> {subview}')

    def _lock(self, barrier: str, action: int, value: int) -> None:
        properties = f"action = {action} : i32, value = {value} : i32"
        self.lines.add(f'"aie.use_lock"({self.locks[barrier]}) <{{{properties}}}> : (index) -> ()')

    def _call(self, statement: Call) -> None:
        values, types = [], []
        for argument, kind in zip(statement.arguments, self.kernels[statement.kernel].arguments, strict=True):
            if isinstance(argument, Element):
                view, element = self.views[argument.view]
                value = self.lines.result("object")
                access = f'"aie.objectfifo.subview.access"({view}) <{{index = {argument.index} : i32}}>'
                self.lines.add(f"{value} = {access} : (!aie.objectfifosubview<{element}>) -> {element}")
                values.append(value)
                types.append(element)
            elif isinstance(argument, BufferArgument):
                value, element = self.buffers[argument.buffer]
                values.append(value)
                types.append(element)
            else:
                values.append(self._integer(argument, "i32"))
                types.append("i32")
            assert types[-1] == (memref(kind) if kind.shape else "i32")
        callee = f'"func.call"({", ".join(values)}) <{{callee = @{statement.kernel}}}>'
        self.lines.add(f"{callee} : ({', '.join(types)}) -> ()")

    # --- Integers: `index` for loops, i32 in memory and for kernels --------------------------------------------------

    def _load(self, statement: Load) -> None:
        buffer, kind = self.buffers[statement.buffer]
        word, value = self.lines.result("word"), self.lines.result("value")
        index = self._index(statement.index)
        self.lines.add(f'{word} = "memref.load"({buffer}, {index}) : ({kind}, index) -> i32')
        self.lines.add(f'{value} = "arith.index_cast"({word}) : (i32) -> index')
        self.variables[statement.variable] = value

    def _store(self, statement: Store) -> None:
        buffer, kind = self.buffers[statement.buffer]
        value, index = self._integer(statement.value, "i32"), self._index(statement.index)
        self.lines.add(f'"memref.store"({value}, {buffer}, {index}) : (i32, {kind}, index) -> ()')

    def _index(self, value: Expression) -> str:
        if isinstance(value, Variable):
            return self.variables[value.name]
        if isinstance(value, Operation):
            left, right = self._index(value.left), self._index(value.right)
            result, operation = self.lines.result("n"), _OPERATIONS[value.operator]
            flags = " <{overflowFlags = #arith.overflow<none>}>" if value.operator in "+-*" else ""
            self.lines.add(f'{result} = "arith.{operation}"({left}, {right}){flags} : (index, index) -> index')
            return result
        return self._constant(value, "index")

    def _integer(self, value: Expression, kind: str) -> str:
        if isinstance(value, int):
            return self._constant(value - (1 << 32) if value >= 1 << 31 else value, kind)
        result, index = self.lines.result("n"), self._index(value)
        self.lines.add(f'{result} = "arith.index_cast"({index}) : (index) -> {kind}')
        return result

    def _constant(self, value: int, kind: str) -> str:
        result = self.lines.result("c")
        self.lines.add(f'{result} = "arith.constant"() <{{value = {value} : {kind}}}> : () -> {kind}')
        return result

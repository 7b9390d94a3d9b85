# SPDX-License-Identifier: Apache-2.0
"""Pieces of MLIR's text: lines, types, layouts."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from flownpu.aie.plan.data import Dimension, Type

_ELEMENTS = {
    "bf16": "bf16",
    "f32": "f32",
    "i8": "i8",
    "u8": "i8",  # the dialects' integers have no sign
    "i16": "i16",
    "u16": "i16",
    "i32": "i32",
    "u32": "i32",
    "bfp16ebs8": "i8",
}
_BLOCK_BYTES = 9  # of bfp16ebs8: 8 mantissas and the exponent


class Lines:
    """Indented lines, and names for values."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0
        self._numbers = itertools.count()

    def add(self, line: str) -> None:
        """Add a line."""
        self._lines.append("  " * self._depth + line)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Indent the lines that are added inside by one level more."""
        self._depth += 1
        yield
        self._depth -= 1

    def result(self, stem: str) -> str:
        """A new value's name."""
        return f"%{stem}{next(self._numbers)}"

    def constant(self, value: int, kind: str) -> str:
        """A constant's value; words of 32 bits from 2^31 on are printed as negative numbers."""
        result = self.result("c")
        signed = value - (1 << 32) if kind == "i32" and value >= 1 << 31 else value
        self.add(f"{result} = arith.constant {signed} : {kind}")
        return result

    def text(self) -> str:
        """All lines."""
        return "\n".join(self._lines) + "\n"


def units(kind: Type) -> int:
    """Elements of the printed memref for one element of the plan's."""
    return _BLOCK_BYTES if kind.dtype == "bfp16ebs8" else 1


def memref(kind: Type) -> str:
    """The memref type of an array, in one dimension."""
    return f"memref<{kind.elements * units(kind)}x{_ELEMENTS[kind.dtype]}>"


def scalar(kind: Type) -> str:
    """The type of a number."""
    return _ELEMENTS[kind.dtype]


def sizes_and_strides(walk: Iterable[Dimension], kind: Type) -> list[tuple[int, int]]:
    """The (size, stride) of each dimension of a layout, outermost first, in elements of the printed memref."""
    scale, steps = units(kind), list(walk)
    pairs = [(step.size, step.stride * scale) for step in steps]
    if scale > 1 and pairs:
        pairs[-1:] = [(steps[-1].size, steps[-1].stride * scale), (scale, 1)]
        if steps[-1].stride == 1:  # neighbours
            pairs[-2:] = [(steps[-1].size * scale, 1)]
    return pairs


def dimensions(keyword: str, walk: Iterable[Dimension], kind: Type) -> str:
    """The layout of a fifo's end, with a space and its keyword before it; "" for one without a walk."""
    pairs = sizes_and_strides(walk, kind)
    text = ", ".join(f"<size = {size}, stride = {stride}>" for size, stride in pairs)
    return f" {keyword} [{text}]" if text else ""


def attributes(values: dict[str, str]) -> str:
    """A dictionary of attributes with a space before it, or nothing if there are none."""
    text = ", ".join(f"{name} = {value}" for name, value in values.items())
    return f" {{{text}}}" if text else ""

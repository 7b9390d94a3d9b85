# SPDX-License-Identifier: Apache-2.0
"""Programs: the host's work for a prompt, a token or an image, as data for one runner (ops/npu/run/).

A program is a list of **steps**: calls of arrays with views of buffers as their arguments, and operators that the host
computes between them. **Buffers** have a role:

    constant  weights and the like, which the host packs for the model and keeps for as long as a session lives
    cache     the keys and values of one conversation
    scratch   all else; programs of one model share those of a name, which are as large as the largest use of them
    host      scratch that is no argument of an array: it stays in the host's memory

Consecutive steps over one array are one **dispatch**, unless they would take too long together (dispatches.py), and so
are consecutive steps of the host. The host writes the rows of `given` before a run, and reads those of `made` after it.

In an index of artifacts (artifacts/index.py), which ops/npu/artifacts/program_record.h reads:

    text kind; attributes of the model (text key, list); tokens, fewest, context
    cache: bytes from layer to layer, position to position, KV head to KV head, a key to its value
    buffers: text name, role, bytes, line, one
    given, made: buffer, offset, bytes, columns, line
    dispatches: whether it is the host's (0, 1), steps: number of the call (among the arrays' or the host's), text
        label, offset, 0 or 1 + the buffer of choices, views (buffer, offset)

A view has as many bytes as the call's argument.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass
from enum import IntEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from flownpu.aie.designs.common import bits
from flownpu.aie.programs.call import HOST, ArtifactCall, HostCall

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from flownpu.aie.words.writer import WordWriter

BF16_BYTES = 2


class Role(IntEnum):
    """Who provides a buffer."""

    CONSTANT = 0
    CACHE = 1
    SCRATCH = 2
    HOST = 3


@dataclass(frozen=True)
class Buffer:
    """A buffer of a program.

    Attributes:
        name: what it is; for constants, what the host packs under this name.
        role: who provides it.
        bytes: its size.
        line: if the buffer is first filled with zeros and ones, the elements (bf16) from one 1 to the next; 0: zeros
            only.
        one: the first element that is 1.
    """

    name: str
    role: Role
    bytes: int
    line: int = 0
    one: int = 0


class View(NamedTuple):
    """A part of a buffer, from byte `offset` on."""

    buffer: str
    offset: int = 0


@dataclass(frozen=True)
class Rows:
    """Rows of bf16 that the host writes or reads.

    Attributes:
        view: where they begin.
        rows: how many.
        columns: elements of a row.
        line: elements from one row to the next.
    """

    view: View
    rows: int
    columns: int
    line: int

    @property
    def bytes(self) -> int:
        """The bytes from the first row's beginning to the last line's end."""
        return self.rows * self.line * BF16_BYTES


@dataclass(frozen=True)
class CacheLayout:
    """Strides of a KV cache in bytes: from layer to layer, position to position, head to head, a key to its value.

    The positions of a layer follow one another, each with all its heads. `int8_rows`: where the same keys and values
    begin in int8, in the same order (designs/decode_layer/shape.py); 0: there are none.
    """

    layer: int = 0
    position: int = 0
    head: int = 0
    value: int = 0
    int8_rows: int = 0


@dataclass(frozen=True)
class Step:
    """A call and its arguments.

    Attributes:
        call: a call of an array, or the host's.
        label: what it is for, in messages.
        views: its arguments.
        offset: tokens from the run's first one to the call's first one.
        apart: whether it begins a dispatch, also where the step before is over the same array.
        choices: of a call of experts, the buffer with their numbers (i32), which the words follow; "": of other calls.
    """

    call: ArtifactCall | HostCall
    label: str
    views: tuple[View, ...]
    offset: int = 0
    apart: bool = False
    choices: str = ""


@dataclass(frozen=True)
class Program:
    """The host's work for a chunk of a prompt, a token, or an image.

    Attributes:
        kind: decode, prefill, block (prefill of tokens that see one another), encode, or an operator's stem.
        attributes: the sizes of the model that it is for; a host refuses the program for any other model.
        tokens: how many it computes; for an encoder, patches.
        fewest: the fewest tokens for which it is worth its time (programs/chunks.py).
        context: positions of the cache; 0: it has none.
        cache: the layout of the cache.
        buffers: all that the steps use.
        given: what the host writes before a run.
        made: what the host reads after a run; None: nothing.
        steps: in order.

    Raises:
        ValueError: a buffer is there twice, or a step's view is not inside its buffer.
    """

    kind: str
    attributes: Mapping[str, tuple[int, ...]]
    tokens: int
    fewest: int
    context: int
    cache: CacheLayout
    buffers: tuple[Buffer, ...]
    given: Rows
    made: Rows | None
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        sizes = {buffer.name: buffer.bytes for buffer in self.buffers}
        if len(sizes) != len(self.buffers):
            raise ValueError(f"[program] expected each buffer of {self.kind} once, got {Counter(sizes)}")
        for step in self.steps:
            for (name, offset), argument in zip(step.views, step.call.buffers, strict=True):
                if name not in sizes or offset < 0 or offset + argument.type.bytes > sizes[name]:
                    raise ValueError(
                        f"[program] {step.label}: expected {argument.name} of {argument.type.bytes} bytes in a buffer, "
                        f"got byte {offset} of {name}, which has {sizes.get(name, 'no')} bytes"
                    )

    @property
    def dispatches(self) -> list[list[Step]]:
        """The steps that go to the device together: consecutive ones over one array, none of them `apart`."""
        found = list[list[Step]]()
        for step in self.steps:
            if step.apart or not found or found[-1][0].call.array != step.call.array:
                found.append([])
            found[-1].append(step)
        return found

    @property
    def arrays(self) -> list[str]:
        """The arrays in the order of their work; between two of them is a change of array."""
        names = (step.call.array for step in self.steps if step.call.array != HOST)
        return [name for name, _ in groupby(names)]

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.bytes for buffer in self.buffers)

    def record(self) -> dict[str, Any]:
        """The program's record in a manifest."""
        return {
            "kind": self.kind,
            "tokens": self.tokens,
            "context": self.context,
            "buffers": {buffer.name: buffer.bytes for buffer in self.buffers},
            "dispatches": [
                {"array": steps[0].call.array, "steps": [f"{step.call.name}: {step.label}" for step in steps]}
                for steps in self.dispatches
            ],
        }

    def write(self, words: WordWriter, numbers: Mapping[ArtifactCall | HostCall, int]) -> None:
        """Append the program to an index; `numbers`: the number that each call has there."""
        places = {buffer.name: number for number, buffer in enumerate(self.buffers)}
        words.text(self.kind)
        words.add(len(self.attributes))
        for key, values in self.attributes.items():
            words.text(key)
            words.list(values)
        words.add(self.tokens, self.fewest, self.context)
        words.add(*astuple(self.cache))
        words.add(len(self.buffers))
        for buffer in self.buffers:
            words.text(buffer.name)
            words.add(buffer.role, buffer.bytes, buffer.line, buffer.one)
        for rows in (self.given, self.made or Rows(View(self.buffers[0].name), 0, 1, 1)):
            words.add(places[rows.view.buffer], rows.view.offset, rows.bytes, rows.columns, rows.line)
        words.add(len(self.dispatches))
        for dispatch in self.dispatches:
            words.add(int(dispatch[0].call.array == HOST), len(dispatch))
            for step in dispatch:
                words.add(numbers[step.call])
                words.text(step.label)
                words.add(step.offset, places[step.choices] + 1 if step.choices else 0, len(step.views))
                for name, offset in step.views:
                    words.add(places[name], offset)


class ProgramWriter:
    """Writes the steps of a program one after the other.

    Buffers other than constants become as large as the steps need them.
    """

    def __init__(self, constants: Iterable[Buffer]) -> None:
        self._buffers = {buffer.name: buffer for buffer in constants}
        self._fills: dict[str, tuple[int, int]] = {}
        self.steps: list[Step] = []

    def step(
        self, call: ArtifactCall | HostCall, where: str, *views: View | str, offset: int = 0, choices: str = ""
    ) -> None:
        """Adds a call, for the part of the model called `where`; a name is a view of a buffer's beginning."""
        placed = tuple(View(view) if isinstance(view, str) else view for view in views)
        for view, argument in zip(placed, call.buffers, strict=True):
            self._reach(view.buffer, view.offset + argument.type.bytes)
        self.steps.append(Step(call, f"{call.operator}, {where}", placed, offset, choices=choices))

    def fill(self, name: str, line: int, one: int) -> None:
        """Have a buffer first filled with ones at `one` and every `line` elements from there, and zeros elsewhere."""
        self._fills[name] = (line, one)

    def rows(self, view: View | str, rows: int, columns: int, line: int = 0) -> Rows:
        """Rows of bf16 for the host to write or read; `line`: elements from row to row, if not `columns`."""
        found = Rows(View(view) if isinstance(view, str) else view, rows, columns, line or columns)
        self._reach(found.view.buffer, found.view.offset + found.bytes)
        return found

    def _reach(self, name: str, end: int) -> None:
        known = self._buffers.setdefault(name, Buffer(name, Role.SCRATCH, 0))
        if known.role is not Role.CONSTANT and known.bytes < end:
            self._buffers[name] = Buffer(name, known.role, end)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers that steps and rows use."""
        on_arrays = {view.buffer for step in self.steps if step.call.array != HOST for view in step.views}

        def role(buffer: Buffer) -> Role:
            stays = buffer.role is Role.SCRATCH and buffer.name not in on_arrays
            return Role.HOST if stays else buffer.role

        return tuple(
            Buffer(buffer.name, role(buffer), buffer.bytes, *self._fills.get(buffer.name, (0, 0)))
            for buffer in self._buffers.values()
        )


def calls_of(programs: Iterable[Program]) -> list[ArtifactCall]:
    """The calls of arrays of some programs, each once, in the order in which they are made."""
    found: dict[tuple[str, str], ArtifactCall] = {}
    for program in programs:
        for step in program.steps:
            if isinstance(step.call, ArtifactCall):
                found.setdefault((step.call.array, step.call.name), step.call)
    return list(found.values())


def host_calls_of(programs: Iterable[Program]) -> list[HostCall]:
    """The host's calls of some programs, each once, in the order in which they are made."""
    steps = (step for program in programs for step in program.steps)
    return list(dict.fromkeys(step.call for step in steps if isinstance(step.call, HostCall)))


def attribute_words(value: int | float | str | Sequence[int] | Sequence[float]) -> tuple[int, ...]:
    """An attribute of a model in the index's form: floats as the bits of an f32, texts as their bytes."""
    if isinstance(value, str):
        return tuple(value.encode())
    values = [value] if isinstance(value, int | float) else value
    return tuple(bits(each) if isinstance(each, float) else int(each) for each in values)

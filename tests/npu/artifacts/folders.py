# SPDX-License-Identifier: Apache-2.0
"""Folders of artifacts, whose index and families are written word by word as ops/npu/artifacts/ describes."""

import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flownpu.aie.words.writer import WordWriter

INDEX, FAMILY = 3, 4  # kinds of words


@dataclass
class Sweep:
    """As SweepRecord of ops/npu/artifacts/call_family.h."""

    offset: int = 0
    queries: int = 1
    tokens: int = 1
    window: int = 0


@dataclass
class CallClass:
    """Words of a class of positions; tasks: of each sweep; patches: (word, feature, coefficient)."""

    words: list[int]
    tasks: list[int] = field(default_factory=list)
    patches: list[tuple[int, int, int]] = field(default_factory=list)


def family_words(
    classes: list[CallClass],
    sweeps: list[Sweep] | None = None,
    *,
    positions: int = 1,
    keys: int = 1,
    chunks_of_a_task: int = 1,
    choices: int = 0,
    name: str = "call",
) -> np.ndarray:
    """A family in flat form."""
    words = WordWriter()
    words.text(name)
    words.add(0, positions, keys, chunks_of_a_task, choices, len(sweeps or []))
    for sweep in sweeps or []:
        words.add(sweep.offset, sweep.queries, sweep.tokens, sweep.window)
    words.add(len(classes))
    for members in classes:
        words.list(members.tasks)
        words.list(members.words)
        words.add(len(members.patches))
        for patch in members.patches:
            words.add(*patch)
    return words.finish(FAMILY, words.identity)


@dataclass
class FolderCall:
    """A call of an index."""

    op_type: str
    name: str
    family: np.ndarray
    buffers: list[tuple[str, int]] = field(default_factory=list)
    array: int = 0


@dataclass
class FolderHostCall:
    """A call that the host computes."""

    op_type: str
    parameters: dict[str, list[int]]
    buffers: list[tuple[str, int]]


@dataclass
class FolderRows:
    """Rows that the host writes or reads: number of the buffer, offset, bytes, columns and line in elements."""

    buffer: int = 0
    offset: int = 0
    bytes: int = 0
    columns: int = 1
    line: int = 1


@dataclass
class FolderProgram:
    """A program of an index; buffers: (name, role, bytes, line, one); steps of dispatches: (call, label, views).

    `host`: the numbers of those dispatches that are the host's.
    """

    kind: str
    buffers: list[tuple[str, int, int, int, int]]
    dispatches: list[list[tuple[int, str, list[tuple[int, int]]]]]
    attributes: dict[str, list[int]] = field(default_factory=dict)
    tokens: int = 1
    context: int = 0
    cache: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    host: tuple[int, ...] = ()
    given: FolderRows = field(default_factory=FolderRows)
    made: FolderRows = field(default_factory=FolderRows)

    def write(self, words: WordWriter) -> None:
        words.text(self.kind)
        words.add(len(self.attributes))
        for key, values in self.attributes.items():
            words.text(key)
            words.list(values)
        words.add(self.tokens, 1, self.context, *self.cache, len(self.buffers))
        for name, *numbers in self.buffers:
            words.text(name)
            words.add(*numbers)
        for rows in (self.given, self.made):
            words.add(rows.buffer, rows.offset, rows.bytes, rows.columns, rows.line)
        words.add(len(self.dispatches))
        for number, steps in enumerate(self.dispatches):
            words.add(int(number in self.host), len(steps))
            for call, label, views in steps:
                words.add(call)
                words.text(label)
                words.add(0, 0, len(views))
                for view in views:
                    words.add(*view)


def write_folder(
    folder: Path, arrays: list[np.ndarray], calls: list[FolderCall], programs: list[FolderProgram] | None = None, *,
    target: str = "npu2", emulated: bool = True, host_calls: tuple[FolderHostCall, ...] = (),
) -> Path:  # fmt: skip
    """Write index.words, arrays/ and calls/; array number n is called array_n."""
    words = WordWriter()
    words.text(target)
    words.add(int(emulated))
    words.text("an identity")
    words.add(len(arrays))
    for number, array in enumerate(arrays):
        words.text(f"array_{number}")
        words.text(f"arrays/array_{number}.words")
        words.add(_write(folder / "arrays" / f"array_{number}.words", array))
    words.add(len(calls))
    for call in calls:
        words.text(call.op_type)
        words.text(call.name)
        words.add(call.array)
        file = f"calls/array_{call.array}/{call.name}.words"
        words.text(file)
        words.add(_write(folder / file, call.family))
        _write_buffers(words, call.buffers)
    words.add(len(host_calls))
    for host_call in host_calls:
        words.text(host_call.op_type)
        words.add(len(host_call.parameters))
        for key, values in host_call.parameters.items():
            words.text(key)
            words.list(values)
        _write_buffers(words, host_call.buffers)
    words.add(len(programs or []))
    for program in programs or []:
        program.write(words)
    _write(folder / "index.words", words.finish(INDEX, words.identity))
    return folder


def _write_buffers(words: WordWriter, buffers: list[tuple[str, int]]) -> None:
    words.add(len(buffers))
    for buffer, size in buffers:
        words.text(buffer)
        words.add(size)


def _write(path: Path, words: np.ndarray) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(words.tobytes())
    return zlib.crc32(words.tobytes())

# SPDX-License-Identifier: Apache-2.0
"""Reads files of words by the description of their format (aie/words/writer.py)."""

import struct
import zlib

import numpy as np

from flownpu.aie.programs.call_family import CallFamily, CallSweep, Patch, Positions, WordClass


class Reader:
    """Takes words from the front of a file; the rest stays."""

    def __init__(self, words):
        self._words = list(map(int, words))

    def integer(self):
        return self._words.pop(0)

    def list(self):
        return [self.integer() for _ in range(self.integer())]

    def items(self, read):
        return [read() for _ in range(self.integer())]

    def text(self):
        size = self.integer()
        data = b"".join(struct.pack("<q", self.integer()) for _ in range(-(-size // 8)))
        return data[:size].decode()

    def head(self):
        """Checks magic and version, keeps the identity, and returns the kind."""
        assert (struct.pack("<q", self.integer()), self.integer()) == (b"FlowNPU\0", 6)
        kind, self.identity = self.integer(), self.integer()
        return kind

    def rest(self):
        return self._words


def words_of(file):
    """The words of a file."""
    return np.frombuffer(file.read_bytes(), "<i8")


def read_family(words):
    """Reads a family's file by the description of its format: name, identity, family."""
    reader = Reader(words)
    assert reader.head() == 4
    name, identity = reader.text(), reader.integer()
    count, keys, most, _choices = (reader.integer() for _ in range(4))
    sweeps = reader.items(lambda: CallSweep(*(reader.integer() for _ in range(4))))
    classes = reader.items(lambda: _word_class(reader))
    assert reader.rest() == []
    return name, identity, CallFamily(Positions(count, keys, most, tuple(sweeps)), tuple(classes))


def _word_class(reader):
    tasks, words = tuple(reader.list()), np.array(reader.list())
    return WordClass(tasks, words, tuple(reader.items(lambda: Patch(*(reader.integer() for _ in range(3))))))


def read_index(folder):
    """Reads the index by its format's description: target, emulated, identity, arrays, calls, host calls, programs."""
    everything = words_of(folder / "index.words")
    reader = Reader(everything)
    assert reader.head() == 3
    assert reader.identity == zlib.crc32(everything[4:].tobytes())
    head = reader.text(), reader.integer(), reader.text()
    arrays = reader.items(lambda: (reader.text(), reader.text(), reader.integer()))
    calls = reader.items(
        lambda: {
            "operator": reader.text(),
            "name": reader.text(),
            "array": reader.integer(),
            "file": reader.text(),
            "sum": reader.integer(),
            "buffers": reader.items(lambda: (reader.text(), reader.integer())),
        }
    )
    host_calls = reader.items(
        lambda: {
            "operator": reader.text(),
            "parameters": dict(reader.items(lambda: (reader.text(), reader.list()))),
            "buffers": reader.items(lambda: (reader.text(), reader.integer())),
        }
    )
    programs = reader.items(lambda: _program(reader))
    assert reader.rest() == []
    return *head, arrays, calls, host_calls, programs


def _program(reader):
    def numbers(count):
        return tuple(reader.integer() for _ in range(count))

    def step():
        call, label, offset, _choices = reader.integer(), reader.text(), *numbers(2)
        return call, label, offset, reader.items(lambda: numbers(2))

    return {
        "kind": reader.text(),
        "attributes": dict(reader.items(lambda: (reader.text(), tuple(reader.list())))),
        "sizes": dict(zip(("tokens", "fewest", "context"), numbers(3), strict=True)),
        "cache": numbers(5),
        "buffers": reader.items(lambda: (reader.text(), *numbers(4))),
        "given": numbers(5),
        "made": numbers(5),
        "dispatches": reader.items(lambda: (reader.integer(), reader.items(step))),
    }

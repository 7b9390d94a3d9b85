# SPDX-License-Identifier: Apache-2.0
"""Writes words: one run of 64-bit integers, which reader.h reads without a library.

    magic, version, kind, identity, body

A text is its length in bytes and the bytes, eight a word, zeros after the last; a list is its length and its items.
`identity` of an array or an index is the CRC-32 of its own body. A sequence or a family has that of the array that it
is for; a family for an NPU has the CRC-32 of the array's PDI.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

MAGIC = int.from_bytes(b"FlowNPU\0", "little")
VERSION = 6
# Kinds of words: two for the emulator, two in a folder of artifacts (artifacts/index.py, programs/call_family.py).
ARRAY, SEQUENCE, INDEX, FAMILY = 1, 2, 3, 4


@lru_cache(maxsize=4096)  # mostly names, which many arrays share
def _words_of(data: bytes) -> tuple[int, ...]:
    padded = data + bytes(-len(data) % 8)
    return len(data), *struct.unpack(f"<{len(padded) // 8}q", padded)


class WordWriter:
    """Integers in the order in which they are read."""

    def __init__(self) -> None:
        self._words = array("q")

    def add(self, *words: int) -> None:
        """Append integers."""
        self._words.extend(words)

    def list(self, words: Iterable[int]) -> None:
        """Append how many integers there are, and the integers."""
        items = list(words)
        self.add(len(items), *items)

    def bytes(self, data: bytes) -> None:
        """Append the length in bytes, and the bytes, eight a word."""
        self._words.extend(_words_of(data))

    def text(self, text: str) -> None:
        """Append a text in UTF-8, as `bytes` does."""
        self.bytes(text.encode())

    def append(self, other: WordWriter) -> None:
        """Append all words of another."""
        self._words += other._words

    @property
    def identity(self) -> int:
        """The CRC-32 of the words so far, as little-endian bytes."""
        return zlib.crc32(np.array(self._words, "<i8").tobytes())

    def finish(self, kind: int, identity: int) -> np.ndarray:
        """Head and body: little-endian int64, one dimension."""
        return np.concatenate([np.array([MAGIC, VERSION, kind, identity]), self._words], dtype="<i8")

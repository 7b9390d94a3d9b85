# SPDX-License-Identifier: Apache-2.0
"""Writes words: one run of 64-bit integers, which reader.h reads without a library.

    magic, version, kind, identity, body

A text is its length in bytes and the bytes, eight a word, zeros after the last; a list is its length and its items.
`identity` is the CRC-32 of the array's body: a sequence says which array it is for.
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

__all__ = ["ARRAY", "FAMILY", "INDEX", "MAGIC", "SEQUENCE", "VERSION", "Words"]

MAGIC = int.from_bytes(b"FlowNPU\0", "little")
VERSION = 4
# Kinds: of the emulator, and of a folder of artifacts (artifacts/index.py, programs/call_family.py).
ARRAY, SEQUENCE, INDEX, FAMILY = 1, 2, 3, 4


@lru_cache(maxsize=4096)  # names, of arrays that differ in little
def _words_of(data: bytes) -> tuple[int, ...]:
    padded = data + bytes(-len(data) % 8)
    return len(data), *struct.unpack(f"<{len(padded) // 8}q", padded)


class Words:
    """Integers in the order in which they are read."""

    def __init__(self) -> None:
        self._words = array("q")

    def add(self, *words: int) -> None:
        """Append integers."""
        self._words.extend(words)

    def list(self, words: Iterable[int]) -> None:
        """Append a list of integers."""
        items = list(words)
        self.add(len(items), *items)

    def bytes(self, data: bytes) -> None:
        """Append bytes."""
        self._words.extend(_words_of(data))

    def text(self, text: str) -> None:
        """Append a text in UTF-8."""
        self.bytes(text.encode())

    def append(self, other: Words) -> None:
        """Append what another holds."""
        self._words += other._words

    @property
    def identity(self) -> int:
        """The CRC-32 of what is there."""
        return zlib.crc32(np.array(self._words, "<i8").tobytes())

    def finish(self, kind: int, identity: int) -> np.ndarray:
        """The whole, with its head."""
        return np.concatenate([np.array([MAGIC, VERSION, kind, identity]), self._words], dtype="<i8")

# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files: metadata, and rows of tensors as they are stored.

A file is a header, key-value pairs, descriptions of tensors, and the tensors' bytes, all little-endian:

    "GGUF", uint32 version, uint64 tensors, uint64 pairs
    pair:   string key, uint32 type, value; an array is uint32 type, uint64 count, values
    tensor: string name, uint32 rank, uint64 sizes (the fastest first), uint32 type, uint64 offset
    string: uint64 length, UTF-8

The first tensor begins at a multiple of general.alignment (32 where it is not given). The gguf package has a reader
too, but that keeps an array for each token of a vocabulary (700 MB and 9 s for 262144 tokens), and reports a damaged
file by whatever error numpy raises. Only its tables of types and its dequantisation are used here.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from flownpu.convert.errors import ConversionError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_VERSIONS = (2, 3)
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place and form in the file."""

    shape: tuple[int, ...]
    """The slowest-varying axis first, as in numpy."""
    type: GGMLQuantizationType
    offset: int
    """Bytes from the file's beginning."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, which is the elements along the last axis."""
        per_block, block_bytes = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // per_block * int(block_bytes)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return math.prod(self.shape[:-1])

    @property
    def end(self) -> int:
        """The offset in the file at which the tensor ends."""
        return self.offset + self.rows * self.row_bytes


class GgufFile:
    """A GGUF file, whose tensors are read when they are asked for.

    Attributes:
        path: the file's path.
        metadata: the key-value pairs: numbers, strings, lists of strings, arrays of numbers.
        tensors: the tensors by name.
    """

    def __init__(self, path: Path) -> None:
        """Reads everything but the tensors' bytes.

        Raises:
            ConversionError: the file is not a GGUF file, has an unsupported version or byte order, or is damaged.
        """
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        with path.open("rb") as file:
            reader = _Reader(file, path)
            tensors, pairs = self._read_counts(reader)
            for _ in range(pairs):
                key = reader.string()
                self.metadata[key] = reader.value(reader.number("<u4"))
            described = [self._describe(reader) for _ in range(tensors)]
            alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
            if not isinstance(alignment, int) or alignment < 1:
                raise ConversionError(
                    f"{path}: expected general.alignment to be an integer of at least 1, got {alignment!r}; the file "
                    "is damaged"
                )
            start = -(-file.tell() // alignment) * alignment
        self._place(described, start, reader.size)

    @property
    def drafter_layers(self) -> int:
        """How many layers the model's own drafter has, behind the model's."""
        return int(self.metadata.get(f"{self.metadata.get('general.architecture')}.nextn_predict_layers", 0))

    def read(self, name: str, first: int, stop: int) -> NDArray[np.uint8]:
        """Rows first..stop-1 of a tensor as they are stored, uint8 [stop - first, row_bytes]. Any thread may call it.

        Raises:
            ConversionError: the file ends before these rows, because it was changed after it was opened.
        """
        tensor = self.tensors[name]
        count = (stop - first) * tensor.row_bytes
        data = np.fromfile(self.path, np.uint8, count, offset=tensor.offset + first * tensor.row_bytes)
        if data.size != count:
            raise ConversionError(f"{self.path}: became shorter while it was read")
        return data.reshape(stop - first, tensor.row_bytes)

    def _read_counts(self, reader: _Reader) -> tuple[int, int]:
        magic = reader.bytes(4) if reader.size >= 4 else b""
        if magic != b"GGUF":
            raise ConversionError(
                f"{self.path}: expected a GGUF file, which begins with the letters GGUF, got {magic!r}"
            )
        version = reader.number("<u4")
        if version not in _VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            what = f"version {swapped} in big-endian bytes" if swapped in _VERSIONS else f"version {version}"
            raise ConversionError(
                f"{self.path}: expected GGUF version {' or '.join(map(str, _VERSIONS))} in little-endian bytes, got "
                f"{what}; write the file with a current llama.cpp"
            )
        return reader.count(8 + 4 + 4 + 8), reader.count(8 + 4 + 1)

    def _place(self, described: list[tuple[str, GgufTensor]], start: int, size: int) -> None:
        """Adds the tensors to `tensors`, with offsets that count from the file's beginning.

        Raises:
            ConversionError: the file ends before them, or two of them overlap.
        """
        end, before = start, ""
        for name, tensor in sorted(described, key=lambda item: item[1].offset):
            placed = GgufTensor(tensor.shape, tensor.type, start + tensor.offset)
            if placed.end > size:
                raise ConversionError(
                    f"{self.path}: tensor {name} ends at byte {placed.end}, and the file at {size}; its download was "
                    "cut short: fetch it again"
                )
            if placed.offset < end or name in self.tensors:
                raise ConversionError(f"{self.path}: tensors {before} and {name} overlap; the file is damaged")
            self.tensors[name], end, before = placed, placed.end, name

    def _describe(self, reader: _Reader) -> tuple[str, GgufTensor]:
        name, rank = reader.string(), reader.number("<u4")
        if not 1 <= rank <= 4:
            raise ConversionError(f"{self.path}: tensor {name}: expected 1 to 4 axes, got {rank}; the file is damaged")
        shape = tuple(int(reader.number("<u8")) for _ in range(rank))[::-1]
        number, offset = reader.number("<u4"), int(reader.number("<u8"))
        try:
            kind = GGMLQuantizationType(number)
            GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ConversionError(
                f"{self.path}: tensor {name} has type {number}, which the installed gguf package does not know; "
                'pip install -U "gguf"'
            ) from None
        per_block, _ = GGML_QUANT_SIZES[kind]
        if shape[-1] % per_block or 0 in shape:
            raise ConversionError(
                f"{self.path}: tensor {name} has shape {list(shape)}, and {kind.name} comes in blocks of {per_block}; "
                "the file is damaged"
            )
        return name, GgufTensor(shape, kind, offset)


class _Reader:
    """Reads values from a file, one after the other; errors say at which byte it ended too early."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self.size = path.stat().st_size

    def bytes(self, count: int) -> bytes:
        start = self._file.tell()
        if start + count > self.size:
            raise ConversionError(
                f"{self._path}: expected {count} bytes at byte {start}, and the file ends at {self.size}; it is "
                "damaged or its download was cut short: fetch it again"
            )
        return self._file.read(count)

    def number(self, kind: str) -> Any:
        return np.frombuffer(self.bytes(np.dtype(kind).itemsize), kind)[0].item()

    def count(self, smallest: int) -> int:
        """A count of items that take at least `smallest` bytes each; ConversionError if the file cannot hold them."""
        count: int = self.number("<u8")
        if count * smallest > self.size:
            raise ConversionError(
                f"{self._path}: expected a count before byte {self._file.tell()}, got {count}; the file is damaged"
            )
        return count

    def string(self) -> str:
        start = self._file.tell()
        (length,) = struct.unpack("<Q", self.bytes(8))
        try:
            return self.bytes(length).decode("utf-8")
        except UnicodeDecodeError:
            raise ConversionError(f"{self._path}: expected UTF-8 at byte {start + 8}; the file is damaged") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise ConversionError(
                f"{self._path}: expected a type of value before byte {self._file.tell()}, got {kind}; it is damaged"
            )
        element = self.number("<u4")
        if element in _NUMBERS:
            dtype = np.dtype(_NUMBERS[element])
            return np.frombuffer(self.bytes(self.count(dtype.itemsize) * dtype.itemsize), dtype)
        if element != _STRING:  # llama.cpp reads no arrays of arrays either
            raise ConversionError(
                f"{self._path}: expected an array of numbers or strings before byte {self._file.tell()}, got type "
                f"{element}; the file is damaged"
            )
        return [self.string() for _ in range(self.count(8))]

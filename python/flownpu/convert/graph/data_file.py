# SPDX-License-Identifier: Apache-2.0
"""Writes the external data file of a model: tensors one after the other, each at a multiple of 4096 bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

# Bytes of a memory page: a tensor that begins on a page can be mapped by itself, and is aligned for SIMD and DMA.
ALIGNMENT = 4096


def aligned(size: int) -> int:
    """A size in bytes rounded up to whole pages: at most what such a tensor takes in the file."""
    return -(-size // ALIGNMENT) * ALIGNMENT


# Bytes of x86-64's large pages.
_LARGE_PAGE = 2 << 20


class _LargePageWriter:
    """Appends to a file in writes of one large page each.

    On Linux file systems with large folios, the bytes of one write become one folio in the page cache, and only a whole
    folio can be mapped as a large page. A model then decodes as fast right after it was written as after it was read
    from the disk (`ep/model/mapped_file.h`).
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._held = bytearray()

    @property
    def size(self) -> int:
        """How many bytes were appended."""
        return self._file.tell() + len(self._held)

    def append(self, data: memoryview) -> None:
        """Appends bytes."""
        while len(data) > 0:
            part = data[: _LARGE_PAGE - len(self._held)]
            self._held += part
            data = data[len(part) :]
            if len(self._held) == _LARGE_PAGE:
                self._file.write(self._held)
                self._held.clear()

    def close(self) -> None:
        with self._file:
            self._file.write(self._held)


class DataFile:
    """Writes tensors to a file and returns the references to them that an ONNX graph holds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _LargePageWriter(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(
        self, name: str, dtype: ir.DataType, shape: tuple[int, ...], parts: Iterable[NDArray[np.generic]]
    ) -> ir.ExternalTensor:
        """Writes a tensor of that type and shape, whose bytes are those of `parts` one after the other.

        Types of less than a byte are packed, as ONNX stores them; `parts` then is one array, with a byte an element.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        offset = aligned(self._file.size)
        self._file.append(memoryview(bytes(offset - self._file.size)))
        for part in parts:
            if dtype.bitwidth < 8:
                self._file.append(memoryview(ir.Tensor(part, dtype=dtype).tobytes()))
            else:
                self._file.append(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        length = self._file.size - offset
        expected = math.ceil(math.prod(shape) * dtype.itemsize)
        assert length == expected, f"{name}: {length} bytes for {list(shape)} {dtype}, expected {expected}"
        return ir.ExternalTensor(
            self._path.name, offset, length, dtype, shape=ir.Shape(shape), name=name, base_dir=self._path.parent
        )

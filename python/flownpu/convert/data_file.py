# SPDX-License-Identifier: Apache-2.0
"""The external data file of a model: tensors one after the other, each at a multiple of 4096 bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ALIGNMENT", "DataFile", "aligned"]

# A page of memory: a tensor that starts on one can be mapped by itself, and lies as SIMD loads and DMA want it.
ALIGNMENT = 4096


def aligned(size: int) -> int:
    """The bytes that a tensor of that size takes in the file at most."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class DataFile:
    """Writes tensors to a file and returns the references to them that an ONNX graph holds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(
        self, name: str, dtype: ir.DataType, shape: tuple[int, ...], parts: Iterable[NDArray[np.generic]]
    ) -> ir.ExternalTensor:
        """Writes a tensor of that type and shape, whose bytes come in parts.

        Raises:
            OSError: the disk is full, or cannot be written.
        """
        offset = aligned(self._file.tell())
        self._file.seek(offset)  # what lies between is zero
        length = sum(self._file.write(part.data if part.flags.c_contiguous else part.tobytes()) for part in parts)
        expected = math.prod(shape) * dtype.itemsize
        assert length == expected, f"{name}: {length} bytes for {list(shape)} {dtype}, expected {expected}"
        return ir.ExternalTensor(
            self._path.name, offset, length, dtype, shape=ir.Shape(shape), name=name, base_dir=self._path.parent
        )

# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face checkpoint folder tensor by tensor: config.json and safetensors files.

This needs neither torch nor transformers. The safetensors library checks the files; rows are read when they are asked
for, through a mapping of their tensor that ends after the call. (The library itself would map the whole file, and all
that was ever read from it would count as memory in use.)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from flownpu.convert.errors import ConversionError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

_FLOATS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_INTEGERS: dict[str, np.dtype[Any]] = {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
"""The type of the weights of FP8 checkpoints."""
_STORED = _FLOATS | _INTEGERS | {"I8": np.dtype(np.int8), "U8": np.dtype(np.uint8), "F8_E4M3": FLOAT8}
# A safetensors file begins with the header's length in 8 bytes, little-endian.
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class _Place:
    """A tensor's place; the offset counts bytes from the file's beginning."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
        ConversionError: the file is missing, or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{path}: the file is missing") from None
    except (ValueError, OSError, RecursionError) as error:
        raise ConversionError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


class Checkpoint:
    """The tensors and settings of a checkpoint.

    Attributes:
        folder: the checkpoint's folder.
        config: the contents of config.json.
        generation: the contents of generation_config.json; empty if there is none.
        files: every file that holds weights, sorted by name.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the settings and the headers of the weight files.

        Raises:
            ConversionError: a file is missing or damaged.
        """
        self.folder = folder
        self.config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        self.generation = read_json(generation) if generation.exists() else {}
        self._listed = self._index()
        self.files = sorted(set(self._listed.values())) if self._listed else self._unindexed_files()
        self._places: dict[str, _Place] = {}
        for path in self.files:
            try:
                self._places.update(_read_places(path))
            except FileNotFoundError:
                raise ConversionError(
                    f"{path}: model.safetensors.index.json lists this file, and it is missing; download it"
                ) from None
            except (SafetensorError, OSError) as error:
                raise ConversionError(
                    f"{path}: not a whole safetensors file ({error}); it is damaged or its download was cut short: "
                    "fetch it again"
                ) from error
        self._check_index()

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape; a stack of matrices [n, rows, columns] counts as one matrix [n * rows, columns].

        Raises:
            ConversionError: the checkpoint has no such tensor.
        """
        return self._place(name).shape

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows start..stop-1 of a tensor, in the type it is stored in (float32, float16 or bfloat16).

        Raises:
            ConversionError: the checkpoint has no such tensor, or it has another type.
        """
        hint = "convert from the original checkpoint rather than a quantised one"
        return np.array(self._mapped(name, _FLOATS, hint)[start:stop])

    def dtype(self, name: str) -> np.dtype[Any] | None:
        """The type that a tensor is stored in, None if it is none of those of weights; raises as `shape`."""
        return _STORED.get(self._place(name).dtype)

    def part(self, name: str, *slices: slice) -> NDArray[Any]:
        """Some rows and columns of a tensor, in the type it is stored in (as in `rows`, or integers or FLOAT8).

        Raises:
            ConversionError: the checkpoint has no such tensor, or it has another type.
        """
        return np.array(self._mapped(name, _STORED)[slices])

    def integers(self, name: str) -> NDArray[np.int64]:
        """A whole one-dimensional tensor of integers.

        Raises:
            ConversionError: the checkpoint has no such tensor, or it has another type.
        """
        return np.array(self._mapped(name, _INTEGERS), np.int64)

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """A whole one-dimensional tensor, as float32 [size].

        Raises:
            ConversionError: there is no tensor of that name and size, or it has a value that is not finite.
        """
        self.check_shape(name, (size,))
        vector = self.rows(name, 0, size).astype(np.float32)
        if not np.isfinite(vector).all():
            raise ConversionError(f"{self.folder}: tensor {name} has a value that is not finite")
        return vector

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """Raises ConversionError unless the tensor exists and has that shape."""
        shape = self.shape(name)
        if shape != expected:
            raise ConversionError(
                f"{self.folder}: tensor {name} has shape {list(shape)}, expected {list(expected)} from config.json"
            )

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise ConversionError(f"{self.folder}: tensor {name} is missing from the weight files")
        return self._places[name]

    def _mapped(self, name: str, dtypes: Mapping[str, np.dtype[Any]], hint: str = "") -> NDArray[Any]:
        """A tensor as a mapping of its file; ConversionError, with the hint, if its type is not among `dtypes`."""
        place = self._place(name)
        if place.dtype not in dtypes:
            raise ConversionError(
                f"{self.folder}: tensor {name} has type {place.dtype}, expected one of {', '.join(dtypes)}"
                + (f"; {hint}" if hint else "")
            )
        return np.memmap(place.path, dtypes[place.dtype], "r", place.offset, place.shape)

    def _index(self) -> dict[str, Path]:
        """Each tensor's file by model.safetensors.index.json; empty if there is no such index."""
        path = self.folder / "model.safetensors.index.json"
        if not path.exists():
            return {}
        listed = read_json(path).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ConversionError(f"{path}: expected a weight_map of tensors to files, and there is none")
        for file in listed.values():
            if not isinstance(file, str) or "/" in file or "\\" in file:
                raise ConversionError(f"{path}: expected file names in this folder, got {file!r}")
        return {str(name): self.folder / file for name, file in listed.items()}

    def _unindexed_files(self) -> list[Path]:
        single = self.folder / "model.safetensors"
        if single.exists():
            return [single]
        others = [p.name for p in sorted(self.folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth", ".safetensors")]
        hint = f"; found {', '.join(others)}" if others else ""
        raise ConversionError(
            f"{self.folder}: expected model.safetensors, or model.safetensors.index.json with the files it lists{hint}"
        )

    def _check_index(self) -> None:
        missing = [name for name in self._listed if name not in self._places]
        if missing:
            raise ConversionError(
                f"{self._listed[missing[0]]}: the index says that tensor {missing[0]} is in this file, and it is not"
                + (f" (nor are {len(missing) - 1} others)" if len(missing) > 1 else "")
            )


def _read_places(path: Path) -> dict[str, _Place]:
    """The tensors of a file by name, after the safetensors library has checked that it is complete.

    Raises:
        SafetensorError: the file is not a complete safetensors file.
        OSError: the file is missing or cannot be read.
    """
    with safe_open(path, framework="np"), path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = json.loads(file.read(length))
    return {
        name: _Place(path, entry["dtype"], _rows(entry["shape"]), _LENGTH_BYTES + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _rows(shape: list[int]) -> tuple[int, ...]:
    """A tensor's shape, in which a stack of matrices [n, rows, columns] becomes one matrix [n * rows, columns]."""
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 else tuple(shape)

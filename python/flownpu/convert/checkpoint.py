# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face checkpoint folder, read tensor by tensor: config.json, safetensors files, tokenizer files.

No torch and no transformers: the safetensors library maps the files, and rows are read when they are asked for.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from flownpu.convert.errors import ConversionError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Checkpoint", "read_json"]

# numpy knows the type that safetensors calls BF16 only once ml_dtypes has told it.
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ConversionError: the file is missing, or no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConversionError(f"{path}: the file is missing") from None
    except (ValueError, OSError) as error:
        raise ConversionError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


class Checkpoint:
    """The tensors and settings of a checkpoint.

    Attributes:
        folder: where it is.
        config: config.json.
        generation: generation_config.json, empty if there is none.
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
        self._handles: dict[str, Any] = {}
        for path in self.files:
            try:
                handle: Any = safe_open(path, framework="np")
            except FileNotFoundError:
                raise ConversionError(
                    f"{path}: model.safetensors.index.json lists this file, and it is missing; download it"
                ) from None
            except (SafetensorError, OSError) as error:
                raise ConversionError(
                    f"{path}: not a whole safetensors file ({error}); it is damaged or its download was cut short: "
                    "fetch it again"
                ) from error
            self._handles.update(dict.fromkeys(handle.keys(), handle))
        self._check_index()

    def names(self) -> list[str]:
        """All tensors' names."""
        return list(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape.

        Raises:
            ConversionError: the checkpoint has no such tensor.
        """
        return tuple(self._slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows start..stop-1 of a tensor, in the type it is stored in (float32, float16 or bfloat16).

        Raises:
            ConversionError: the checkpoint has no such tensor, or it has another type.
        """
        part = self._slice(name)
        if part.get_dtype() not in _DTYPES:
            raise ConversionError(
                f"{self.folder}: tensor {name} has type {part.get_dtype()}, expected one of {', '.join(_DTYPES)}; "
                "convert from the original checkpoint rather than a quantised one"
            )
        rows: NDArray[Any] = part[start:stop]
        return rows

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """A whole one-dimensional tensor in float32.

        Raises:
            ConversionError: there is none of that name and size, or it has a value that is not finite.
        """
        self.check_shape(name, (size,))
        vector = self.rows(name, 0, size).astype(np.float32)
        if not np.isfinite(vector).all():
            raise ConversionError(f"{self.folder}: tensor {name} has a value that is not finite")
        return vector

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """Raises ConversionError unless the tensor is there and has that shape."""
        shape = self.shape(name)
        if shape != expected:
            raise ConversionError(
                f"{self.folder}: tensor {name} has shape {list(shape)}, expected {list(expected)} from config.json"
            )

    def _slice(self, name: str) -> Any:
        if name not in self._handles:
            raise ConversionError(f"{self.folder}: tensor {name} is missing from the weight files")
        return self._handles[name].get_slice(name)

    def _index(self) -> dict[str, Path]:
        """Tensor name to file, as model.safetensors.index.json has it; empty if there is no such file."""
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
        missing = [name for name in self._listed if name not in self._handles]
        if missing:
            raise ConversionError(
                f"{self._listed[missing[0]]}: the index says that tensor {missing[0]} is in this file, and it is not"
                + (f" (nor are {len(missing) - 1} others)" if len(missing) > 1 else "")
            )

# SPDX-License-Identifier: Apache-2.0
"""Reads settings of a model's architecture from the metadata of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.convert.errors import ConversionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.convert.gguf.file import GgufFile


class GgufSettings:
    """The settings of a file's architecture.

    Attributes:
        file: the file.
        metadata: all its metadata.
        architecture: the value of general.architecture, with which the settings' keys begin.
    """

    def __init__(self, file: GgufFile) -> None:
        """Takes the file."""
        self.file = file
        self.metadata = file.metadata
        self.architecture = str(self.metadata.get("general.architecture"))

    def error(self, expected: str) -> ConversionError:
        """An error about the file's settings."""
        return ConversionError(f"{self.file.path}: {expected}; such models cannot be converted")

    def value(self, key: str, default: Any = None) -> Any:
        """A setting of the architecture; ConversionError if it is missing and has no default."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ConversionError(
                f"{self.file.path}: {self.architecture}.{key} is missing; write the file with a current llama.cpp"
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; an array must have the same one for all layers, else ConversionError."""
        value = self.value(key, default)
        if isinstance(value, np.ndarray):
            if not value.size or (value != value[0]).any():
                raise ConversionError(
                    f"{self.file.path}: {self.architecture}.{key} differs between layers, and only models of equal "
                    "layers can be converted"
                )
            value = value[0]
        if isinstance(value, bool) or int(value) != value or value < 1:
            raise ConversionError(f"{self.file.path}: expected {self.architecture}.{key} of at least 1, got {value}")
        return int(value)

    def check_neutral(self, neutrals: Mapping[str, Any]) -> None:
        """Raises ConversionError if a setting has another value than the one that is given."""
        for key, neutral in neutrals.items():
            if (value := self.value(key, neutral)) != neutral:
                raise ConversionError(
                    f"{self.file.path}: {self.architecture}.{key} is {value}, and only models that have {neutral} "
                    "there can be converted"
                )

    def local_layers(self, count: int, period: int) -> list[bool]:
        """For each layer whether it has a window: all but the last of each period, unless an array says otherwise."""
        pattern = self.value("attention.sliding_window_pattern", period)
        if not isinstance(pattern, np.ndarray):
            return [(i + 1) % int(pattern) != 0 for i in range(count)]
        if pattern.size != count:
            raise self.error(f"expected attention.sliding_window_pattern for {count} layers, got {pattern.size}")
        return [bool(local) for local in pattern]

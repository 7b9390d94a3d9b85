# SPDX-License-Identifier: Apache-2.0
"""Settings from a model's file, read by type: a value of another type is an error that names file and setting."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from flownpu.convert.errors import ConversionError

LARGEST = 2**31 - 1
"""The largest size that is accepted: ONNX Runtime and GenAI keep sizes and token ids in 32 bits."""


class Settings:
    """Settings by name; one whose value is null counts as missing.

    Attributes:
        where: what messages call the file, such as "config.json".
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Takes the contents of a JSON object, and what messages call it."""
        self._values = {key: value for key, value in values.items() if value is not None}
        self._nulls = values.keys() - self._values.keys()
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __or__(self, others: Settings) -> Settings:
        """These settings together with others, which have precedence."""
        return Settings(self._values | others._values, others.where if others._values else self.where)

    def value(self, key: str) -> Any:
        """The setting's value as the file has it; KeyError if it is missing."""
        return self._values[key]

    def is_null(self, key: str) -> bool:
        """Whether the file has the setting, with the value null."""
        return key in self._nulls

    def with_defaults(self, defaults: Mapping[str, Any]) -> Settings:
        """These settings, with defaults for those that are missing."""
        return Settings({**defaults, **self._values}, self.where)

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST) -> int:
        """A whole number; ConversionError if it is something else, not in least..most, or missing without a default."""
        value = self._value(key, default)
        whole = isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer()
        if not whole or not least <= value <= most:
            raise self._error(key, f"a whole number of {least} to {most}", value)
        return int(value)

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        """A finite number; ConversionError if it is something else, or missing without a default."""
        value = self._value(key, default)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300
        if not fits or (positive and value <= 0):
            raise self._error(key, "a number above 0" if positive else "a number", value)
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; ConversionError if it is something else."""
        value = self._value(key, default)
        if not isinstance(value, bool | int) or value not in (0, 1):
            raise self._error(key, "true or false", value)
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A text; ConversionError if it is something else, or missing without a default."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._error(key, "a text", value)
        return value

    def section(self, key: str) -> Settings:
        """An object of settings, empty if it is missing; ConversionError if it is something else."""
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            raise self._error(key, "an object", value)
        return Settings(value, f"{self.where}: {key}")

    def texts(self, key: str) -> list[str]:
        """A list of texts; ConversionError if it is something else, or missing."""
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._error(key, "a list of texts", value)
        return value

    def numbers(self, key: str) -> list[float]:
        """A list of numbers; ConversionError if it is something else, or missing."""
        value = self._value(key, None)
        if not isinstance(value, list):
            raise self._error(key, "a list of numbers", value)
        items = Settings(dict(enumerate(value)), f"{self.where}: {key}")  # type: ignore[arg-type]
        return [items.number(index) for index in range(len(value))]  # type: ignore[arg-type]

    def token(self, key: str) -> int | None:
        """A token's id, None if it is missing; ConversionError if it is something else."""
        return self.integer(key, least=0) if key in self else None

    def tokens(self, key: str) -> tuple[int, ...]:
        """Token ids, in a file as a list or a single one; () if missing. ConversionError if they are something else."""
        value = self._values.get(key, [])
        listed = value if isinstance(value, list | tuple) else [value]
        return tuple(Settings({key: item}, self.where).integer(key, least=0) for item in listed)

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise ConversionError(f"{self.where}: {key} is missing; is it the model's own file?")
        return value

    def _error(self, key: str, expected: str, value: Any) -> ConversionError:
        return ConversionError(
            f"{self.where}: expected {key} to be {expected}, got {reprlib.repr(value)}; is it the model's own file?"
        )

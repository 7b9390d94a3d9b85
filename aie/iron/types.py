# SPDX-License-Identifier: Apache-2.0
"""Types, places and devices of a recorded program, and code that the recorder's classes share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from flownpu.aie.iron.symbolic import RecordingError
from flownpu.aie.plan import data as plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class v8bfp16ebs8:  # noqa: N801
    """Element type: 8 values that share an exponent, in 9 bytes (named as in `aie.helpers.util`)."""


class Device:
    """The NPU that a program is for; `target` is its name in `flownpu.aie.plan.limits.LIMITS`."""

    target = ""


class NPU1(Device):
    """XDNA, all 4 columns."""

    target = "npu1"


class NPU2(Device):
    """XDNA2, all 8 columns."""

    target = "npu2"


class Tile:
    """A tile's place; without column and row the recorder chooses it (`flownpu.aie.iron.resolve`)."""

    def __init__(self, col: int | None = None, row: int | None = None) -> None:
        if (col is None) != (row is None):
            raise RecordingError(f"[tiles] expected a column and a row, or neither, got {col} and {row}")
        self.place = None if col is None or row is None else plan.Tile(col, row)


def plan_type(kind: Any) -> plan.Type:
    """The plan's type of `np.ndarray[(n,), np.dtype[T]]` or of a scalar type like `np.int32`.

    Raises:
        RecordingError: it is neither, or `plan.DTYPES` does not have T.
    """
    arguments = get_args(kind)
    if len(arguments) == 2 and isinstance(arguments[0], tuple):
        return plan.Type(tuple(map(int, arguments[0])), _dtype_name(get_args(arguments[1])[0]))
    if isinstance(kind, type):
        return plan.Type((), _dtype_name(kind))
    raise RecordingError(f"[type] expected np.ndarray[shape, np.dtype[T]] or a scalar type, got {kind!r}")


def _dtype_name(kind: Any) -> str:
    if kind is v8bfp16ebs8:
        return "bfp16ebs8"
    for name, dtype in plan.DTYPES.items():
        if dtype == np.dtype(kind):
            return name
    raise RecordingError(f"[type] no DMA or kernel of ours uses elements of {kind!r}")


def flatten(values: Iterable[Any]) -> Iterator[Any]:
    """The leaves of nested lists and tuples."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flatten(value)
        else:
            yield value


def refuse(what: str, options: dict[str, Any]) -> None:
    """Refuse the options that a plan cannot hold, unless they are at their defaults: None, False, padding of zeros.

    Raises:
        RecordingError: some are not; the message names them.
    """
    defaults = {"pad_value": 0}
    given = sorted(
        name
        for name, value in options.items()
        if value is not None and value is not False and (name not in defaults or value != defaults[name])
    )
    if given:
        raise RecordingError(f"[{what}] a plan does not hold {', '.join(given)}")

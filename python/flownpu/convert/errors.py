# SPDX-License-Identifier: Apache-2.0
"""The error of a conversion that cannot be done."""

from collections.abc import Sequence
from pathlib import Path

from flownpu.errors import FlowNPUError


class ConversionError(FlowNPUError):
    """The source cannot be converted, or the output cannot be written. Names the file or tensor, and what to do."""


def refuse_unplaced(source: Path, tensors: Sequence[str], kind: str = "family") -> None:
    """Raises ConversionError if any `tensors` have no place in a model, which would be wrong without them."""
    if tensors:
        shown = ", ".join(tensors[:3]) + (" ..." if len(tensors) > 3 else "")
        raise ConversionError(
            f"{source}: {len(tensors)} tensors have no place in a model of this {kind} as FlowNPU knows it ({shown}); "
            "such models cannot be converted"
        )

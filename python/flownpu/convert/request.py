# SPDX-License-Identifier: Apache-2.0
"""What a conversion is asked for, whatever its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from flownpu.convert.model_writer import ModelOptions
    from flownpu.convert.progress import ProgressCallback

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """One call of `flownpu.convert.convert`; every kind of source has a function that takes one.

    Attributes:
        source: a file or a folder.
        output: folder to make.
        options: see ModelOptions.
        context_length: positions that the model is made for; None: as many as the source allows.
        force: replace a model that is at `output`.
        progress: hears how far it is.
    """

    source: Path
    output: Path
    options: ModelOptions
    context_length: int | None
    force: bool
    progress: ProgressCallback

# SPDX-License-Identifier: Apache-2.0
"""The arguments of a conversion, whatever its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from flownpu.convert.model_writer import ModelOptions
    from flownpu.convert.progress import ProgressCallback


@dataclass(frozen=True)
class Request:
    """The arguments of one call of `flownpu.convert.convert`; each kind of source has a function that takes them.

    Attributes:
        source: a file or a folder.
        name: the name that the manifest gives the source.
        output: the folder to make.
        options: see ModelOptions.
        context_length: how many positions the model is made for; None: as many as the source allows.
        force: replace a model that a conversion wrote to `output`.
        progress: called with a `Progress` whenever a part of the work is done.
    """

    source: Path
    name: str
    output: Path
    options: ModelOptions
    context_length: int | None
    force: bool
    progress: ProgressCallback

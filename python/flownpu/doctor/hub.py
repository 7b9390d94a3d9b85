# SPDX-License-Identifier: Apache-2.0
"""The checks of `flownpu doctor` for models by name: the hub's settings, the disks, and pulls that did not end."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from flownpu.doctor.checks import Check, Status
from flownpu.hub.store import models_folder, stored_models, unfinished_pulls

# The smallest model with a short name, gemma3:270m, is downloaded with 0.54 GB and converted into 0.2 GB.
SMALLEST = 10**9


def diagnose_hub() -> Iterator[Check]:
    """Whether models can be pulled by their names. Nothing is asked of the hub."""
    try:
        from huggingface_hub import constants, get_token  # noqa: PLC0415 another extra's
    except ModuleNotFoundError:
        found = "huggingface_hub is not installed; names of models need it"
        yield Check("hub", Status.NOTE, found, "pip install 'flownpu[convert]'")
        return
    if constants.is_offline_mode():
        found = f"HF_HUB_OFFLINE is set: models can be pulled from {constants.HF_HUB_CACHE} only"
        yield Check("hub", Status.NOTE, found, "unset HF_HUB_OFFLINE")
    else:
        token = (
            "with a token" if get_token() else "without a token, which gated and private models want (hf auth login)"
        )
        yield Check("hub", Status.GOOD, f"{constants.ENDPOINT}, {token}; {len(stored_models())} models were pulled")
    places = {"HF_HOME": Path(constants.HF_HUB_CACHE), "XDG_CACHE_HOME": models_folder()}
    for variable, folder in places.items():
        yield from _diagnose_disk(folder, f"export {variable}=FOLDER, with one on another disk")
    for name in unfinished_pulls():
        yield Check("pull", Status.NOTE, f"{name} is not complete", f"flownpu pull {name}")


def _diagnose_disk(folder: Path, elsewhere: str) -> Iterator[Check]:
    """A note if a folder cannot be written, or its disk has not the room for a small model."""
    there = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        yield Check("disk", Status.NOTE, f"{there} cannot be written, so no model can be pulled", elsewhere)
    elif free < SMALLEST:
        yield Check("disk", Status.NOTE, f"{free / 1e9:.1f} GB are free for {folder}: make room", elsewhere)

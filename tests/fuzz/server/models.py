# SPDX-License-Identifier: Apache-2.0
"""The models that the campaign's server has, converted from this repository's small checkpoints."""

from __future__ import annotations

import tempfile
from pathlib import Path

from flownpu.convert import convert
from tests.fuzz.server import bodies

FIXTURES = Path(__file__).parents[2] / "fixtures"


def make_models(folder: Path, *, embedding: bool = False) -> dict[str, Path]:
    """The models' folders by the names that requests use; those that are there already are taken.

    Args:
        folder: the folder that gets them.
        embedding: whether there is one that embeds texts, whose checkpoint is random.
    """
    sources = {bodies.SLOTS: "gemma3-topics", bodies.PAGED: "gemma3-topics", bodies.SEEING: "gemma3-shapes"}
    models = {name: folder / name for name in sources}
    for name, made in models.items():
        if not made.exists():
            convert(FIXTURES / sources[name], made, paged=name == bodies.PAGED)
    if embedding:
        made = models[bodies.EMBEDDING] = folder / bodies.EMBEDDING
        if not made.exists():
            from tests.embed.checkpoints import make_checkpoint  # it imports torch, which takes seconds

            with tempfile.TemporaryDirectory() as checkpoint:
                convert(make_checkpoint("bert-mean", Path(checkpoint) / "bert"), made)
    return models

# SPDX-License-Identifier: Apache-2.0
"""Draws docs/figures/shapes.png, a picture to ask `gemma3-shapes` about; run as `python -m scripts.figures.shapes`."""

import random
from pathlib import Path

from tests.fixtures.shapes_pictures import draw, random_scene

PICTURE = Path(__file__).resolve().parent.parent.parent / "docs" / "figures" / "shapes.png"
SIZE = 448
SEED = 0  # the pictures of training have texts as seeds, those of tests other numbers


def main() -> None:
    """Draws the scene of SEED: two green triangles and a yellow star."""
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    draw(random_scene(random.Random(SEED)), SIZE).save(PICTURE, optimize=True)  # noqa: S311


if __name__ == "__main__":
    main()

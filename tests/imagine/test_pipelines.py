# SPDX-License-Identifier: Apache-2.0
"""optimum's pipelines, unchanged, with FlowNPU as their provider, against diffusers' with torch."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.fixtures.shapes_drawings import GUIDANCE, NAMES, SIDE, centered, read
from tests.fixtures.shapes_pictures import COLORS, SHAPES, draw
from tests.imagine import pipelines

OPTIONS = {"device": "cpu", "activations": "bf16", "on_unsupported": "cpu"}
SCHEDULERS = (
    "PNDMScheduler",
    "DDIMScheduler",
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler",
)
KINDS = ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline")
DRAWN = NAMES[::5]  # every shape, and all colours but one
# dB, 1 % of the range. A factor rounded to bf16 errs by 2^-9 at most, 54 dB, and errors of the products of a network
# partly cancel; what is left accumulates over the steps.
LEAST = 40


@pytest.fixture(scope="module")
def results(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All runs, in one process: the PSNRs by pipeline and scheduler, and what was read from a picture of each name."""
    folder = tmp_path_factory.mktemp("pictures")
    draw(centered("circle", "red", random.Random(1)), SIDE).save(folder / "circle.png")
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[:, SIDE // 2 :] = 255
    Image.fromarray(mask).save(folder / "right_half.png")
    prompt = {"prompt": "a red circle", "num_inference_steps": 8, "guidance_scale": GUIDANCE}
    image = {**prompt, "image": folder / "circle.png", "strength": 0.7}
    inpaint = {**image, "mask_image": folder / "right_half.png", "width": SIDE, "height": SIDE}
    common = {"model": exported, "options": OPTIONS}
    compared = [
        {"task": "compare", **common, "kind": kind, "schedulers": schedulers, "arguments": arguments}
        for kind, schedulers, arguments in (
            (KINDS[0], SCHEDULERS, prompt),
            (KINDS[1], SCHEDULERS[1:2], image),
            (KINDS[2], SCHEDULERS[1:2], inpaint),
        )
    ]
    *found, drawn = pipelines.run(*compared, {"task": "draw", **common, "names": DRAWN})
    return {**dict(zip(KINDS, found, strict=True)), "drawn": drawn}


@pytest.mark.parametrize(
    ("kind", "scheduler"),
    [*((KINDS[0], scheduler) for scheduler in SCHEDULERS), *((kind, SCHEDULERS[1]) for kind in KINDS[1:])],
)
def test_latents_after_steps_equal_torch(kind: str, scheduler: str, results: dict[str, Any]) -> None:
    """Latents after each step, and the picture, from the same noise."""
    found = results[kind][scheduler]
    assert len(found) >= 6
    assert min(found) > LEAST, found


def test_pictures_show_what_their_names_say(results: dict[str, Any]) -> None:
    right = [f"{color} {shape}" in name for (color, shape), name in zip(results["drawn"], DRAWN, strict=True)]
    assert sum(right) >= len(DRAWN) - 1, results["drawn"]


def test_reader_recognises_drawings() -> None:
    generator = random.Random(4)
    for color in COLORS:
        for shape in SHAPES:
            assert read(draw(centered(shape, color, generator), SIDE)) == (color, shape)

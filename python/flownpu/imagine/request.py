# SPDX-License-Identifier: Apache-2.0
"""A request for a picture, and how its size is read; nothing here imports diffusers."""

import re
from dataclasses import dataclass
from typing import Literal

from flownpu.errors import FlowNPUError

Scheduler = Literal["ddim", "ddpm", "dpm++", "euler", "euler-a", "heun", "lcm", "pndm", "unipc"]
CLASSES: dict[Scheduler, str] = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler-a": "EulerAncestralDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "lcm": "LCMScheduler",
    "pndm": "PNDMScheduler",
    "unipc": "UniPCMultistepScheduler",
}
"""The classes of diffusers that need no further package. They are made with the settings of the model's own one."""

STEPS = 20
GUIDANCE = 7.5  # the default of diffusers' pipelines


@dataclass(frozen=True)
class PictureRequest:
    """One picture."""

    prompt: str
    negative: str = ""
    """A text that the picture is not to show; it needs a guidance above 1."""
    steps: int = STEPS
    """Steps of the scheduler; some schedulers run the network once or twice more."""
    guidance: float = GUIDANCE
    """Weight of the prompt (Ho and Salimans, "Classifier-free diffusion guidance", 2022); at 1 and less the network
    computes no second answer without the prompt, in half the time."""
    seed: int = 0
    size: tuple[int, int] | None = None
    """Width and height in pixels; None: the size that the model was trained with."""
    scheduler: Scheduler | None = None
    """None: the model's own."""


def read_size(text: str) -> tuple[int, int]:
    """Width and height of "512x768", or of "512", which is a square.

    Raises:
        FlowNPUError: the text is neither.
    """
    found = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text, re.ASCII)
    if found is None:
        raise FlowNPUError(f"expected a size in pixels, WIDTHxHEIGHT or one number, such as 512x768, got {text!r}")
    return int(found[1]), int(found[2] or found[1])

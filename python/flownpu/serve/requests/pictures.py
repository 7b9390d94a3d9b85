# SPDX-License-Identifier: Apache-2.0
"""Requests for pictures, of OpenAI's API."""

import secrets
from typing import Annotated, Literal

from pydantic import Field

from flownpu.errors import FlowNPUError
from flownpu.imagine.request import GUIDANCE, STEPS, PictureRequest, Scheduler, read_size
from flownpu.serve.errors import invalid
from flownpu.serve.pictures import MOST_PICTURES
from flownpu.serve.requests.openai import Strict

MOST_STEPS = 150
MOST_SEED = 2**63 - 1 - MOST_PICTURES  # torch's generator takes 64 bits with a sign


class ImagesRequest(Strict):
    """OpenAI's /v1/images/generations, and the settings of diffusers' pipelines, which OpenAI's models lack."""

    model: str
    prompt: Annotated[str, Field(min_length=1, max_length=32_000)]  # OpenAI's limit
    n: Annotated[int, Field(ge=1, le=MOST_PICTURES)] | None = None
    size: str | None = None
    """ "512x768", or "auto": the size that the model was trained with."""
    negative_prompt: Annotated[str, Field(max_length=32_000)] = ""
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)] = STEPS
    guidance: Annotated[float, Field(ge=0, le=100)] = GUIDANCE
    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] | None = None
    scheduler: Scheduler | None = None
    # The values of these fields ask for what the server does.
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    background: Literal["auto", "opaque"] | None = None
    quality: Literal["auto", "standard"] | None = None
    stream: Literal[False] | None = None
    # A hint for other servers.
    moderation: str | None = None

    def request(self) -> PictureRequest:
        """The first picture of the request; a seed is drawn if none was given.

        Raises:
            ApiError: the size is none.
        """
        try:
            size = None if self.size in {None, "auto"} else read_size(str(self.size))
        except FlowNPUError as error:
            raise invalid(f"size: {error}", "size", "invalid_value") from error
        seed = secrets.randbelow(2**31) if self.seed is None else self.seed
        return PictureRequest(self.prompt, self.negative_prompt, self.steps, self.guidance, seed, size, self.scheduler)

# SPDX-License-Identifier: Apache-2.0
"""Models that make pictures."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flownpu.errors import FlowNPUError, require
from flownpu.serve.errors import invalid
from flownpu.serve.in_process import InProcess

if TYPE_CHECKING:
    from flownpu.imagine import ImageModel, PictureRequest

MOST_PIXELS = 1024 * 1024
"""Most pixels of one picture: Stable Diffusion's autoencoder has 256 channels of float32 for each pixel, here 1 GiB."""
MOST_PICTURES = 10
"""Pictures of one request; the limit of OpenAI's API."""


class Painter(InProcess["ImageModel"]):
    """One model."""

    def open(self, **settings: Any) -> "ImageModel":
        """Opens the model."""
        model: ImageModel = require("flownpu.imagine", extra="imagine", purpose="Pictures").ImageModel(**settings)
        return model

    async def paint(self, request: "PictureRequest", count: int) -> list[bytes]:
        """Makes pictures, each a file in PNG; the seed of each is one more than that of the picture before.

        Raises:
            ApiError: the picture is too large, `ImageModel.picture` refuses the request, or see `compute`.
        """
        if request.size is not None and request.size[0] * request.size[1] > MOST_PIXELS:
            raise invalid(f"expected {MOST_PIXELS} pixels at most, got {request.size[0]}x{request.size[1]}", "size")

        def work(model: "ImageModel", check: Callable[..., None]) -> list[bytes]:
            return [_png(model, replace(request, seed=request.seed + index), check) for index in range(count)]

        try:
            return await self.compute(work)
        except FlowNPUError as error:
            raise invalid(str(error)) from error


def _png(model: "ImageModel", request: "PictureRequest", check: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    model.picture(request, check).save(file, "PNG")
    return file.getvalue()

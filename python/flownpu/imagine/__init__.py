# SPDX-License-Identifier: Apache-2.0
"""Pictures from texts: pipelines of diffusers whose graphs optimum exported."""

from flownpu.imagine.model import ImageModel
from flownpu.imagine.request import PictureRequest, Scheduler

__all__ = ["ImageModel", "PictureRequest", "Scheduler"]

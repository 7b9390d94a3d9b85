# SPDX-License-Identifier: Apache-2.0
"""Writes how a picture is prepared for the vision tower, in the file that ORT GenAI's processor reads.

GenAI passes the picture to onnxruntime-extensions, which decodes, resizes (antialiased, as Pillow does), rescales and
normalises it. Hugging Face checkpoints have these settings in preprocessor_config.json (transformers 4) or
processor_config.json (transformers 5).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from flownpu.convert.checkpoint import read_json
from flownpu.convert.errors import ConversionError
from flownpu.convert.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from flownpu.convert.vision.tower import VisionTower

# onnxruntime-extensions' names of the filters to resize by, by Pillow's numbers.
_FILTERS = {0: "NEAREST", 1: "LANCZOS", 2: "LINEAR", 3: "CUBIC"}

# The defaults of Gemma3ImageProcessor in transformers.
_DEFAULTS: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": 2,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

_log = logging.getLogger(__name__)


def settings_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that say how pictures are prepared; there may be none."""
    return [path for name in ("preprocessor_config.json", "processor_config.json") if (path := folder / name).is_file()]


def read_image_settings(folder: Path) -> Settings:
    """A checkpoint's settings for pictures; those that it omits have transformers' defaults.

    Raises:
        ConversionError: a file is damaged.
    """
    settings = Settings({}, "preprocessor_config.json")
    for path in settings_files(folder):
        contents = Settings(read_json(path), path.name)
        settings |= contents if path.name.startswith("pre") else contents.section("image_processor")
    return settings.with_defaults(_DEFAULTS)


def image_processor(settings: Settings, tower: VisionTower) -> dict[str, Any]:
    """The contents of the file `genai_config.PROCESSOR_FILE`.

    Args:
        settings: what `read_image_settings` returned.
        tower: the tower that the pictures are for.

    Raises:
        ConversionError: the settings ask for something that GenAI's processor does not do, or for pictures of a size
            that the tower does not take.
    """
    side = tower.image_size
    size = settings.section("size")
    height, width = (size.integer(key) for key in ("height", "width")) if "size" in settings else (side, side)
    resample = settings.integer("resample", least=0)
    steps = [name for name in ("do_resize", "do_rescale", "do_normalize") if not settings.flag(name)]
    if (height, width) != (side, side) or resample not in _FILTERS or steps:
        raise ConversionError(
            f"{settings.where}: expected pictures of {side} x {side}, resized by a filter of "
            f"{', '.join(map(str, _FILTERS))} (Pillow's numbers), rescaled and normalised; got size {height} x "
            f"{width}, resample {resample}" + "".join(f", {name} false" for name in steps)
        )
    mean, std = settings.numbers("image_mean"), settings.numbers("image_std")
    if len(mean) != tower.channels or len(std) != tower.channels or 0 in std:
        raise ConversionError(
            f"{settings.where}: expected image_mean and image_std of {tower.channels} channels, got {mean} and {std}"
        )
    if settings.flag("do_pan_and_scan"):
        _log.warning("do_pan_and_scan is set: ORT GenAI's processor does not crop, pictures are resized as a whole")
    return {
        "processor": {
            "name": "image_processing",
            "transforms": [
                _operation("decode_image", "DecodeImage", color_space="RGB"),
                _operation(
                    "resize",
                    "Resize",
                    interpolation=_FILTERS[resample],
                    width=side,
                    height=side,
                    keep_aspect_ratio=0,
                ),
                _operation("rescale", "Rescale", rescale_factor=settings.number("rescale_factor")),
                _operation("normalize", "Normalize", mean=mean, std=std),
                _operation("to_channels_first", "Permute3D", dims=[2, 0, 1]),
            ],
        }
    }


def _operation(name: str, kind: str, **attributes: Any) -> dict[str, Any]:
    return {"operation": {"name": name, "type": kind, "attrs": attributes}}

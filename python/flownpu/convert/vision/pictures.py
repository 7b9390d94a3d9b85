# SPDX-License-Identifier: Apache-2.0
"""The parts of a model that takes pictures, besides its decoder: a vision model, and how pictures are prepared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import onnx_ir as ir

from flownpu.convert.dense.weights import DenseFormat
from flownpu.convert.dense.writer import stored_bytes, write_weights
from flownpu.convert.errors import ConversionError
from flownpu.convert.genai_config import PROCESSOR_FILE, VISION_FILE
from flownpu.convert.graph.data_file import DataFile
from flownpu.convert.manifest import rounded
from flownpu.convert.vision.configuration import has_vision, image_token_id, read_vision
from flownpu.convert.vision.graph import build_vision_model
from flownpu.convert.vision.image_processor import image_processor, read_image_settings
from flownpu.convert.vision.weights import VisionCheckpoint, vision_weight_plan

if TYPE_CHECKING:
    from pathlib import Path

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.decoder import Decoder
    from flownpu.convert.dense.checkpoint import EncoderCheckpoint
    from flownpu.convert.progress import ProgressCallback
    from flownpu.convert.vision.tower import VisionTower


@dataclass(frozen=True)
class Pictures:
    """A vision tower, its weights, and the settings of its pictures."""

    tower: VisionTower
    source: EncoderCheckpoint
    processor: dict[str, Any]
    dense_format: DenseFormat
    image_token_id: int

    @property
    def bytes(self) -> int:
        """How many bytes `write` writes, rounded up."""
        return stored_bytes(vision_weight_plan(self.tower), self.dense_format)

    def write(self, folder: Path, progress: ProgressCallback) -> dict[str, Any]:
        """Writes vision.onnx, its data and the processor's file; returns the manifest's entries on its quantisation.

        Raises:
            ConversionError: a weight is missing or wrong.
            OSError: the folder cannot be written to.
        """
        text = json.dumps(self.processor, indent=2) + "\n"
        (folder / PROCESSOR_FILE).write_text(text, encoding="utf-8")
        plan, dense = vision_weight_plan(self.tower), self.dense_format
        with DataFile(folder / f"{VISION_FILE}.data") as data:
            tensors, errors = write_weights(data, plan, self.source, dense, stage="vision", progress=progress)
        ir.save(build_vision_model(self.tower, tensors, dense), folder / VISION_FILE)
        return {"format": self.dense_format, "relative_error": rounded(errors)}


def read_pictures(checkpoint: Checkpoint, decoder: Decoder, vision_weights: str | None) -> Pictures | None:
    """The vision part of a checkpoint; None if it has none, or `vision_weights` is "none".

    Args:
        checkpoint: the whole checkpoint.
        decoder: its text decoder.
        vision_weights: "bf16", "int8" or "q4nx"; "none": the text decoder alone; None: "bf16" if there is a tower.

    Raises:
        ConversionError: the tower cannot be converted, or a format was given for a model without a tower.
    """
    if vision_weights == "none" or (vision_weights is None and not has_vision(checkpoint.config)):
        return None
    if not has_vision(checkpoint.config):
        raise ConversionError(
            f'{checkpoint.folder}: vision weights "{vision_weights}" were asked for, and config.json describes no '
            "vision tower (model_type gemma3 with a vision_config)"
        )
    formats: dict[str, DenseFormat] = {name: name for name in get_args(DenseFormat)}
    chosen = formats.get(vision_weights or "bf16")
    if chosen is None:
        raise ConversionError(f'expected vision weights {", ".join(formats)} or none, got "{vision_weights}"')
    tower = read_vision(checkpoint.config, decoder.hidden_size)
    source = VisionCheckpoint(checkpoint)
    source.check(vision_weight_plan(tower))
    processor = image_processor(read_image_settings(checkpoint.folder), tower)
    return Pictures(tower, source, processor, chosen, image_token_id(checkpoint.config))

# SPDX-License-Identifier: Apache-2.0
"""Writes a vision tower's files into a folder: vision.onnx, vision.onnx.data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from flownpu.convert.dense.writer import stored_bytes, write_weights
from flownpu.convert.genai_config import VISION_FILE
from flownpu.convert.graph.data_file import DataFile
from flownpu.convert.progress import silent
from flownpu.convert.vision.graph import build_vision_model
from flownpu.convert.vision.weights import vision_weight_plan

if TYPE_CHECKING:
    from pathlib import Path

    from flownpu.convert.dense.weights import DenseFormat
    from flownpu.convert.dense.writer import EncoderSource
    from flownpu.convert.progress import ProgressCallback
    from flownpu.convert.vision.tower import VisionTower


def vision_bytes(tower: VisionTower, dense_format: DenseFormat) -> int:
    """How many bytes the tower's data file has, rounded up."""
    return stored_bytes(vision_weight_plan(tower), dense_format)


def write_vision(
    folder: Path,
    tower: VisionTower,
    source: EncoderSource,
    dense_format: DenseFormat,
    *,
    progress: ProgressCallback = silent,
) -> dict[str, float]:
    """Writes the tower's graph and weights.

    Args:
        folder: an existing folder.
        tower: what to write.
        source: where the weights' values come from.
        dense_format: how matrices are stored.
        progress: called with a `Progress` whenever a part of the work is done.

    Returns:
        The relative error |W - W'| / |W| (Frobenius norm) of each matrix, by name.

    Raises:
        ConversionError: a weight is missing or wrong.
        OSError: the folder cannot be written to.
    """
    with DataFile(folder / f"{VISION_FILE}.data") as data:
        tensors, errors = write_weights(
            data, vision_weight_plan(tower), source, dense_format, stage="vision", progress=progress
        )
    ir.save(build_vision_model(tower, tensors, dense_format), folder / VISION_FILE)
    return errors

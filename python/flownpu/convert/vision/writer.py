# SPDX-License-Identifier: Apache-2.0
"""Writes a vision tower's files into a folder: vision.onnx, vision.onnx.data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, get_args

import ml_dtypes
import numpy as np
import onnx_ir as ir

from flownpu.convert.genai_config import VISION_FILE
from flownpu.convert.graph.data_file import DataFile, aligned
from flownpu.convert.progress import Stage, silent
from flownpu.convert.vision.graph import DenseFormat, build_vision_model, scale_name
from flownpu.convert.vision.weights import DenseWeight, vision_weight_plan
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from flownpu.convert.progress import ProgressCallback
    from flownpu.convert.vision.tower import VisionTower
    from flownpu.convert.vision.weights import Table, VisionWeight

__all__ = ["VisionSource", "vision_bytes", "write_vision"]

# Codes are -127..127: both signs reach as far, and zero is a code.
_LARGEST_INT8 = 127


class VisionSource(Protocol):
    """Where the values of a tower's weights come from."""

    def matrix(self, weight: DenseWeight) -> NDArray[np.float32]:
        """A product's weight, [M, K]."""

    def table(self, weight: Table) -> NDArray[np.float32]:
        """A tensor that stays float32."""


def vision_bytes(tower: VisionTower, dense_format: DenseFormat) -> int:
    """The bytes of the tower's data file, rounded up."""
    return sum(_stored_bytes(weight, dense_format) for weight in vision_weight_plan(tower))


def write_vision(
    folder: Path,
    tower: VisionTower,
    source: VisionSource,
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
        progress: hears of it.

    Returns:
        The relative error |W - W'| / |W| (Frobenius norm) of each matrix, by name.

    Raises:
        ConversionError: a weight is missing or wrong.
        OSError: the folder cannot be written to.
    """
    assert dense_format in get_args(DenseFormat)
    plan = vision_weight_plan(tower)
    counter = Stage(progress, "vision", sum(w.size for w in plan if isinstance(w, DenseWeight)), "weights")
    errors: dict[str, float] = {}
    tensors: dict[str, ir.TensorProtocol] = {}
    with DataFile(folder / f"{VISION_FILE}.data") as data:
        for weight in plan:
            if isinstance(weight, DenseWeight):
                tensors |= _write_matrix(data, weight, source.matrix(weight), dense_format, errors)
                counter.advance(weight.size)
            else:
                values = source.table(weight)
                tensors[weight.name] = data.write(weight.name, ir.DataType.FLOAT, weight.shape, [values])
    ir.save(build_vision_model(tower, tensors, dense_format), folder / VISION_FILE)
    return errors


def _write_matrix(
    data: DataFile,
    weight: DenseWeight,
    values: NDArray[np.float32],
    dense_format: DenseFormat,
    errors: dict[str, float],
) -> dict[str, ir.TensorProtocol]:
    """Writes a matrix [M, K]; returns its tensors by name and notes its error."""
    name, shape = weight.name, (weight.columns, weight.rows)
    if dense_format == "q4nx":
        quantized = q4nx.quantize(values)
        blocks = q4nx.pack(*quantized, q4nx.NARROW)
        errors[name] = q4nx.relative_error(values, q4nx.dequantize_codes(quantized))
        return {name: data.write(name, ir.DataType.UINT8, blocks.shape, [blocks])}
    if dense_format == "bf16":
        rounded = np.ascontiguousarray(values.T).astype(ml_dtypes.bfloat16)
        errors[name] = q4nx.relative_error(values, rounded.astype(np.float32).T)
        return {name: data.write(name, ir.DataType.BFLOAT16, shape, [rounded.view(np.uint16)])}
    scale, codes = _int8(values)
    errors[name] = q4nx.relative_error(values, scale[:, None] * codes)
    return {
        name: data.write(name, ir.DataType.INT8, shape, [np.ascontiguousarray(codes.T)]),
        scale_name(name): data.write(scale_name(name), ir.DataType.FLOAT, scale.shape, [scale]),
    }


def _int8(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """Scales [M] and codes [M, K] of a matrix, w = scale code: the largest of a row is a code of 127."""
    scale = np.abs(values).max(axis=1) / np.float32(_LARGEST_INT8)
    scale[scale == 0] = 1  # a row of zeros
    return scale, np.rint(values / scale[:, None]).astype(np.int8)


def _stored_bytes(weight: VisionWeight, dense_format: DenseFormat) -> int:
    if not isinstance(weight, DenseWeight):
        return aligned(4 * math.prod(weight.shape))
    if dense_format == "q4nx":
        return aligned(math.prod(q4nx.blocks_shape(weight.rows, weight.columns, q4nx.NARROW)))
    return aligned(2 * weight.size) if dense_format == "bf16" else aligned(weight.size) + aligned(4 * weight.rows)

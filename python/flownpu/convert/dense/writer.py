# SPDX-License-Identifier: Apache-2.0
"""Writes an encoder's weights into a data file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args

import ml_dtypes
import numpy as np
import onnx_ir as ir

from flownpu.convert.dense.weights import DenseFormat, DenseWeight, WordTable, scale_name
from flownpu.convert.graph.data_file import aligned
from flownpu.convert.progress import Stage
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from flownpu.convert.dense.checkpoint import EncoderCheckpoint
    from flownpu.convert.dense.weights import EncoderWeight
    from flownpu.convert.graph.data_file import DataFile
    from flownpu.convert.progress import ProgressCallback

# Codes are -127..127, the same number for both signs.
_LARGEST_INT8 = 127
# How many rows of a table of words are in memory at a time: 4 MB with 1024 columns.
_WORDS_AT_ONCE = 1024


def stored_bytes(plan: Sequence[EncoderWeight], dense_format: DenseFormat) -> int:
    """How many bytes `write_weights` writes, rounded up."""
    return sum(_stored_bytes(weight, dense_format) for weight in plan)


def write_weights(
    data: DataFile,
    plan: Sequence[EncoderWeight],
    source: EncoderCheckpoint,
    dense_format: DenseFormat,
    *,
    stage: str,
    progress: ProgressCallback,
) -> tuple[dict[str, ir.TensorProtocol], dict[str, float]]:
    """Writes the weights of a plan.

    Args:
        data: the file to write into.
        plan: which weights.
        source: where their values come from.
        dense_format: how matrices are stored.
        stage: the name of the stage that is reported.
        progress: called with a `Progress` whenever a part of the work is done.

    Returns:
        The tensors by name, and the relative error |W - W'| / |W| (Frobenius norm) of each matrix.

    Raises:
        ConversionError: a weight is missing or wrong.
        OSError: the file cannot be written.
    """
    assert dense_format in get_args(DenseFormat)
    counter = Stage(progress, stage, sum(w.size for w in plan if isinstance(w, DenseWeight)), "weights")
    errors: dict[str, float] = {}
    tensors: dict[str, ir.TensorProtocol] = {}
    for weight in plan:
        if isinstance(weight, DenseWeight):
            tensors |= _write_matrix(data, weight, source.matrix(weight), dense_format, errors)
            counter.advance(weight.size)
        elif isinstance(weight, WordTable):
            shape, parts = (weight.rows, weight.columns), _words(weight, source)
            tensors[weight.name] = data.write(weight.name, ir.DataType.BFLOAT16, shape, parts)
        else:
            values = source.table(weight)
            tensors[weight.name] = data.write(weight.name, ir.DataType.FLOAT, weight.shape, [values])
    return tensors, errors


def _words(weight: WordTable, source: EncoderCheckpoint) -> Iterator[NDArray[np.uint16]]:
    for start in range(0, weight.rows, _WORDS_AT_ONCE):
        values = source.words(weight, start, min(weight.rows, start + _WORDS_AT_ONCE))
        yield values.astype(ml_dtypes.bfloat16).view(np.uint16)


def _write_matrix(
    data: DataFile,
    weight: DenseWeight,
    values: NDArray[np.float32],
    dense_format: DenseFormat,
    errors: dict[str, float],
) -> dict[str, ir.TensorProtocol]:
    """Writes a matrix [M, K]; returns its tensors by name and puts its relative error into `errors`."""
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
    """Scales [M] and codes [M, K] of a matrix, w = scale * code: a row's largest magnitude has the code 127 or -127."""
    scale = np.abs(values).max(axis=1) / np.float32(_LARGEST_INT8)
    scale[scale == 0] = 1  # a row of zeros
    return scale, np.rint(values / scale[:, None]).astype(np.int8)


def _stored_bytes(weight: EncoderWeight, dense_format: DenseFormat) -> int:
    if isinstance(weight, WordTable):
        return aligned(2 * weight.rows * weight.columns)
    if not isinstance(weight, DenseWeight):
        return aligned(4 * math.prod(weight.shape))
    if dense_format == "q4nx":
        return aligned(math.prod(q4nx.blocks_shape(weight.rows, weight.columns, q4nx.NARROW)))
    return aligned(2 * weight.size) if dense_format == "bf16" else aligned(weight.size) + aligned(4 * weight.rows)

# SPDX-License-Identifier: Apache-2.0
"""Writes the weights of a converted model in the one 4-bit form that every peer takes, for the peers' own converters.

This form is 4 bits per weight and a scale for each 32 weights: w = scale * (code - 8). llama.cpp calls it Q4_0,
ONNX Runtime MatMulNBits without zero points, OpenVINO a symmetric int4 weight with groups of 32. Symmetric Q4NX is the
same, and its codes and scales are written as they are. Other Q4NX has minima, too (5 bits per weight, not 4.5), so its
values are encoded again; what this costs in accuracy does not matter to a measurement of speed. All peers hold the same
values, bit for bit.
"""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from flownpu.errors import FlowNPUError
from flownpu.model.converted import ConvertedModel
from flownpu.ops import q4nx
from flownpu.peers.exported import GROUP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["ExportProgress", "encode", "export_model", "taken_over"]

ExportProgress: TypeAlias = "Callable[[int, int], None]"
"""Called with the number of weights that are written and that of all."""

# Rows that are encoded at once: with 8192 columns, 34 MB of float32.
_ROWS_AT_ONCE = 1024


def encode(weight: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """The packed codes and scales of a weight [rows, columns], as in `exported.py`.

    The scale is the value of largest magnitude in a group divided by -8, so that this value has a code of its own; it
    is rounded to float16 before the codes are chosen.
    """
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // GROUP, GROUP)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=2, keepdims=True), axis=2)
    scale = (extreme / -8).astype(np.float16)
    inverse = np.divide(1, scale, out=np.zeros(scale.shape, np.float32), where=scale != 0, dtype=np.float32)
    codes = np.clip(np.rint(groups * inverse) + 8, 0, 15).astype(np.uint8).reshape(rows, columns)
    return _packed(codes), scale[..., 0]


def taken_over(weight: q4nx.Quantized) -> tuple[NDArray[np.uint8], NDArray[np.float16]] | None:
    """The packed codes and scales of a weight as they are, if it is symmetric and its scales fit float16; else None."""
    with np.errstate(over="ignore"):
        scale = weight.scale.astype(np.float16)
    if not q4nx.is_symmetric(weight) or (scale.astype(np.float32) != weight.scale.astype(np.float32)).any():
        return None
    return _packed(weight.codes), scale


def export_model(model: Path, output: Path, *, progress: ExportProgress = lambda _done, _total: None) -> None:
    """Writes a converted model's weights in the form of `exported.py`.

    Args:
        model: a folder that `flownpu convert` made of a checkpoint, or `flownpu make-model`.
        output: an existing folder.
        progress: called with the number of weights that are written and that of all.

    Raises:
        FlowNPUError: the graph is not one that `flownpu convert` writes, or a width is no multiple of 32.
        MissingDependencyError: onnx_ir is not installed.
    """
    graph = ConvertedModel(model)
    (output / "decoder.json").write_text(json.dumps(graph.decoder, indent=1) + "\n", encoding="utf-8")
    parts = graph.projections()
    total, done = sum(part.size for part in parts), 0
    for part in parts:
        name, columns, count = part.name, part.columns, part.experts * part.rows
        if columns % GROUP:
            raise FlowNPUError(f"{model}: {name} has {columns} columns, the peers need a multiple of {GROUP}")
        codes = np.lib.format.open_memmap(output / f"{name}.codes.npy", "w+", np.uint8, (count, columns // 2))
        scales = np.empty((count, columns // GROUP), np.float16)
        for expert, start in product(range(part.experts), range(0, part.rows, _ROWS_AT_ONCE)):
            rows = min(_ROWS_AT_ONCE, part.rows - start)
            first, place = part.first + expert * part.stride + start, expert * part.rows + start
            weight = graph.quantized(part.initializer, first, first + rows, columns)
            given = taken_over(weight) or encode(q4nx.dequantize_codes(weight))
            codes[place : place + rows], scales[place : place + rows] = given
            done += rows * columns
            progress(done, total)
        np.save(output / f"{name}.scales.npy", scales)
    for name, values in graph.vectors().items():
        np.save(output / f"{name}.npy", values)


def _packed(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)

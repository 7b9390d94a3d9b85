# SPDX-License-Identifier: Apache-2.0
"""Reads the experts of checkpoints in which rows of gate and up projections take turns, as those of gpt-oss.

    mlp.experts.gate_up_proj      floats [E, D, 2 I], transposed: columns 2 i are of gates, 2 i + 1 of up projections
    mlp.experts.down_proj         floats [E, I, D], transposed
    ..gate_up_proj_bias           floats [E, 2 I], in the same turns;  ..down_proj_bias floats [E, D]

or in place of the first two, as they are released, in MXFP4 (`tables.read_mxfp4`), which keeps its codes

    ..gate_up_proj_blocks         uint8 [E, 2 I, D / 32, 16];  ..gate_up_proj_scales uint8 [E, 2 I, D / 32]
    ..down_proj_blocks            uint8 [E, D, I / 32, 16];  ..down_proj_scales uint8 [E, D, I / 32]

To the conversion each is a stack of matrices [E * rows, columns], with an expert's gate before its up projection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flownpu.convert.errors import ConversionError
from flownpu.convert.quantise import Stored
from flownpu.convert.sources.checkpoint_weights import CheckpointWeights
from flownpu.convert.sources.tables import read_mxfp4
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.quantise import Carried

_EXPERTS = ".mlp.experts."
_IN_TURNS = ".gate_up_proj"
_BLOCKS, _SCALES = "_blocks", "_scales"


class ExpertsInTurns(CheckpointWeights):
    """A checkpoint's tensors, with the experts of every layer in the order of the graph."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Finds the tensors' common prefix; raises as CheckpointWeights."""
        super().__init__(checkpoint)
        self._names = set(checkpoint.names())
        self._rows: dict[str, tuple[int, int]] = {}  # of an expert, and its columns

    def check(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises ConversionError unless the tensor exists, with codes or without, and has that shape."""
        name = self.locate(tensor)
        if _EXPERTS not in tensor:
            super().check(tensor, shape)
        elif len(shape) == 1:
            self.checkpoint.check_shape(name, (self._experts(name), shape[0] // self._experts(name)))
        elif self._is_packed(name):
            experts = self.checkpoint.shape(name + _BLOCKS)[0]
            rows, columns = shape[0] // experts, shape[1]
            groups = -(-columns // q4nx.GROUP)
            self.checkpoint.check_shape(name + _BLOCKS, (experts, rows, groups, q4nx.GROUP // 2))
            self.checkpoint.check_shape(name + _SCALES, (shape[0], groups))
            if columns % q4nx.GROUP:
                raise ConversionError(
                    f"{self.checkpoint.folder}: {name}: expected a multiple of {q4nx.GROUP} columns, got {columns}"
                )
            self._rows[tensor] = rows, columns
        else:
            stored, across = self.checkpoint.shape(name)[0], shape[1]
            experts = max(stored // across, 1)
            self.checkpoint.check_shape(name, (experts * across, shape[0] // experts))
            self._rows[tensor] = shape[0] // experts, across

    def stored(self, tensor: str) -> Stored:
        """How a weight is stored; `check` must have been called for it."""
        if tensor in self._rows and self._is_packed(self.locate(tensor)):
            return Stored("mxfp4", q4nx.TABLE, keeps_codes=True)
        return super().stored(tensor)

    def rows(self, tensor: str, first: int, stop: int) -> NDArray[np.float32] | Carried:
        """Rows first..stop-1 of a weight, of one expert's gate or up projection; raises as CheckpointWeights.

        Raises:
            ValueError: a scale is not a number.
        """
        if tensor not in self._rows:
            return super().rows(tensor, first, stop)
        name, (each, columns) = self.locate(tensor), self._rows[tensor]
        expert, start = divmod(first, each)
        chosen = slice(start, start + stop - first)
        if _IN_TURNS in tensor:
            is_up, start = divmod(start, each // 2)
            chosen = slice(2 * start + is_up, 2 * (start + stop - first) + is_up - 1, 2)
        if self._is_packed(name):
            offset = expert * each
            rows = slice(offset + chosen.start, offset + chosen.stop, chosen.step)
            scales = self.checkpoint.part(name + _SCALES, rows)
            blocks = self.checkpoint.part(name + _BLOCKS, slice(expert, expert + 1), chosen)[0]
            return read_mxfp4(blocks, scales)
        across = slice(expert * columns, (expert + 1) * columns)
        return np.ascontiguousarray(self.checkpoint.part(name, across, chosen).T, np.float32)

    def vector(self, tensor: str, size: int) -> NDArray[np.float32]:
        """A whole one-dimensional tensor, or the biases of all experts, one after the other."""
        if _EXPERTS not in tensor:
            return super().vector(tensor, size)
        name = self.locate(tensor)
        values: NDArray[Any] = self.checkpoint.part(name).astype(np.float32)
        if not np.isfinite(values).all():
            raise ConversionError(f"{self.checkpoint.folder}: tensor {name} has a value that is not finite")
        if _IN_TURNS in tensor:
            values = values.reshape(len(values), -1, 2).transpose(0, 2, 1)
        return values.ravel()

    def _experts(self, name: str) -> int:
        return max(self.checkpoint.shape(name)[0], 1)

    def _is_packed(self, name: str) -> bool:
        return name + _BLOCKS in self._names

    def _whole(self, name: str) -> str:
        return name.removesuffix(_BLOCKS).removesuffix(_SCALES) if _EXPERTS in name else name

# SPDX-License-Identifier: Apache-2.0
"""Reads weights whose codes of 4 bits are places in a table of 16 values.

    bitsandbytes  weight uint8 [M K / 2, 1]: the codes of all rows, two in a byte, the first in its high nibble
                  weight.quant_map float32 [16]: the table, from -1 to 1 (NF4 of arXiv 2305.14314, or FP4)
                  weight.absmax float32 [M K / block]: the scales of as many codes that follow one another; or
                  uint8, places in weight.nested_quant_map float32 [256]; what they stand for is multiplied by
                  weight.nested_absmax of each nested block of scales, and an offset is added
                  weight.quant_state.bitsandbytes__nf4, or __fp4: uint8, JSON with the sizes of blocks and the offset
    MXFP4         blocks uint8 [.., K / 32, 16]: codes of E2M1, the first of a byte in its low nibble
                  scales uint8 [.., K / 32]: e + 127; w = 2^e value, which is exact in Q4NX with doubled values

Q4NX's tables have int8 values. A value v of bitsandbytes becomes the nearest multiple of 1 / 127, and its scale, which
is then divided by 127, is rounded to bf16: a weight is off by at most (0.5 / 127 + 2^-8 |v|) times its scale.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flownpu.convert.errors import ConversionError
from flownpu.convert.quantise import Carried, Stored
from flownpu.convert.sources.checkpoint_weights import CheckpointWeights
from flownpu.convert.sources.packing import INSTEAD
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.sources.packing import Packing

_KINDS = ("nf4", "fp4")
_STATE = "quant_state.bitsandbytes__"
_LARGEST = 127
# Twice the values of E2M1: a sign, two bits of exponent with the bias 1, one of mantissa.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_E8M0_NAN = 255


class _Packed(NamedTuple):
    kind: str
    columns: int
    block: int  # codes that share a scale
    scales: NDArray[np.float32]  # of all blocks


class BitsAndBytesWeights(CheckpointWeights):
    """The tensors of a checkpoint whose projections bitsandbytes rounded to 4 bits."""

    def __init__(self, checkpoint: Checkpoint, packing: Packing) -> None:
        """Finds the tensors' common prefix; raises as CheckpointWeights."""
        super().__init__(checkpoint)
        del packing  # each weight has its own
        self._names = set(checkpoint.names())
        self._packed: dict[str, _Packed] = {}

    def check(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises ConversionError unless the tensor exists, packed or not, and has that shape."""
        name = self.locate(tensor)
        kind = next((kind for kind in _KINDS if f"{name}.{_STATE}{kind}" in self._names), None)
        if kind is None:
            super().check(tensor, shape)
            return
        rows, columns = shape
        state = self._state(f"{name}.{_STATE}{kind}")
        block = state.get("blocksize")
        if not isinstance(block, int) or block < 1 or block % q4nx.GROUP or columns % q4nx.GROUP:
            raise ConversionError(
                f"{self.checkpoint.folder}: {name}: expected columns and a blocksize in multiples of {q4nx.GROUP}, for "
                f"Q4NX has one scale for {q4nx.GROUP} columns, got {columns} and {block}; {INSTEAD}"
            )
        self.checkpoint.check_shape(name, (rows * columns // 2, 1))
        self.checkpoint.check_shape(f"{name}.quant_map", (q4nx.LARGEST_CODE + 1,))
        self.checkpoint.check_shape(f"{name}.absmax", (-(-rows * columns // block),))
        self._packed[tensor] = _Packed(kind, columns, block, self._scales(name, state))

    def stored(self, tensor: str) -> Stored:
        """How a weight is stored; `check` must have been called for it."""
        if tensor not in self._packed:
            return super().stored(tensor)
        return Stored(self._packed[tensor].kind, q4nx.TABLE, keeps_codes=True)

    def rows(self, tensor: str, first: int, stop: int) -> NDArray[np.float32] | Carried:
        """Rows first..stop-1 of a weight; raises as CheckpointWeights, and ValueError if a scale is not finite."""
        if tensor not in self._packed:
            return super().rows(tensor, first, stop)
        name, packed = self.locate(tensor), self._packed[tensor]
        half = packed.columns // 2
        pairs = self.checkpoint.part(name, slice(first * half, stop * half))
        codes = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(stop - first, packed.columns)
        # A block may end within a row, but not within 32 columns.
        groups = np.arange(first * packed.columns, stop * packed.columns, q4nx.GROUP) // packed.block
        scale = packed.scales[groups].reshape(stop - first, -1)
        table = self.checkpoint.rows(f"{name}.quant_map", 0, q4nx.LARGEST_CODE + 1).astype(np.float32)
        values = np.rint(table * _LARGEST).astype(np.int8)
        quantized = q4nx.from_affine(values[codes], scale / np.float32(_LARGEST), bits=8)
        return Carried(quantized, np.repeat(scale, q4nx.GROUP, axis=1) * table[codes])

    def _state(self, name: str) -> dict[str, Any]:
        try:
            state = json.loads(self.checkpoint.part(name).tobytes())
        except ValueError as error:
            raise ConversionError(f"{self.checkpoint.folder}: tensor {name}: expected JSON: {error}") from error
        if not isinstance(state, dict):
            raise ConversionError(f"{self.checkpoint.folder}: tensor {name}: expected a JSON object, got {state!r}")
        return state

    def _scales(self, name: str, state: dict[str, Any]) -> NDArray[np.float32]:
        """The scales of all blocks of a weight."""
        scales = self.checkpoint.part(f"{name}.absmax")
        if scales.dtype != np.uint8:
            return scales.astype(np.float32)
        nested, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if not isinstance(nested, int) or nested < 1 or not isinstance(offset, float):
            raise ConversionError(
                f"{self.checkpoint.folder}: {name}: expected a nested_blocksize and a nested_offset beside scales of "
                f"uint8, got {nested!r} and {offset!r}; {INSTEAD}"
            )
        self.checkpoint.check_shape(f"{name}.nested_quant_map", (1 << 8,))
        self.checkpoint.check_shape(f"{name}.nested_absmax", (-(-scales.size // nested),))
        places, factors = (
            self.checkpoint.part(f"{name}.nested_{part}").astype(np.float32) for part in ("quant_map", "absmax")
        )
        return np.asarray(places[scales] * factors[np.arange(scales.size) // nested] + np.float32(offset))

    def _whole(self, name: str) -> str:
        return name.partition(".weight.")[0] + ".weight" if ".weight." in name else name


def read_mxfp4(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Carried:
    """Rows of a weight in MXFP4, as gpt-oss's checkpoints have it (`.._blocks` and `.._scales`), with their codes.

    Args:
        blocks: uint8 [.., K / 32, 16].
        scales: uint8 [.., K / 32].

    Returns:
        All rows, one after the other, exactly; `q4nx.pack` gives them a table.

    Raises:
        ValueError: the two do not fit one another, or a scale is not a number (255).
    """
    if blocks.shape != (*scales.shape, q4nx.GROUP // 2):
        raise ValueError(f"expected blocks {[*scales.shape, q4nx.GROUP // 2]} for these scales, got {[*blocks.shape]}")
    if (scales == _E8M0_NAN).any():
        raise ValueError("expected every scale to be a number, got NaN (255)")
    exponents = scales.reshape(-1, scales.shape[-1]).astype(np.int32) - 128  # values are doubled
    places = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*exponents.shape, q4nx.GROUP)
    codes, scale = _E2M1[places], np.ldexp(np.float32(1), exponents)
    exact = np.asarray(scale[..., None] * codes, np.float32)
    columns = exponents.shape[1] * q4nx.GROUP
    return Carried(q4nx.from_affine(codes.reshape(-1, columns), scale, bits=8), exact.reshape(-1, columns))

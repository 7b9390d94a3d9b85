# SPDX-License-Identifier: Apache-2.0
"""The weights of checkpoints with codes of 4 or 8 bits in groups of columns, which Q4NX keeps.

    W[m, k] = scale[m, k / group] * (code[m, k] - zero[m, k / group])

Q4NX has a scale s and a minimum for each 32 columns: those of a group are repeated, with s rounded to bf16, and the
minimum rounded once more. Of 4 bits it is -s * zero, which is exact if the zero point is a power of two. Each rounding
is off by at most 2^-8 of the value, so a weight is off by at most 2^-8 (|code - zero| + zero) scale: less than 12 % of
a step. Of 8 bits codes are stored less 128, and the minimum is s * (128 - zero), which is small.

If all zero points of a weight are 8 (of 8 bits 128), Q4NX needs no minima; zero points are few, so that is checked
beforehand. If the columns of a group are not neighbours (act-order), there are no 32 columns with one scale; such a
weight is dequantised and quantised again.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from flownpu.convert.errors import ConversionError
from flownpu.convert.quantise import Carried, Stored, layout_of_bits
from flownpu.convert.sources.checkpoint_weights import CheckpointWeights
from flownpu.convert.sources.packing import INSTEAD
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.sources.packing import Packing


class PrequantisedWeights(CheckpointWeights):
    """A quantised checkpoint's tensors by row: packed weights keep their codes, others are floats."""

    parts: ClassVar[tuple[str, ...]]
    """The last parts of the names of a packed weight's tensors: codes, zero points, scales, columns' groups, others."""

    def __init__(self, checkpoint: Checkpoint, packing: Packing) -> None:
        """Finds the tensors' common prefix.

        Raises:
            ConversionError: there is no embedding with any of the known prefixes.
        """
        super().__init__(checkpoint)
        self.packing = packing
        self.names = set(checkpoint.names())
        self._order: dict[str, NDArray[np.int64]] = {}
        self._symmetric: set[str] = set()

    @abstractmethod
    def check_parts(self, tensor: str, rows: int, columns: int, groups: int) -> None:
        """Raises ConversionError unless codes, zero points and scales exist, with the shapes that they should have."""

    @abstractmethod
    def codes(self, tensor: str, first: int, stop: int) -> NDArray[np.uint8]:
        """The codes of rows first..stop-1 of a packed weight, uint8 [stop - first, columns]; raises as `rows`."""

    @abstractmethod
    def scales(self, tensor: str, first: int, stop: int) -> NDArray[np.float32]:
        """The scales of rows first..stop-1 of a packed weight, float32 [stop - first, groups]; raises as `rows`."""

    @abstractmethod
    def zeros(self, tensor: str, rows: int) -> NDArray[np.float32] | None:
        """The zero points of all rows, float32 [rows, groups]; None: in the middle of the codes. Raises as `rows`."""

    def check(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises ConversionError unless the tensor exists, packed or not, and has that shape."""
        if not self._is_packed(tensor):
            super().check(tensor, shape)
            return
        rows, columns = shape
        groups = self.packing.groups(columns)
        words = self.packing.in_a_word
        if rows % words or columns % words:
            raise ConversionError(
                f"{self.checkpoint.folder}: {self.part(tensor, self.parts[0])}: expected rows and columns in multiples "
                f"of {words}, got {rows} and {columns}; {INSTEAD}"
            )
        self.check_parts(tensor, rows, columns, groups)
        self._read_order(tensor, columns, groups)
        zeros = self.zeros(tensor, rows)
        if tensor not in self._order and (zeros is None or bool((zeros == self.packing.middle).all())):
            self._symmetric.add(tensor)

    def rows(self, tensor: str, first: int, stop: int) -> NDArray[np.float32] | Carried:
        """Rows first..stop-1 of a weight.

        Raises:
            ConversionError: a part is missing or has another type, or a stored zero point is ambiguous (15 in "gptq").
            ValueError: a scale is not finite.
        """
        if not self._is_packed(tensor):
            return super().rows(tensor, first, stop)
        codes, scales = self.codes(tensor, first, stop), self.scales(tensor, first, stop)
        zeros = self.zeros(tensor, stop)
        zeros = np.full_like(scales, self.packing.middle) if zeros is None else zeros[first:stop]
        columns, bits = codes.shape[1], self.packing.bits
        if tensor in self._order:
            order = self._order[tensor]
            return scales[:, order] * (codes - zeros[:, order])
        if not np.isfinite(scales).all():
            raise ValueError("expected every scale to be finite, got NaN or infinity")
        rounded = scales.astype(q4nx.BFLOAT16).astype(np.float32)
        shift = self.packing.middle if bits == 8 else 0  # 8-bit codes are signed in Q4NX
        parameters = (self._by_group(values, columns) for values in (rounded, rounded * (shift - zeros)))
        quantized = q4nx.from_affine(codes.astype(np.int16) - shift, *parameters, bits=bits)
        size = columns if self.packing.group_size < 0 else self.packing.group_size
        scales, zeros = (np.repeat(values, size, axis=1)[:, :columns] for values in (scales, zeros))
        return Carried(quantized, scales * (codes - zeros))

    def stored(self, tensor: str) -> Stored:
        """How a weight is stored; `check` must have been called for it."""
        if not self._is_packed(tensor):
            return super().stored(tensor)
        if tensor in self._order:
            layout = q4nx.EIGHT_BITS if self.packing.bits == 8 else None
            reason = ", for columns that share a scale are not neighbours (desc_act)"
            return Stored("act-order", layout, reason=reason)
        layout = layout_of_bits(self.packing.bits, minima=tensor not in self._symmetric)
        return Stored(self.packing.method, layout, keeps_codes=True)

    def part(self, tensor: str, part: str) -> str:
        """The name of a part of a packed weight."""
        return self.locate(tensor).removesuffix("weight") + part

    def words(self, name: str, *slices: slice) -> NDArray[np.uint32]:
        """Some rows and columns of a tensor of words.

        Raises:
            ConversionError: it has another type.
        """
        words = self.checkpoint.part(name, *slices)
        if words.dtype != np.int32:
            raise ConversionError(
                f"{self.checkpoint.folder}: tensor {name} has type {words.dtype}, expected int32; {INSTEAD}"
            )
        return words.view(np.uint32)

    def _whole(self, name: str) -> str:
        module, _, part = name.rpartition(".")
        return f"{module}.weight" if part in self.parts and f"{module}.{self.parts[0]}" in self.names else name

    def _is_packed(self, tensor: str) -> bool:
        return self.part(tensor, self.parts[0]) in self.names

    def _by_group(self, values: NDArray[np.float32], columns: int) -> NDArray[np.float32]:
        """Repeats values of groups [rows, groups], so that there is one for each 32 columns."""
        of_q4nx = -(-columns // q4nx.GROUP)
        size = self.packing.group_size
        repeats = of_q4nx if size < 0 else size // q4nx.GROUP
        repeated: NDArray[np.float32] = np.repeat(values, repeats, axis=1)[:, :of_q4nx]
        return repeated

    def _read_order(self, tensor: str, columns: int, groups: int) -> None:
        """Puts the group of each column into `_order` if the columns of a group are not neighbours."""
        name = self.part(tensor, self.parts[3])
        if name not in self.names:
            return
        self.checkpoint.check_shape(name, (columns,))
        order = self.checkpoint.integers(name)
        if order.min() < 0 or order.max() >= groups:
            raise ConversionError(
                f"{self.checkpoint.folder}: {name} has {order.min()}..{order.max()}, expected groups 0..{groups - 1}"
            )
        neighbours = np.arange(columns) // (columns if self.packing.group_size < 0 else self.packing.group_size)
        if (order != neighbours).any():
            self._order[tensor] = order

# SPDX-License-Identifier: Apache-2.0
"""Reads the weights of AWQ and GPTQ checkpoints, whose 4-bit codes Q4NX keeps.

Both formats store a weight W[M, K] transposed, with a scale and a zero point for each group of columns of a row:

    W[m, k] = scale[k / group, m] * (code[k, m] - zero[k / group, m])

    AWQ ("gemm")    qweight int32 [K, M / 8]      eight rows of W in a word, in the order 0 2 4 6 1 3 5 7
                    qzeros  int32 [K / group, M / 8], the same
    GPTQ            qweight int32 [K / 8, M]      eight columns of W in a word, in their order
                    qzeros  int32 [K / group, M / 8], eight rows, in their order; the zero point less 1, except in the
                            format "gptq_v2"
                    g_idx   int32 [K], the group of each column
    both            scales  float16 [K / group, M]

Q4NX has a scale s and a minimum for each 32 columns: those of a group are repeated, with s rounded to bf16, and
-s * zero rounded once more (which is exact if the zero point is a power of two). Each rounding is off by at most 2^-8
of the value, so a weight is off by at most 2^-8 (|code - zero| + zero) scale: less than 12 % of a step. If all zero
points of a weight are 8, as in GPTQ with sym=true, Q4NX needs no minima; zero points are few, so that is checked
beforehand. If the columns of a group are not neighbours (act-order), there are no 32 columns with one scale; such a
weight is dequantised and quantised again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.convert.checkpoint import read_json
from flownpu.convert.errors import ConversionError
from flownpu.convert.quantise import Carried
from flownpu.convert.settings import LARGEST
from flownpu.convert.sources.checkpoint_weights import CheckpointWeights
from flownpu.convert.weights import ProjectionWeight
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.weights import Weight

_BITS = 4
_IN_A_WORD = 32 // _BITS
# The factor that makes a word of eight equal values from a 4-bit value.
_IN_EACH_PLACE = 0x11111111
# The zero point of a weight whose minima are -8 times its scales.
_SYMMETRIC_ZERO = 8
# The indices of eight values in the order of their bits in a word, from the lowest four on.
_ORDER = {"awq": (0, 2, 4, 6, 1, 3, 5, 7), "gptq": tuple(range(_IN_A_WORD))}
_FORMATS = {"awq": ("gemm",), "gptq": ("gptq", "gptq_v2")}
# The last parts of the names of a packed weight's tensors.
_PARTS = ("qweight", "qzeros", "scales", "g_idx", "bias")
_INSTEAD = "convert the checkpoint that it was made of"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packing:
    """How a checkpoint's weights are quantised."""

    method: str
    """"awq" or "gptq"."""
    group_size: int
    """How many columns share a scale; -1: all."""
    zero_offset: int = 0
    """A number that is added to stored zero points."""

    def groups(self, columns: int) -> int:
        """How many groups a row of that many columns has."""
        return 1 if self.group_size < 0 else -(-columns // self.group_size)


def read_packing(checkpoint: Checkpoint) -> Packing | None:
    """How the checkpoint is quantised, by the quantization_config of config.json; None if it is not.

    Raises:
        ConversionError: it is quantised in a way whose codes Q4NX cannot keep.
    """
    settings, file = checkpoint.config.get("quantization_config"), "config.json: quantization_config"
    older = checkpoint.folder / "quantize_config.json"
    if settings is None and older.is_file():
        settings, file = {"quant_method": "gptq", **read_json(older)}, older.name
    if settings is None:
        return None
    where = f"{checkpoint.folder}: {file}"
    if not isinstance(settings, dict):
        raise ConversionError(f"{where}: expected a JSON object, got {settings!r}")
    return _packing({key: value for key, value in settings.items() if value is not None}, where)


def _packing(settings: Mapping[str, Any], where: str) -> Packing:
    method = str(settings.get("quant_method")).lower()
    if method not in _FORMATS:
        raise ConversionError(f'{where}: expected quant_method awq or gptq, got "{method}"; {_INSTEAD}')
    bits = settings.get("bits", settings.get("w_bit", _BITS))
    if bits != _BITS:
        raise ConversionError(f"{where}: expected 4 bits, got {bits}; {_INSTEAD}")
    group_size = settings.get("group_size", settings.get("q_group_size", 128))
    fits = isinstance(group_size, int) and 1 <= group_size <= LARGEST and group_size % q4nx.GROUP == 0
    if not fits and group_size != -1:
        raise ConversionError(
            f"{where}: expected a group_size that is a multiple of {q4nx.GROUP}, for Q4NX has one scale for "
            f"{q4nx.GROUP} columns, got {group_size}; {_INSTEAD}"
        )
    formats = _FORMATS[method]
    # transformers 5 calls it "format", and reads the older name first.
    older = "version" if method == "awq" else "checkpoint_format"
    key = older if older in settings else "format"
    stored = str(settings.get(key, formats[0])).lower()
    if stored not in formats:
        raise ConversionError(f'{where}: expected {key} {" or ".join(formats)}, got "{stored}"; {_INSTEAD}')
    if method == "awq" and settings.get("zero_point") is False:
        raise ConversionError(f"{where}: expected zero_point true, got false; {_INSTEAD}")
    return Packing(method, group_size, zero_offset=int(stored == "gptq"))


class PrequantisedWeights(CheckpointWeights):
    """A quantised checkpoint's tensors by row: packed weights keep their codes, others are floats."""

    def __init__(self, checkpoint: Checkpoint, packing: Packing) -> None:
        """Finds the tensors' common prefix.

        Raises:
            ConversionError: there is no embedding with any of the known prefixes.
        """
        super().__init__(checkpoint)
        self._packing = packing
        self._names = set(checkpoint.names())
        self._order: dict[str, NDArray[np.int64]] = {}
        self._symmetric: set[str] = set()

    def check(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises ConversionError unless the tensor exists, packed or not, and has that shape."""
        if not self._is_packed(tensor):
            super().check(tensor, shape)
            return
        rows, columns = shape
        groups = self._packing.groups(columns)
        awq = self._packing.method == "awq"
        if rows % _IN_A_WORD or columns % _IN_A_WORD:
            raise ConversionError(
                f"{self.checkpoint.folder}: {self._part(tensor, 'qweight')}: expected rows and columns in multiples of "
                f"{_IN_A_WORD}, got {rows} and {columns}; {_INSTEAD}"
            )
        packed = (columns, rows // _IN_A_WORD) if awq else (columns // _IN_A_WORD, rows)
        self.checkpoint.check_shape(self._part(tensor, "qweight"), packed)
        self.checkpoint.check_shape(self._part(tensor, "qzeros"), (groups, rows // _IN_A_WORD))
        self.checkpoint.check_shape(self._part(tensor, "scales"), (groups, rows))
        self._read_order(tensor, columns, groups)
        if tensor not in self._order and self._has_one_zero(tensor, rows, _SYMMETRIC_ZERO):
            self._symmetric.add(tensor)

    def check_places(self, plan: Sequence[Weight]) -> None:
        """Raises ConversionError if the layers have tensors that the plan has no place for, except biases of zeros.

        GPTQ's tools write such a bias with every weight.
        """
        super().check_places(plan)
        known = {self.locate(source.tensor) for weight in plan for source in weight.sources}
        for name in sorted(self._names - known):
            if name.endswith(".bias") and f"{name.removesuffix('bias')}qweight" in self._names:
                (rows,) = self.checkpoint.shape(name)
                if self.checkpoint.vector(name, rows).any():
                    raise ConversionError(
                        f"{self.checkpoint.folder}: {name} is not zero, and projections of this family have no bias; "
                        "such models cannot be converted"
                    )

    def is_symmetric(self, tensor: str) -> bool:
        """Whether the weight is packed and all its zero points are 8; `check` must have been called for it."""
        return tensor in self._symmetric

    def rows(self, tensor: str, first: int, stop: int) -> NDArray[np.float32] | Carried:
        """Rows first..stop-1 of a weight.

        Raises:
            ConversionError: a part is missing or has another type, or a stored zero point is ambiguous (15 in "gptq").
            ValueError: a scale is not finite.
        """
        if not self._is_packed(tensor):
            return super().rows(tensor, first, stop)
        low = first // _IN_A_WORD * _IN_A_WORD
        wanted = slice(first - low, stop - low)
        codes = self._codes(tensor, low, -(-stop // _IN_A_WORD) * _IN_A_WORD)[wanted]
        zeros = self._zeros(tensor, low, -(-stop // _IN_A_WORD) * _IN_A_WORD)[wanted]
        scales = self.checkpoint.columns(self._part(tensor, "scales"), first, stop).T.astype(np.float32)
        columns = codes.shape[1]
        if tensor in self._order:
            order = self._order[tensor]
            return scales[:, order] * (codes - zeros[:, order])
        if not np.isfinite(scales).all():
            raise ValueError("expected every scale to be finite, got NaN or infinity")
        rounded = scales.astype(q4nx.BFLOAT16).astype(np.float32)
        quantized = q4nx.from_affine(codes, self._by_group(rounded, columns), self._by_group(-rounded * zeros, columns))
        size = columns if self._packing.group_size < 0 else self._packing.group_size
        scales, zeros = (np.repeat(values, size, axis=1)[:, :columns] for values in (scales, zeros))
        return Carried(quantized, scales * (codes - zeros))

    def describe(self, plan: Sequence[Weight]) -> dict[str, str]:
        """Logs the treatment of each kind of weights; returns these texts by kind, for the manifest."""
        names = [source.tensor for weight in plan if isinstance(weight, ProjectionWeight) for source in weight.sources]
        packed = [name for name in names if self._is_packed(name)]
        texts = {}
        if carried := len(packed) - len(self._order):
            texts[self._packing.method] = f"{carried} weights: codes unchanged, scales and minima rounded to bf16"
        if self._order:
            texts["act-order"] = (
                f"{len(self._order)} weights: dequantised, and quantised again to Q4NX, for columns that share a scale "
                "are not neighbours (desc_act)"
            )
        if floats := len(names) - len(packed):
            texts["float"] = f"{floats} weights: quantised to Q4NX"
        for kind, text in texts.items():
            _log.log(logging.INFO if kind == self._packing.method else logging.WARNING, "%s: %s", kind, text)
        return texts

    def _whole(self, name: str) -> str:
        module, _, part = name.rpartition(".")
        return f"{module}.weight" if part in _PARTS and f"{module}.qweight" in self._names else name

    def _is_packed(self, tensor: str) -> bool:
        return self._part(tensor, "qweight") in self._names

    def _part(self, tensor: str, part: str) -> str:
        return self.locate(tensor).removesuffix("weight") + part

    def _codes(self, tensor: str, first: int, stop: int) -> NDArray[np.uint8]:
        """The codes of some rows of a weight, uint8 [stop - first, K]."""
        name = self._part(tensor, "qweight")
        if self._packing.method == "awq":
            return self._unpacked_rows(name, first, stop)
        words = self._words(name, first, stop)  # [K / 8, rows]
        return self._unpack(words.T).reshape(stop - first, -1)

    def _zeros(self, tensor: str, first: int, stop: int) -> NDArray[np.float32]:
        """The zero points of some rows of a weight, float32 [stop - first, groups]."""
        name = self._part(tensor, "qzeros")
        stored = self._unpacked_rows(name, first, stop)
        if self._packing.zero_offset and (stored == q4nx.LARGEST_CODE).any():
            raise ConversionError(
                f"{self.checkpoint.folder}: {name} has a stored zero point of {q4nx.LARGEST_CODE}, which some readers "
                "of checkpoint_format gptq take for 0 and some for 16; save the checkpoint as gptq_v2"
            )
        return stored.astype(np.float32) + np.float32(self._packing.zero_offset)

    def _has_one_zero(self, tensor: str, rows: int, zero: int) -> bool:
        """Whether every group has the zero point `zero`."""
        words = self._words(self._part(tensor, "qzeros"), 0, rows // _IN_A_WORD)
        return bool((words == np.uint32((zero - self._packing.zero_offset) * _IN_EACH_PLACE)).all())

    def _unpacked_rows(self, name: str, first: int, stop: int) -> NDArray[np.uint8]:
        """Rows first..stop-1 of a tensor, unpacked from words [n, rows / 8] to uint8 [rows, n]."""
        words = self._words(name, first // _IN_A_WORD, stop // _IN_A_WORD)
        return self._unpack(words).reshape(len(words), -1).T

    def _words(self, name: str, first: int, stop: int) -> NDArray[np.uint32]:
        words = self.checkpoint.columns(name, first, stop)
        if words.dtype != np.int32:
            raise ConversionError(
                f"{self.checkpoint.folder}: tensor {name} has type {words.dtype}, expected int32; {_INSTEAD}"
            )
        return words.view(np.uint32)

    def _unpack(self, words: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """Unpacks words [...] into their 4-bit values, uint8 [..., 8], in the order of W's rows or columns."""
        values = np.empty((*words.shape, _IN_A_WORD), np.uint8)
        for place, index in enumerate(_ORDER[self._packing.method]):
            values[..., index] = (words >> np.uint32(_BITS * place)) & np.uint32(q4nx.LARGEST_CODE)
        return values

    def _by_group(self, values: NDArray[np.float32], columns: int) -> NDArray[np.float32]:
        """Repeats values of groups [rows, groups], so that there is one for each 32 columns."""
        of_q4nx = -(-columns // q4nx.GROUP)
        size = self._packing.group_size
        repeats = of_q4nx if size < 0 else size // q4nx.GROUP
        repeated: NDArray[np.float32] = np.repeat(values, repeats, axis=1)[:, :of_q4nx]
        return repeated

    def _read_order(self, tensor: str, columns: int, groups: int) -> None:
        """Puts the group of each column into `_order` if the columns of a group are not neighbours."""
        name = self._part(tensor, "g_idx")
        if name not in self._names:
            return
        self.checkpoint.check_shape(name, (columns,))
        order = self.checkpoint.integers(name)
        if order.min() < 0 or order.max() >= groups:
            raise ConversionError(
                f"{self.checkpoint.folder}: {name} has {order.min()}..{order.max()}, expected groups 0..{groups - 1}"
            )
        neighbours = np.arange(columns) // (columns if self._packing.group_size < 0 else self._packing.group_size)
        if (order != neighbours).any():
            self._order[tensor] = order

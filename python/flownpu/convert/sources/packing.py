# SPDX-License-Identifier: Apache-2.0
"""Reads from a checkpoint's settings how its weights are quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.convert.checkpoint import read_json
from flownpu.convert.errors import ConversionError
from flownpu.convert.settings import LARGEST
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from flownpu.convert.checkpoint import Checkpoint

INSTEAD = "convert the checkpoint that it was made of"
"""The way out, for a checkpoint that is refused."""

_METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4")
_FORMATS = {"awq": ("gemm",), "gptq": ("gptq", "gptq_v2")}
_BITS = (4, 8)
# Formats of compressed-tensors by the type of numbers.
_PACKED, _BYTES, _FLOAT8 = "pack-quantized", "int-quantized", "float-quantized"


@dataclass(frozen=True)
class Packing:
    """How a checkpoint's weights are quantised."""

    method: str
    """"awq", "gptq", "compressed-tensors", "int8" (bytes of compressed-tensors), "fp8" in either of its forms,
    "bitsandbytes", whose weights say the rest themselves, or "mxfp4" of experts."""
    bits: int = 4
    """Bits of a code, 4 or 8."""
    group_size: int = -1
    """How many columns share a scale; -1: all."""
    zero_offset: int = 0
    """A number that is added to stored zero points."""
    symmetric: bool = False
    """There are no zero points: each is in the middle of the codes."""
    scale: str = "weight_scale"
    """The last part of the names of the scales of "fp8"."""
    block: tuple[int, int] | None = None
    """How many rows and columns share a scale of "fp8"; None: those of a row, or all."""

    @property
    def in_a_word(self) -> int:
        """How many codes an int32 has."""
        return 32 // self.bits

    @property
    def middle(self) -> int:
        """The zero point of a symmetric weight."""
        return 1 << self.bits - 1

    def groups(self, columns: int) -> int:
        """How many groups a row of that many columns has."""
        return 1 if self.group_size < 0 else -(-columns // self.group_size)


def read_packing(checkpoint: Checkpoint) -> Packing | None:
    """How the checkpoint is quantised, by the quantization_config of config.json; None if it is not.

    Raises:
        ConversionError: it is quantised in a way that cannot be read.
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
    settings = {key: value for key, value in settings.items() if value is not None}
    method = str(settings.get("quant_method")).lower()
    if method not in _METHODS:
        raise ConversionError(
            f'{where}: expected quant_method {", ".join(_METHODS[:-1])} or {_METHODS[-1]}, got "{method}"; {INSTEAD}'
        )
    if method == "fp8":
        return Packing("fp8", scale="weight_scale_inv", block=_block(settings.get("weight_block_size"), where))
    if method == "bitsandbytes":
        if not settings.get("load_in_4bit"):
            raise ConversionError(f"{where}: expected load_in_4bit true; {INSTEAD}")
        return Packing(method)
    if method == "mxfp4":
        return Packing(method)
    return _compressed(settings, where) if method == "compressed-tensors" else _awq_or_gptq(method, settings, where)


def _awq_or_gptq(method: str, settings: Mapping[str, Any], where: str) -> Packing:
    bits = settings.get("bits", settings.get("w_bit", 4))
    allowed = _BITS[:1] if method == "awq" else _BITS
    if bits not in allowed:
        raise ConversionError(f"{where}: expected {' or '.join(map(str, allowed))} bits, got {bits}; {INSTEAD}")
    group_size = _group_size(settings.get("group_size", settings.get("q_group_size", 128)), where)
    formats = _FORMATS[method]
    # transformers 5 calls it "format", and reads the older name first.
    older = "version" if method == "awq" else "checkpoint_format"
    key = older if older in settings else "format"
    stored = str(settings.get(key, formats[0])).lower()
    if stored not in formats:
        raise ConversionError(f'{where}: expected {key} {" or ".join(formats)}, got "{stored}"; {INSTEAD}')
    if method == "awq" and settings.get("zero_point") is False:
        raise ConversionError(f"{where}: expected zero_point true, got false; {INSTEAD}")
    return Packing(method, bits, group_size, zero_offset=int(stored == "gptq"))


def _compressed(settings: Mapping[str, Any], where: str) -> Packing:
    """The packing of compressed-tensors, which describes groups of layers; all of them must be packed alike."""
    groups = settings.get("config_groups")
    described = list(groups.values()) if isinstance(groups, dict) else []
    schemes = [group.get("weights") if isinstance(group, dict) else None for group in described]
    scheme = schemes[0] if schemes else None
    if not isinstance(scheme, dict) or any(other != scheme for other in schemes):
        raise ConversionError(f"{where}: expected config_groups with one scheme of weights, got {groups!r}; {INSTEAD}")
    form, strategy = settings.get("format"), scheme.get("strategy")
    kind, bits = scheme.get("type", "int"), scheme.get("num_bits", 8)
    if (form, kind, bits) == (_FLOAT8, "float", 8) and strategy in ("tensor", "channel", "block"):
        return Packing("fp8", block=_block(scheme.get("block_structure"), where) if strategy == "block" else None)
    known = (form == _PACKED and bits in _BITS) or (form == _BYTES and bits == 8)
    if kind != "int" or not known or strategy not in ("group", "channel"):
        raise ConversionError(
            f"{where}: expected format {_PACKED} of 4- or 8-bit int or {_BYTES} of 8-bit int, by group or channel, or "
            f"{_FLOAT8} of 8-bit float by tensor, channel or block, got {form} of {bits}-bit {kind} by {strategy}; "
            f"{INSTEAD}"
        )
    group_size = _group_size(scheme.get("group_size"), where) if strategy == "group" else -1
    method = "compressed-tensors" if form == _PACKED else "int8"
    return Packing(method, bits, group_size, symmetric=bool(scheme.get("symmetric", True)))


def _group_size(value: Any, where: str) -> int:
    fits = isinstance(value, int) and 1 <= value <= LARGEST and value % q4nx.GROUP == 0
    if not fits and value != -1:
        raise ConversionError(
            f"{where}: expected a group_size that is a multiple of {q4nx.GROUP}, for Q4NX has one scale for "
            f"{q4nx.GROUP} columns, got {value}; {INSTEAD}"
        )
    return int(value)


def _block(value: Any, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(n, int) and 0 < n < LARGEST for n in value):
        raise ConversionError(f"{where}: expected blocks of two sizes, rows and columns, got {value!r}; {INSTEAD}")
    return value[0], value[1]


def unpack(words: NDArray[np.uint32], bits: int, order: Sequence[int] | None = None) -> NDArray[np.uint8]:
    """Unpacks words [...] into their values, uint8 [..., 32 / bits].

    Args:
        words: the words.
        bits: bits of a value.
        order: the indices of a word's values in the order of their bits, from the lowest on; None: as they are.
    """
    values = np.empty((*words.shape, 32 // bits), np.uint8)
    for place, index in enumerate(order or range(32 // bits)):
        values[..., index] = (words >> np.uint32(bits * place)) & np.uint32((1 << bits) - 1)
    return values

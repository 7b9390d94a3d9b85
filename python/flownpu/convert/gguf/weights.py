# SPDX-License-Identifier: Apache-2.0
"""Reads the weights of a GGUF file by the names that they have in a Hugging Face checkpoint.

`codes` keeps the codes of types that have a scale for each 32 weights. The gguf package dequantises the others, and
they are quantised again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from flownpu.convert.errors import ConversionError, refuse_unplaced
from flownpu.convert.gguf.codes import KEPT, keep_codes
from flownpu.convert.gguf.layer_forms import ROPE_FACTORS
from flownpu.convert.layer_parts import Convolution, DeltaRule
from flownpu.convert.quantise import Carried, Stored
from flownpu.convert.weights import head_plan, unused_tensors, weight_plan
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from flownpu.convert.decoder import Decoder
    from flownpu.convert.gguf.file import GgufFile

_Number = TypeVar("_Number", bound=np.generic)
# Q6_K has codes of 6 bits, but a scale for each 16 weights.
_ROUNDED_TO_8_BITS = (GGMLQuantizationType.Q6_K,)
_FLOATS = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)

_MODEL = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    # Tensors of families that have these projections in one (Family.fused).
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    # Embeddings for each layer, and experts beside a plain feed-forward, have these.
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
}
# Tensors whose names have no further part.
_WHOLE = {
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "mlp.expert_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
# Those of the model's own drafter beside a layer's, in the block behind the layers.
_DRAFTER = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}
_NORMS = {"post_attention_layernorm": "ffn_norm"}
# The norms of linear attention's families, and of attention with sinks.
_LATER_NORMS = {"post_attention_layernorm": "post_attention_norm"}
_SANDWICH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class _Order(NamedTuple):
    """The places in a file of rows, by the tensor's name in its layer, and of the output projection's columns."""

    rows: dict[str, NDArray[np.int64]]
    columns: NDArray[np.int64]


def _value_order(mixer: DeltaRule | None) -> _Order | None:
    """Where files have value heads in another order; None: they have the checkpoints'.

    Checkpoints have the r value heads of a key head together. In files with separate tensors of rates, llama.cpp's
    converter puts the first value heads of all key heads first, then the second ones.
    """
    if mixer is None or mixer.tensors.fused_ba:
        return None
    heads = np.arange(mixer.value_heads).reshape(-1, mixer.key_heads).T.reshape(-1)
    values = (heads[:, None] * mixer.value_size + np.arange(mixer.value_size)).reshape(-1)
    channels = np.concatenate([np.arange(2 * mixer.keys), 2 * mixer.keys + values])
    rows = dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias", "ssm_a"), heads)
    rows |= {"attn_qkv.weight": channels, "ssm_conv1d.weight": channels, "attn_gate.weight": values}
    return _Order(rows, values)


class GgufWeights:
    """A file's tensors by row: `quantise.Tensors`."""

    def __init__(self, file: GgufFile, decoder: Decoder, *, interleaved: bool) -> None:
        """Finds the tensors' names.

        Args:
            file: the file.
            decoder: the decoder that its metadata describe.
            interleaved: whether in heads of queries and keys, rows 2i and 2i + 1 are rotated with each other, and not
                i and i + d/2 as in checkpoints.

        Raises:
            ConversionError: the file has tensors that this decoder has no place for.
        """
        self._file = file
        self._head_size = decoder.head_size
        self._interleaved = tuple(f"attn_{x}.{y}" for x in "qk" for y in ("weight", "bias")) if interleaved else ()
        mixers = [layer.mixer for layer in decoder.layers]
        rule = next((mixer for mixer in mixers if isinstance(mixer, DeltaRule)), None)
        norms = _NORMS if rule is None and not decoder.head_sinks else _LATER_NORMS
        layer = _LAYER | (_SANDWICH_NORMS if decoder.sandwich_norms else norms)
        is_convolution = any(isinstance(mixer, Convolution) for mixer in mixers)
        model = _MODEL | ({"norm.weight": "token_embd_norm.weight"} if is_convolution else {})
        self._order = _value_order(rule)
        count = len(decoder.layers)
        blocks = {f"layers.{i}": i for i in range(count)} | {"mtp.layers.0": count}
        names = {
            f"{of}.{name}.{part}": f"blk.{i}.{stored}.{part}"
            for of, i in blocks.items()
            for name, stored in layer.items()
            for part in ("weight", "bias")
        }
        names |= {f"{name}.weight": f"blk.{count}.{stored}.weight" for name, stored in _DRAFTER.items()}
        for i in range(len(decoder.layers)):
            names |= {f"layers.{i}.{name}": f"blk.{i}.{stored}" for name, stored in _WHOLE.items()}
        self._names = {
            source.tensor: (model | names)[source.tensor]
            for w in (*weight_plan(decoder), *head_plan(decoder))
            for source in w.sources
        }
        # Drafters that are not read: of experts, or of several layers.
        drafts = 0 if decoder.prediction_head else file.drafter_layers
        of_drafter = tuple(f"blk.{count + i}." for i in range(drafts))
        stored = {name for name in file.tensors if not name.startswith(of_drafter)}
        unused = {place for name, place in names.items() if name.startswith(unused_tensors(decoder))}
        # The factors of rotary frequencies are no weight of the plan: they are read with the decoder.
        unknown = sorted(stored - set(self._names.values()) - unused - {ROPE_FACTORS})
        refuse_unplaced(file.path, unknown, "architecture")

    @property
    def source(self) -> Path:
        """The file's path."""
        return self._file.path

    def check(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raises ConversionError unless the tensor exists and has that shape."""
        name = self._names[tensor]
        if name not in self._file.tensors:
            raise ConversionError(f"{self._file.path}: tensor {name} is missing")
        actual = self._file.tensors[name].shape
        if len(actual) == 3:  # the matrices of all experts count as one matrix
            actual = (actual[0] * actual[1], actual[2])
        if len(actual) == 1 and len(shape) == 2:  # one row
            actual = (1, *actual)
        if len(actual) == 2 and len(shape) == 1:  # biases of all experts
            actual = (actual[0] * actual[1],)
        if actual != shape:
            raise ConversionError(
                f"{self._file.path}: tensor {name} has shape {list(actual)}, expected {list(shape)} from the metadata"
            )

    def rows(self, tensor: str, first: int, stop: int) -> NDArray[np.float32] | Carried:
        """Rows first..stop-1 of a weight.

        Raises:
            ConversionError: the gguf package cannot dequantise the tensor's type.
            ValueError: a scale is not finite.
        """
        name = self._names[tensor]
        kind = self._file.tensors[name].type
        stored = self._stored_rows(name, first, stop)
        rows = keep_codes(stored, kind) if kind in KEPT else self._dequantized(stored, name)
        return self._ordered_columns(rows) if name.endswith("ssm_out.weight") and self._order is not None else rows

    def vector(self, tensor: str, size: int) -> NDArray[np.float32]:
        """A whole one-dimensional tensor, float32 [size]; raises as `check` and `values`."""
        self.check(tensor, (size,))
        name = self._names[tensor]
        values = self.values(name)
        if (order := self._rows_of(name)) is not None:
            return values[order]
        return self._halves(values) if name.endswith(self._interleaved) else values

    def values(self, name: str) -> NDArray[np.float32]:
        """A one-dimensional tensor by its name in the file, float32, or all rows of one, one after the other.

        Raises:
            ConversionError: a value is not finite, or the gguf package cannot dequantise its type.
        """
        rows = math.prod(self._file.tensors[name].shape[:-1])
        values: NDArray[np.float32] = self._dequantized(self._file.read(name, 0, rows), name).ravel()
        if not np.isfinite(values).all():
            raise ConversionError(f"{self._file.path}: tensor {name} has a value that is not finite")
        return values

    def stored(self, tensor: str) -> Stored:
        """How a weight is stored."""
        kind = self._file.tensors[self._names[tensor]].type
        if kind in KEPT:
            return Stored(kind.name, KEPT[kind].layout, keeps_codes=True)
        if kind in _FLOATS:
            return Stored(kind.name, again="quantised")
        return Stored(kind.name, q4nx.EIGHT_BITS if kind in _ROUNDED_TO_8_BITS else None)

    def _stored_rows(self, name: str, first: int, stop: int) -> NDArray[np.uint8]:
        if (order := self._rows_of(name)) is not None:
            wanted = order[first:stop]
            runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
            return np.concatenate([self._file.read(name, int(run[0]), int(run[-1]) + 1) for run in runs])
        if not name.endswith(self._interleaved):
            return self._file.read(name, first, stop)
        size = self._head_size
        low = first // size * size
        return self._halves(self._file.read(name, low, -(-stop // size) * size))[first - low : stop - low]

    def _rows_of(self, name: str) -> NDArray[np.int64] | None:
        """For each row of a tensor, or element of a vector, its place in the file; None: its own."""
        part = name.split(".", 2)[-1]
        return None if self._order is None else self._order.rows.get(part)

    def _ordered_columns(self, rows: NDArray[np.float32] | Carried) -> NDArray[np.float32] | Carried:
        assert self._order is not None
        columns = self._order.columns
        if not isinstance(rows, Carried):
            return rows[:, columns]
        groups = columns[:: q4nx.GROUP] // q4nx.GROUP
        if (np.diff(columns.reshape(-1, q4nx.GROUP)) != 1).any():
            raise ConversionError(
                f"{self._file.path}: expected value heads of a multiple of {q4nx.GROUP} elements, whose codes can be "
                "put in another order; convert from a file that is not quantised"
            )
        codes, scale, minimum = rows.quantized
        quantized = rows.quantized._replace(codes=codes[:, columns], scale=scale[:, groups], minimum=minimum[:, groups])
        return Carried(quantized, rows.exact[:, columns])

    def _halves(self, heads: NDArray[_Number]) -> NDArray[_Number]:
        """Reorders the rows of whole heads from interleaved to the checkpoints' order: all even rows, then all odd."""
        by_head: NDArray[_Number] = heads.reshape(-1, self._head_size // 2, 2, *heads.shape[1:])
        return by_head.swapaxes(1, 2).reshape(heads.shape)

    def _dequantized(self, stored: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
        kind = self._file.tensors[name].type
        try:
            values: NDArray[np.float32] = dequantize(stored, kind)
        except NotImplementedError:
            raise ConversionError(
                f"{self._file.path}: tensor {name} has type {kind.name}, which the gguf package cannot dequantise; "
                "convert from a file of another type"
            ) from None
        return values

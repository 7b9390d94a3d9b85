# SPDX-License-Identifier: Apache-2.0
"""Writes the mixers that have states in the place of a KV cache, with ONNX Runtime's operators of states.

past.{i}.conv float32 [B, taps - 1, channels], past.{i}.recurrent float32 [B, value_heads, key_size, value_size]
present.{i}.conv, present.{i}.recurrent: the same behind the new tokens

A row's padding is behind its tokens and leaves its states alone: it decays nothing and writes nothing by the delta
rule, and a convolution's state is the last tokens before it. Only a first prompt has padding, so that none of these are
in the state before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from flownpu.convert.graph.embedding import EmbeddingWriter
from flownpu.convert.graph.writer import MICROSOFT
from flownpu.convert.layer_parts import Convolution
from flownpu.convert.weights import ProjectionWeight, weight_plan
from flownpu.ops.definitions.onnx_function import DOMAIN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flownpu.convert.decoder import Decoder
    from flownpu.convert.layer_parts import DeltaRule, Mixer


class MixerWriter(EmbeddingWriter):
    """Writes a layer's mixer, if it is not attention, and projections."""

    def __init__(self, decoder: Decoder, tensors: Mapping[str, ir.TensorProtocol]) -> None:
        """Takes the decoder to write, and its weights by name."""
        super().__init__(tensors)
        self.decoder = decoder
        self.projections = {
            weight.name: weight for weight in weight_plan(decoder) if isinstance(weight, ProjectionWeight)
        }
        self.present: list[ir.Value] = []
        self.is_token: ir.Value | None = None
        """1 for each new token and 0 for padding, float32 [B, S, 1]."""
        self.count: ir.Value | None = None
        """The new tokens of each row without padding, int64 [B, 1, 1]."""
        self.is_whole: ir.Value | None = None
        """Whether a row has no padding, bool [B, 1, 1]."""
        self._places: dict[int, tuple[ir.Value, ir.Value]] = {}

    def _count_tokens(self, attention_mask: ir.Value, input_ids: ir.Value) -> None:
        """Says which of the new tokens are padding: those with 0 in the last S columns of the mask."""
        new = self._op("Shape", [input_ids], "new_tokens/count", start=1, end=2)
        end, axis = self._integers("end", [2**31 - 1]), self._integers("axis_1", [1])
        first = self._op("Neg", [new], "new_tokens/first")
        newest = self._op("Slice", [attention_mask, first, end, axis], "new_tokens/mask")
        columns = self._op("Unsqueeze", [newest, self._integers("axis_2", [2])], "new_tokens/columns")
        self.is_token = self._op("Cast", [columns], "new_tokens/is_token", to=ir.DataType.FLOAT.value)
        self.count = self._op("ReduceSum", [columns, axis], "new_tokens/counts", keepdims=1)
        self.is_whole = self._op("Equal", [self.count, new], "new_tokens/is_whole")

    def _last_places(self, count: int) -> tuple[ir.Value, ir.Value]:
        """The places of each row's last `count` tokens, int64 [B, count, 1], and 1 or, where there is none, 0."""
        if count not in self._places:
            name = f"last_{count}_tokens"
            offsets = self._integers(f"{name}/offsets", np.arange(-count, 0)[:, None].tolist())
            places = self._op("Add", [self.count, offsets], f"{name}/places")
            zero = self._integers("index_0", 0)
            exist = self._op("GreaterOrEqual", [places, zero], f"{name}/are")
            exist = self._op("Cast", [exist], f"{name}/exist", to=ir.DataType.FLOAT.value)
            self._places[count] = self._op("Max", [places, zero], f"{name}/index"), exist
        return self._places[count]

    def _mixer(self, index: int, mixer: Mixer, hidden: ir.Value) -> ir.Value:
        if isinstance(mixer, Convolution):
            return self._convolution(index, mixer, hidden)
        return self._delta_rule(index, mixer, hidden)

    def _convolution(self, index: int, mixer: Convolution, hidden: ir.Value) -> ir.Value:
        name, width = f"layers.{index}.conv", self.decoder.hidden_size
        before, behind, x = self._split(self._project(hidden, f"{name}.in_proj"), f"{name}.split", [width] * 3)
        gated = self._op("Mul", [before, x], f"{name}.gated")
        convolved = self._convolve(index, gated, f"{name}.conv", width, mixer.taps, "none")
        return self._project(self._op("Mul", [behind, convolved], f"{name}.output"), f"{name}.out_proj")

    def _delta_rule(self, index: int, mixer: DeltaRule, hidden: ir.Value) -> ir.Value:
        name = f"layers.{index}.linear_attn"
        qkv = self._project(hidden, f"{name}.in_proj_qkv")
        qkv = self._convolve(index, qkv, f"{name}.conv1d", mixer.channels, mixer.taps, "silu")
        query, key, value = self._split(qkv, f"{name}.split", [mixer.keys, mixer.keys, mixer.values])
        query, key = (
            self._of_length_one(part, f"{name}.{letter}", mixer) for part, letter in ((query, "query"), (key, "key"))
        )
        rates = [
            self._op("MatMul", [hidden, self._weight(f"{name}.{part}")], f"{name}.{part}")
            for part in ("in_proj_a", "in_proj_b")
        ]
        vectors = [self._weight(f"{name}.{part}") for part in ("dt_bias", "decay_scale")]
        parts = ("decay", "beta")
        opened = self._two("LinearAttentionGate", [rates[0], *vectors, rates[1]], f"{name}.gate", parts, {})
        decay, beta = (
            self._op("Mul", [value, self.is_token], f"{name}.gate/{part}_of_tokens")
            for value, part in zip(opened, parts, strict=True)
        )
        shape: list[int | str | None] = ["batch_size", mixer.value_heads, mixer.key_size, mixer.value_size]
        past = self._input(f"past.{index}.recurrent", ir.DataType.FLOAT, shape)
        attributes: dict[str, int | float | str] = {
            "q_num_heads": mixer.key_heads,
            "kv_num_heads": mixer.value_heads,
            "update_rule": "gated_delta",
            "scale": mixer.key_size**-0.5,
        }
        output, present = self._two(
            "LinearAttention", [query, key, value, past, decay, beta], f"{name}.attention", ("output", ""), attributes
        )
        self._add_state(present, f"present.{index}.recurrent", shape)
        gate = self._project(hidden, f"{name}.in_proj_z")
        normed = self._op(
            "GatedRMSNorm",
            [output, self._weight(f"{name}.norm"), gate],
            f"{name}.norm",
            domain=MICROSOFT,
            epsilon=self.decoder.norm_epsilon,
        )
        return self._project(normed, f"{name}.out_proj")

    def _of_length_one(self, x: ir.Value, name: str, mixer: DeltaRule) -> ir.Value:
        """Each head of x divided by its length."""
        heads = self._integers("delta_rule_heads", [0, 0, mixer.key_heads, mixer.key_size])
        lengthened = self._op("LpNormalization", [self._op("Reshape", [x, heads], f"{name}/heads")], name, axis=-1, p=2)
        return self._op("Reshape", [lengthened, self._integers("delta_rule_keys", [0, 0, mixer.keys])], f"{name}/row")

    def _convolve(self, index: int, x: ir.Value, name: str, channels: int, taps: int, activation: str) -> ir.Value:
        """The convolution of x [B, S, channels] and the state before it."""
        shape: list[int | str | None] = ["batch_size", taps - 1, channels]
        past = self._input(f"past.{index}.conv", ir.DataType.FLOAT, shape)
        output, newest = self._two(
            "CausalConvWithState",
            [x, self._weight(name), None, past],
            f"{name}/state",
            ("output", "newest"),
            {"activation": activation, "channels_last": 1},
        )
        places, exist = self._last_places(taps - 1)
        rows = self._op("GatherND", [x, places], f"{name}/last", batch_dims=1)
        before_padding = self._op("Mul", [rows, exist], f"{name}/before_padding")
        present = self._op("Where", [self.is_whole, newest, before_padding], f"{name}/present")
        self._add_state(present, f"present.{index}.conv", shape)
        return output

    def _add_state(self, value: ir.Value, name: str, shape: Sequence[int | str | None]) -> None:
        """Makes a value of float32 an output of the graph."""
        value.name, value.dtype, value.shape = name, ir.DataType.FLOAT, ir.Shape(shape)
        self.present.append(value)

    def _two(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        outputs: tuple[str, str],
        attributes: Mapping[str, int | float | str],
    ) -> Sequence[ir.Value]:
        """Adds a node of ONNX Runtime's with two outputs."""
        values = self.tape.op_multi_out(
            op_type, inputs, attributes=attributes, num_outputs=2, domain=MICROSOFT, version=1, name=f"/{name}"
        )
        for value, output in zip(values, outputs, strict=True):
            value.name = f"/{name}/{output}"
        return values

    def _split(self, x: ir.Value, name: str, sizes: list[int]) -> Sequence[ir.Value]:
        """Parts of x's last axis."""
        parts = self.tape.op_multi_out(
            "Split",
            [x, self._integers(f"{name.rpartition('.')[2]}_{'_'.join(map(str, sizes))}", sizes)],
            attributes={"axis": -1},
            num_outputs=len(sizes),
            name=f"/{name}",
        )
        for index, part in enumerate(parts):
            part.name = f"/{name}/{index}"
        return parts

    def _project(
        self, x: ir.Value, weight: str, *, node: str | None = None, gating: str | None = None, bias: bool = False
    ) -> ir.Value:
        projection = self.projections[weight]
        gated = {} if gating is None else {"gating": gating}
        return self._op(
            "Q4NXMatMul",
            [x, self._weight(weight), *([self._weight(f"{weight}.bias")] if bias else [])],
            node or weight,
            domain=DOMAIN,
            M=projection.rows,
            K=projection.columns,
            **gated,
        )

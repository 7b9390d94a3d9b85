# SPDX-License-Identifier: Apache-2.0
"""Writes the mixers that have states in the place of a KV cache, with ONNX Runtime's operators of states.

past.{i}.conv float32 [B, channels, taps - 1], past.{i}.recurrent float32 [B, value_heads, key_size, value_size]
present.{i}.conv, present.{i}.recurrent: the same behind the new tokens
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        decay, beta = self._two(
            "LinearAttentionGate", [rates[0], *vectors, rates[1]], f"{name}.gate", ("decay", "beta"), {}
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
        shape: list[int | str | None] = ["batch_size", channels, taps - 1]
        inputs = [
            self._op("Transpose", [x], f"{name}/channels", perm=[0, 2, 1]),
            self._weight(name),
            None,
            self._input(f"past.{index}.conv", ir.DataType.FLOAT, shape),
        ]
        output, present = self._two(
            "CausalConvWithState", inputs, f"{name}/state", ("output", ""), {"activation": activation}
        )
        self._add_state(present, f"present.{index}.conv", shape)
        return self._op("Transpose", [output], f"{name}/tokens", perm=[0, 2, 1])

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

# SPDX-License-Identifier: Apache-2.0
"""Writes what some decoders have behind each layer's feed-forward: an embedding for each layer, and a factor.

A token's embedding for layer i is the i-th part, of P elements, of

    e = (sqrt(P) table[token] + norm(projection . embedding)) / sqrt(2)                  (norm of each part by itself)

and with it the residual stream h becomes h + norm(projection_i . (gelu(gate_i . h) * e_i)), then scalar_i h. (Gemma 4.)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flownpu.convert.graph.mixers import MixerWriter
from flownpu.convert.weights import PER_LAYER_SCALE, per_layer_table
from flownpu.ops.definitions.onnx_function import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir


class PerLayerWriter(MixerWriter):
    """Writes embeddings for each layer."""

    def _embed_for_layers(self, input_ids: ir.Value, embeddings: ir.Value) -> ir.Value:
        """The tokens' embeddings for all layers, [B, S, layers P]."""
        decoder, name = self.decoder, "per_layer"
        table, size = per_layer_table(decoder), decoder.per_layer_size
        inputs = [self._weight(table.name), input_ids]
        rows = self._op("Q4NXGather", inputs, f"{name}/rows", domain=DOMAIN, M=table.rows, K=table.columns)
        factor = self._float(f"{name}.scale", math.sqrt(size) * PER_LAYER_SCALE)
        projected = self._project(embeddings, "per_layer_model_projection")
        by_layer = self._integers(f"{name}.by_layer", [0, 0, len(decoder.layers), size])
        parts = self._op("Reshape", [projected, by_layer], f"{name}/parts")
        # The projection has the factor 1 / sqrt(D), which changes only the norm's epsilon.
        normed = self._op(
            "SimplifiedLayerNormalization",
            [parts, self._weight("per_layer_projection_norm")],
            f"{name}/norm",
            axis=-1,
            epsilon=decoder.norm_epsilon * decoder.hidden_size,
            stash_type=1,
        )
        flat = self._op("Reshape", [normed, self._integers(f"{name}.flat", [0, 0, table.columns])], f"{name}/flat")
        return self._op("Add", [self._op("Mul", [rows, factor], f"{name}/scaled"), flat], name)

    def _parts_for_layers(self, embeddings: ir.Value, first: int, count: int) -> list[ir.Value]:
        """The parts of some layers, of which these embeddings are."""
        return list(self._split(embeddings, f"per_layer.{first}", [self.decoder.per_layer_size] * count))

    def _after_layer(self, index: int, total: ir.Value, own: ir.Value | None) -> ir.Value:
        """The residual stream behind a layer, of which `own` is the token's embedding."""
        layer = f"layers.{index}"
        if own is not None:
            gate = self._project(total, f"{layer}.per_layer_input_gate")
            opened = self._op("Gelu", [gate], f"{layer}.per_layer/activation", approximate="tanh")
            gated = self._op("Mul", [opened, own], f"{layer}.per_layer/gated")
            added = self._norm(
                self._project(gated, f"{layer}.per_layer_projection"), f"{layer}.post_per_layer_input_norm"
            )
            total = self._op("Add", [total, added], f"{layer}.per_layer/sum")
        if self.decoder.layer_scalars:
            total = self._op("Mul", [total, self._weight(f"{layer}.layer_scalar")], f"{layer}.scaled")
        return total

    def _norm(self, x: ir.Value, weight: str) -> ir.Value:
        """An RMS norm over the last axis."""
        # ONNX Runtime has this operator in ONNX's domain; the standard one, RMSNormalization, needs opset 23.
        inputs, epsilon = [x, self._weight(weight)], self.decoder.norm_epsilon
        return self._op("SimplifiedLayerNormalization", inputs, weight, axis=-1, epsilon=epsilon, stash_type=1)

# SPDX-License-Identifier: Apache-2.0
"""Writes the ONNX graph of a text encoder, in the form that optimum and sentence-transformers feed.

Shapes (B batch, S tokens of the longest row, D hidden size):

    input_ids int64 [B, S];  attention_mask int64 [B, S], rows padded on the right
    token_type_ids int64 [B, S], only in encoders with several token types
    last_hidden_state float32 [B, S, D];  in models that score pairs of texts logits float32 [B, 1] instead

Weights are initializers with the names in `encoder_weight_plan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from flownpu.convert.dense.graph import EncoderWriter
from flownpu.convert.encoder.weights import HEADS, POSITIONS, TYPES, WORDS, encoder_weight_plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.convert.dense.weights import DenseFormat
    from flownpu.convert.encoder.families import TextEncoder


def build_encoder_model(
    encoder: TextEncoder, tensors: Mapping[str, ir.TensorProtocol], dense_format: DenseFormat
) -> ir.Model:
    """The encoder's ONNX model, with the functions that define its operators.

    Args:
        encoder: what to write.
        tensors: each weight of `encoder_weight_plan`, by name.
        dense_format: how the matrices among the weights are stored.
    """
    return _Builder(encoder, tensors, dense_format).model()


class _Builder(EncoderWriter):
    def __init__(
        self, encoder: TextEncoder, tensors: Mapping[str, ir.TensorProtocol], dense_format: DenseFormat
    ) -> None:
        super().__init__(tensors, encoder_weight_plan(encoder), dense_format, encoder.norm_epsilon)
        self.encoder = encoder

    def model(self) -> ir.Model:
        encoder, shape = self.encoder, ["batch_size", "sequence_length"]
        input_ids = self._input("input_ids", ir.DataType.INT64, shape)
        attention_mask = self._input("attention_mask", ir.DataType.INT64, shape)
        lengths = self._lengths(attention_mask)
        hidden = self._embed(input_ids)
        for i in range(encoder.layers):
            name = f"encoder.layer.{i}"
            qkv = self._linear(hidden, f"{name}.attention.qkv")
            attended = self._attend(qkv, f"{name}.attention", encoder.heads, encoder.head_size, lengths)
            hidden = self._linear(attended, f"{name}.attention.output", residual=hidden)
            hidden = self._layer_norm(hidden, f"{name}.attention.norm")
            inner = self._linear(hidden, f"{name}.intermediate", gelu=encoder.gelu)
            hidden = self._layer_norm(self._linear(inner, f"{name}.output", residual=hidden), f"{name}.norm")
        if encoder.head == "none":
            return self._model("encoder", [self._output(hidden, "last_hidden_state", [*shape, encoder.hidden_size])])
        return self._model("encoder", [self._output(self._score(hidden), "logits", [shape[0], 1])])

    def _embed(self, input_ids: ir.Value) -> ir.Value:
        """The normalised sum of the embeddings of words, token types and positions, [B, S, D]."""
        rows = self._op("Gather", [self._weight(WORDS), input_ids], "embeddings/words/rows", axis=0)
        words = self._op("Cast", [rows], "embeddings/words", to=ir.DataType.FLOAT.value)
        types = self._weight(TYPES)
        if self.encoder.types > 1:
            token_types = self._input("token_type_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
            types = self._op("Gather", [types, token_types], "embeddings/types", axis=0)
        typed = self._op("Add", [words, types], "embeddings/typed")
        count = self._op("Shape", [input_ids], "embeddings/count", start=1, end=2)
        first = self._integers("first_position", [self.encoder.first_position])
        end = self._op("Add", [count, first], "embeddings/end")
        inputs = [self._weight(POSITIONS), first, end, self._integers("axis_0", [0])]
        positions = self._op("Slice", inputs, "embeddings/positions")
        return self._layer_norm(self._op("Add", [typed, positions], "embeddings/sum"), "embeddings.norm")

    def _score(self, hidden: ir.Value) -> ir.Value:
        """The score of each row, [B, 1], from its first token."""
        dense, scores = HEADS[self.encoder.head]
        first = self._op("Gather", [hidden, self._integers("index_0", 0)], "first_token", axis=1)
        return self._linear(self._op("Tanh", [self._linear(first, dense)], f"{dense}/tanh"), scores)

# SPDX-License-Identifier: Apache-2.0
"""Writes the ONNX graph that embeds a prompt: words from the table, pictures from their features.

    input_ids int64 [B, S];  image_features float32 [N, F, D] or [N F, D] of N pictures in their order; N may be 0
    inputs_embeds float32 [B, S, D]

The n-th image token of a row becomes the n-th feature; it is an error if a row has more image tokens than there are
features. All rows of a batch have the same pictures, as beams do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from flownpu.convert.graph.writer import GraphWriter
from flownpu.convert.weights import embedding_table
from flownpu.ops.definitions.onnx_function import DOMAIN

if TYPE_CHECKING:
    from flownpu.convert.decoder import Decoder


class EmbeddingWriter(GraphWriter):
    """Writes a graph that looks tokens up in the embedding table."""

    def _embed(self, input_ids: ir.Value, decoder: Decoder) -> ir.Value:
        """The tokens' rows of the table, scaled, [B, S, D]."""
        table = embedding_table(decoder)
        inputs = [self._weight(table.name), input_ids]
        rows = self._op("Q4NXGather", inputs, "embed_tokens/rows", domain=DOMAIN, M=table.rows, K=table.columns)
        if decoder.embedding_scale == 1.0:
            return rows
        return self._op("Mul", [rows, self._float("embedding_scale", decoder.embedding_scale)], "embeddings")


def build_embedding_model(decoder: Decoder, table: ir.TensorProtocol) -> ir.Model:
    """The ONNX model that embeds the prompts of a decoder with an image token.

    Args:
        decoder: a decoder whose `image_token_id` is set.
        table: the weight `embedding_table(decoder)`.
    """
    return _Builder({embedding_table(decoder).name: table}).model(decoder)


class _Builder(EmbeddingWriter):
    def model(self, decoder: Decoder) -> ir.Model:
        assert decoder.image_token_id is not None
        hidden = decoder.hidden_size
        input_ids = self._input("input_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
        # No shape: GenAI passes the vision model's output [N, F, D], or [0, D] if there are no pictures.
        features = self._input("image_features", ir.DataType.FLOAT, None)
        words = self._embed(input_ids, decoder)
        token = self._integers("image_token", decoder.image_token_id)
        is_image = self._op("Equal", [input_ids, token], "is_image")
        image = self._op("Cast", [is_image], "image", to=ir.DataType.INT64.value)
        counted = self._op("CumSum", [image, self._integers("axis", 1)], "images_so_far")
        # A row of zeros is put before the features: text tokens have index 0.
        rows = self._op("Reshape", [features, self._integers("rows_shape", [-1, hidden])], "image_rows")
        zeros = self._initializer("zeros", ir.tensor([[0.0] * hidden], dtype=ir.DataType.FLOAT, name="zeros"))
        rows = self._op("Concat", [zeros, rows], "all_rows", axis=0)
        pictures = self._op("Gather", [rows, self._op("Mul", [counted, image], "row")], "pictures", axis=0)
        is_image = self._op("Unsqueeze", [is_image, self._integers("last_axis", [-1])], "is_image/column")
        embeddings = self._op("Where", [is_image, pictures, words], "inputs_embeds")
        shape: list[int | str | None] = ["batch_size", "sequence_length", hidden]
        return self._model("embedding", [self._output(embeddings, "inputs_embeds", shape)])

# SPDX-License-Identifier: Apache-2.0
"""Writes the ONNX graph of a decoder with the inputs that ORT GenAI's engine feeds: many sequences, a paged KV cache.

Shapes (N new tokens of B sequences, one sequence after the other; at most M blocks of a sequence; P blocks of S tokens
in all; V words of the vocabulary; other letters as in `Decoder`):

    input_ids int64 [N];  cumulative_sequence_lengths int32 [B + 1];  past_sequence_lengths int32 [B]
    block_table int32 [B, M]
    past_key_values.{i}.key, past_key_values.{i}.value [P, S, G, d], of the KV cache's type
    logits float32 [B, V] of each sequence's last new token;  present.{i}.key, present.{i}.value: the same memory

Layers are those of decoder.py, with PagedAttention. All of them keep all tokens: the engine reuses what earlier prompts
with the same beginning left in the cache, but only if no layer drops tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from flownpu.convert.graph.decoder import Attended, DecoderWriter
from flownpu.ops.definitions.kv_dtypes import KV_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.convert.decoder import Decoder, Layer


def build_paged_model(
    decoder: Decoder, tensors: Mapping[str, ir.TensorProtocol], *, kv_dtype: str = "bf16"
) -> ir.Model:
    """The decoder's ONNX model, with the functions that define its operators.

    Args:
        decoder: what to write; it must take no pictures.
        tensors: each weight of `weight_plan` and each rotary table, by name.
        kv_dtype: the KV cache's type, a key of KV_DTYPES.
    """
    return _Writer(decoder, tensors, KV_DTYPES[kv_dtype]).model()


class _Writer(DecoderWriter):
    def model(self) -> ir.Model:
        int32 = ir.DataType.INT32
        input_ids = self._input("input_ids", ir.DataType.INT64, ["num_tokens"])
        self.boundaries = self._input("cumulative_sequence_lengths", int32, ["boundaries"])
        self.pasts = self._input("past_sequence_lengths", int32, ["batch_size"])
        self.table = self._input("block_table", int32, ["batch_size", "max_blocks"])
        hidden = self._layers(self._embed(input_ids, self.decoder))
        # This axis's name tells the engine that there is a row for each sequence, not for each token.
        logits = self._logits(self._last_tokens(hidden), ["batch_size"])
        return self._model(self.decoder.family, [logits, *self.present])

    def _last_tokens(self, hidden: ir.Value) -> ir.Value:
        """The hidden states of each sequence's last new token, [B, D]."""
        ends = self._op(
            "Slice",
            [self.boundaries, self._integers("from_1", [1]), self._integers("to_end", [2**63 - 1])],
            "last_token/ends",
        )
        one = self._initializer("one_int32", ir.tensor(1, dtype=ir.DataType.INT32, name="one_int32"))
        return self._op(
            "Gather", [hidden, self._op("Sub", [ends, one], "last_token/places")], "last_token/hidden", axis=0
        )

    def _cache_shape(self, layer: Layer) -> list[int | str | None]:
        del layer  # all are of one form
        return ["num_blocks", "block_size", self.decoder.kv_heads, self.decoder.head_size]

    def _attend(self, layer: Layer, attended: Attended) -> tuple[str, list[ir.Value | None], dict[str, int]]:
        del layer  # its window is an attribute that _attention sets for every operator
        query, key, value = attended.qkv
        if key is not None:  # PagedAttention takes the three packed
            query = self._op("Concat", [query, key, value], f"{key.name}/qkv", axis=-1)
        lengths = self.boundaries, self.pasts, self.table
        return "PagedAttention", [query, *attended.past, *lengths, *attended.rotary, *attended.norms], {}

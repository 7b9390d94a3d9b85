# SPDX-License-Identifier: Apache-2.0
"""Writes the ONNX graph of a small decoder that drafts for a larger one and reads that one's keys and values (Gemma 4).

    x = pre_projection [embedding of the last token, state];  h = norm(layers(x));  state' = post_projection h

Shapes of one token (L tokens so far, of which the larger model, of D', has computed all but the last; others as in
decoder.py):

    embeddings float32 [1, 1, D']: of the last token, as the larger model has it;  attention_mask int64 [1, L - 1]
    hidden_states float32 [1, 1, D']: what the larger model's LM head took to choose that token
    past_key_values.{0, 1}.key, past_key_values.{0, 1}.value [1, G, P, d]: of its last layer with a window, and of its
        last without, as it keeps them: rotated and normalised
    next_token int64 [1, 1];  hidden_states_out float32 [1, 1, D']: in the place of the state for a token behind

All tokens of a draft have the position of the first, L - 1, and the same keys: no token of a draft adds any. A layer
with a window w sees the last w + 1 of them, as in transformers (`create_bidirectional_sliding_window_mask`).

If tokens are in clusters, the next one is the likeliest of those in the clusters whose centroids are likeliest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from flownpu.convert.graph.decoder import Attended, DecoderWriter
from flownpu.convert.weights import embedding_table
from flownpu.ops.definitions.kv_dtypes import KV_DTYPES, cache_columns
from flownpu.ops.definitions.onnx_function import DOMAIN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.convert.decoder import Decoder, Layer
    from flownpu.convert.layer_parts import Drafting


def build_drafter(decoder: Decoder, tensors: Mapping[str, ir.TensorProtocol], kv_dtype: str) -> ir.Model:
    """The ONNX model of a decoder that drafts.

    Args:
        decoder: a decoder with `drafting`, and one table of RoPE for all lengths.
        tensors: the weights of `weight_plan`, and each rotary table, by name.
        kv_dtype: the type of the larger model's KV cache, a key of KV_DTYPES.
    """
    assert decoder.drafting is not None
    return _Writer(decoder, tensors, KV_DTYPES[kv_dtype]).model(decoder.drafting)


class _Writer(DecoderWriter):
    def model(self, drafting: Drafting) -> ir.Model:
        shape: list[int | str | None] = [1, 1, drafting.hidden_size]
        given = [self._input(name, ir.DataType.FLOAT, shape) for name in ("embeddings", "hidden_states")]
        mask = self._input("attention_mask", ir.DataType.INT64, [1, "total_sequence_length"])
        self.lengths = self._lengths(mask)
        size = self._op("Shape", [mask], "position/tokens", start=1, end=2)
        self.position = self._op("Unsqueeze", [size, self._integers("axis_0", [0])], "position")
        for layer in self.decoder.layers:
            assert layer.shared is not None
            if layer.shared not in self.cached:
                columns = cache_columns(self.kv_dtype, layer.head_size or self.decoder.head_size)
                cache: list[int | str | None] = [1, layer.kv_heads or self.decoder.kv_heads, None, columns]
                self.cached[layer.shared] = [
                    self._input(f"past_key_values.{layer.shared}.{part}", self.kv_dtype, cache)
                    for part in ("key", "value")
                ]
        joined = self._op("Concat", given, "joined", axis=-1)
        hidden = self._layers(self._project(joined, "pre_projection"))
        output = self._output(self._project(hidden, "post_projection"), "hidden_states_out", shape)
        token = self._of_clusters(hidden, drafting) if drafting.clusters else self._of_all(hidden)
        token.name, token.dtype, token.shape = "next_token", ir.DataType.INT64, ir.Shape([1, 1])
        return self._model("drafter", [token, output])

    def _of_all(self, hidden: ir.Value) -> ir.Value:
        head = "embed_tokens" if self.decoder.tied_embeddings else "lm_head"
        return self._op("ArgMax", [self._project(hidden, head, node="lm_head")], "token", axis=-1, keepdims=0)

    def _of_clusters(self, hidden: ir.Value, drafting: Drafting) -> ir.Value:
        """The likeliest token, int64 [1, 1], of the chosen clusters."""
        table = embedding_table(self.decoder)
        weight = self._weight(table.name if self.decoder.tied_embeddings else "lm_head")
        likely = self.tape.op_multi_out(
            "TopK",
            [self._project(hidden, "centroids"), self._integers("chosen", [drafting.chosen])],
            num_outputs=2,
            name="/clusters",
        )
        likely[0].name, likely[1].name = "/clusters/values", "/clusters/indices"
        found = self._op("Gather", [self._weight("tokens_of_clusters"), likely[1]], "clusters/tokens", axis=0)
        row = self._op("Reshape", [found, self._integers("row", [1, -1])], "clusters/row")
        tokens = self._op("Cast", [row], "clusters/ids", to=ir.DataType.INT64.value)
        rows = self._op("Q4NXGather", [weight, tokens], "lm_head/rows", domain=DOMAIN, M=table.rows, K=table.columns)
        column = self._op("Reshape", [hidden, self._integers("column", [1, -1, 1])], "lm_head/column")
        logits = self._op("MatMul", [rows, column], "lm_head")
        best = self._op("ArgMax", [logits], "lm_head/best", axis=1, keepdims=0)
        return self._op("GatherElements", [tokens, best], "token", axis=1)

    def _attend(self, layer: Layer, attended: Attended) -> tuple[str, list[ir.Value | None], dict[str, int]]:
        inputs = [*attended.qkv, *attended.past, *self.lengths, *attended.rotary, self.position, None, *attended.norms]
        return "FlowQKVAttention", inputs, {"local_window_size": -1 if layer.window is None else layer.window + 1}

# SPDX-License-Identifier: Apache-2.0
"""Writes the ONNX graph of a head for multi-token prediction, with the names of GenAI's builder.

    x[t] = fc [norm(embedding of token t + 1), norm(hidden_states[t])];  h = norm(layer(x));  logits = lm_head h

Shapes as in decoder.py, of one sequence:

    input_ids int64 [1, S]: the tokens behind those of the hidden states;  attention_mask int64 [1, T]
    hidden_states float32 [1, S, D]: what the decoder's LM head takes, or a head's own for a token that it proposed
    past_key_values.0.key, past_key_values.0.value [1, G, P, d]
    logits float32 [1, 1, V] of the last token;  hidden_states_out float32 [1, 1, D] of it
    present.0.key, present.0.value
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from flownpu.convert.graph.decoder import Attended, DecoderWriter
from flownpu.convert.weights.prediction_head import JOINED, PREFIX, SHARED, head_of, joining_projection
from flownpu.ops.definitions.kv_dtypes import KV_DTYPES, cache_columns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.convert.decoder import Decoder, Layer


def build_prediction_head(decoder: Decoder, tensors: Mapping[str, ir.TensorProtocol], kv_dtype: str) -> ir.Model:
    """The ONNX model of a decoder's head.

    Args:
        decoder: a decoder with a head, and one table of RoPE for all lengths.
        tensors: the weights of `weight_plan` and `head_plan`, and each rotary table, by name.
        kv_dtype: the KV cache's type, a key of KV_DTYPES.
    """
    return _Writer(head_of(decoder), tensors, KV_DTYPES[kv_dtype]).model()


class _Writer(DecoderWriter):
    def model(self) -> ir.Model:
        decoder = self.decoder
        joining = joining_projection(decoder)
        self.projections[joining.name] = joining
        input_ids = self._input("input_ids", ir.DataType.INT64, [1, "sequence_length"])
        states = self._input("hidden_states", ir.DataType.FLOAT, [1, "sequence_length", decoder.hidden_size])
        self.lengths = self._lengths(self._input("attention_mask", ir.DataType.INT64, [1, "total_sequence_length"]))
        vectors = zip((self._embed(input_ids, decoder), states), JOINED, strict=True)
        joined = self._op("Concat", [self._norm(value, name) for value, name in vectors], "joined", axis=-1)
        hidden = self._layers(self._project(joined, joining.name))
        bounds = [self._integers(name, [value]) for name, value in (("last", -1), ("end", 2**31 - 1), ("axis_1", 1))]
        last = self._op("Slice", [hidden, *bounds], "last_token/hidden")
        logits = self._logits(last, [1, 1])
        output = self._output(last, "hidden_states_out", [1, 1, decoder.hidden_size])
        return self._model("prediction_head", [logits, output, *self.present])

    def _weight(self, name: str) -> ir.Value:
        own = not name.startswith(("rotary.", *SHARED))
        return super()._weight(PREFIX + name if own else name)

    def _cache_shape(self, layer: Layer) -> list[int | str | None]:
        columns = cache_columns(self.kv_dtype, layer.head_size or self.decoder.head_size)
        return [1, layer.kv_heads or self.decoder.kv_heads, None, columns]

    def _attend(self, layer: Layer, attended: Attended) -> tuple[str, list[ir.Value | None], dict[str, int]]:
        del layer
        inputs = [*attended.qkv, *attended.past, *self.lengths, *attended.rotary, None, None, *attended.norms]
        return "FlowQKVAttention", inputs, {}

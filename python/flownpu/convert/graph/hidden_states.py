# SPDX-License-Identifier: Apache-2.0
"""Writes the ONNX graph of a decoder's last hidden states, for embeddings: without KV cache and without logits.

Shapes (B batch, S tokens of the longest row, D hidden size):

    input_ids int64 [B, S];  attention_mask int64 [B, S], rows padded on the right
    last_hidden_state float32 [B, S, D], normalised

Layers are those of decoder.py. In a `bidirectional` decoder all tokens see one another; in a layer with a window, a
bias [1, 1, S, S] hides tokens that are farther away on either side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from flownpu.convert.graph.decoder import Attended, DecoderWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flownpu.convert.decoder import Decoder, Layer

# Added to the scores of tokens that are hidden: scores are far smaller than this, and e to this power is 0. It is not
# minus infinity, since a query in the padding may see hidden tokens only: its output would be NaN, and a pooling that
# multiplies by the mask would spread that.
_HIDDEN = -1e9


def build_hidden_states_model(decoder: Decoder, tensors: Mapping[str, ir.TensorProtocol]) -> ir.Model:
    """The ONNX model of the decoder's last hidden states, with the functions that define its operators.

    Args:
        decoder: what to write; it must take no pictures, and have one table of RoPE for all lengths.
        tensors: each weight of `weight_plan` except the LM head, and each rotary table, by name.
    """
    return _Writer(decoder, tensors, ir.DataType.FLOAT).model()


class _Writer(DecoderWriter):
    def model(self) -> ir.Model:
        shape: list[int | str | None] = ["batch_size", "sequence_length"]
        input_ids = self._input("input_ids", ir.DataType.INT64, shape)
        self.lengths = self._lengths(self._input("attention_mask", ir.DataType.INT64, shape))
        self.windows = {
            window: self._near(input_ids, window)
            for window in sorted({layer.window for layer in self.decoder.layers if layer.window is not None})
            if self.decoder.bidirectional
        }
        hidden = self._layers(self._embed(input_ids, self.decoder))
        output = self._output(hidden, "last_hidden_state", [*shape, self.decoder.hidden_size])
        return self._model(self.decoder.family, [output])

    def _near(self, input_ids: ir.Value, window: int) -> ir.Value:
        """The bias of the scores, [1, 1, S, S]: 0 if query and key are less than `window` apart, else _HIDDEN."""
        name = f"window.{window}"
        count = self._op("Shape", [input_ids], f"{name}/count", start=1, end=2)
        limit = self._op("Squeeze", [count, self._integers("axis_0", [0])], f"{name}/limit")
        places = self._op(
            "Range", [self._integers("index_0", 0), limit, self._integers("index_1", 1)], f"{name}/places"
        )
        queries = self._op("Unsqueeze", [places, self._integers("axis_1", [1])], f"{name}/queries")
        apart = self._op("Sub", [queries, places], f"{name}/apart")
        behind = self._op("Less", [apart, self._integers(f"{name}.size", window)], f"{name}/behind")
        before = self._op("Less", [self._integers(f"{name}.negative", -window), apart], f"{name}/before")
        near = self._op("And", [behind, before], f"{name}/near")
        bias = self._op("Where", [near, self._float("seen", 0.0), self._float("hidden", _HIDDEN)], f"{name}/bias")
        return self._op("Unsqueeze", [bias, self._integers("axes_0_1", [0, 1])], name)

    def _past(self, index: int) -> Sequence[ir.Value | None]:
        """No inputs: a text is computed in one run, without earlier tokens."""
        del index
        return [None, None]

    def _add_present(self, index: int, present: Sequence[ir.Value]) -> None:
        """Names the unused outputs, because ONNX Runtime requires all outputs in the call of a function."""
        for value, part in zip(present, ("key", "value"), strict=True):
            value.name = f"/layers.{index}.self_attn/attention/{part}"

    def _attend(self, layer: Layer, attended: Attended) -> tuple[str, list[ir.Value | None], dict[str, int]]:
        bidirectional = self.decoder.bidirectional
        bias = self.windows.get(layer.window) if layer.window is not None else None
        inputs = [*attended.qkv, *attended.past, *self.lengths, *attended.rotary, None, bias, *attended.norms]
        return "FlowQKVAttention", inputs, {"causal": 0, "local_window_size": -1} if bidirectional else {}

# SPDX-License-Identifier: Apache-2.0
"""Writes the ONNX graph of a decoder, with the inputs that ORT GenAI's generators feed.

The graph for GenAI's engine is written by paged_decoder.py, that of models that embed texts by hidden_states.py.

Shapes (B batch, S new tokens, T tokens so far, P capacity of the KV cache, V words of the vocabulary, other letters as
in `Decoder`):

    input_ids int64 [B, S];  attention_mask int64 [B, T]
    inputs_embeds float32 [B, S, D], if the decoder takes pictures; input_ids then only tell which are image tokens
    past_key_values.{i}.key, past_key_values.{i}.value [B, G, P, d], of the KV cache's type
    logits float32 [B, 1, V] of each row's last token, or [B, S, V];  present.{i}.key, present.{i}.value

A layer is: norm, packed QKV projection, attention with QK-norm and RoPE inside, output projection, norm with the
residual, gate/up projection with its activation, down projection (or a mixture of experts in their place), norm with
the residual; `Decoder` says which norms and biases there are. Weights are initializers with the names in
`weights.weight_plan`; they refer to the data file, which is not read here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import onnx_ir as ir

from flownpu.convert.graph.feed_forward import FeedForwardWriter
from flownpu.convert.graph.writer import MICROSOFT
from flownpu.ops.definitions.kv_dtypes import KV_DTYPES, cache_columns
from flownpu.ops.definitions.onnx_function import DOMAIN, VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flownpu.convert.decoder import Decoder, Layer, Rotary

Logits = Literal["last", "all"]


def rotary_cache_names(index: int) -> tuple[str, str]:
    """The names of the tables of cos and sin of `Decoder.rotaries[index]`."""
    return f"rotary.{index}.cos", f"rotary.{index}.sin"


def build_model(
    decoder: Decoder,
    tensors: Mapping[str, ir.TensorProtocol],
    *,
    kv_dtype: str = "bf16",
    logits: Logits = "last",
    sliding_window_cache: bool = False,
) -> ir.Model:
    """The decoder's ONNX model, with the functions that define its operators.

    Args:
        decoder: what to write.
        tensors: each weight of `weight_plan` and each rotary table (`rotary_cache_names`), by name.
        kv_dtype: the KV cache's type, a key of KV_DTYPES.
        logits: whether to yield the logits of each row's last token or of all tokens.
        sliding_window_cache: layers with a window keep a cache of the window's size.
    """
    return _Writer(decoder, tensors, KV_DTYPES[kv_dtype], logits, sliding_window_cache).model()


class Attended(NamedTuple):
    """The inputs of a layer's attention, whatever operator it is; None for an input that is absent."""

    qkv: Sequence[ir.Value | None]
    """Queries, keys and values, or all three packed in the first."""
    past: Sequence[ir.Value | None]
    """Keys and values of earlier tokens."""
    rotary: Sequence[ir.Value | None]
    """Tables of cos and sin."""
    norms: Sequence[ir.Value | None]
    """Weights of the norms of each head's queries and keys."""
    sinks: ir.Value | None = None
    """The score of one more key for each query head."""


class DecoderWriter(FeedForwardWriter):
    """Writes a decoder's layers and LM head; subclasses add the graph's inputs and the operator of attention."""

    def __init__(self, decoder: Decoder, tensors: Mapping[str, ir.TensorProtocol], kv_dtype: ir.DataType) -> None:
        """Takes the decoder to write, its weights by name, and the type of the KV cache."""
        super().__init__(decoder, tensors)
        self.kv_dtype = kv_dtype
        self.cached: dict[int, Sequence[ir.Value]] = {}
        self.shared: dict[str, ir.Value] = {}

    def _layers(self, embeddings: ir.Value, for_layers: ir.Value | None = None) -> ir.Value:
        """The normalised hidden states that the LM head takes, in the embeddings' shape, but for `_cut`.

        `for_layers`: the tokens' embeddings for all layers, if there are such.
        """
        decoder, residual, count = self.decoder, embeddings, len(self.decoder.layers)
        hidden = self._norm(embeddings, "layers.0.input_layernorm") if decoder.norms_before else embeddings
        sandwich, own = decoder.sandwich_norms, decoder.own_layers
        parts: list[ir.Value] = []
        if for_layers is not None:
            sizes = [size * decoder.per_layer_size for size in (own, count - own) if size]
            for_layers, *later = self._split(for_layers, "per_layer.kinds", sizes)
            parts = self._parts_for_layers(for_layers, 0, own)
        for i in range(count):
            layer = f"layers.{i}"
            mixer = decoder.layers[i].mixer
            if 0 < i == own:
                residual = self._cut(residual, "residual")
                hidden = self._norm(residual, f"{layer}.input_layernorm")
                parts += self._parts_for_layers(self._cut(later[0], "per_layer"), own, count - own) if parts else []
            hidden = self._attention(i, hidden) if mixer is None else self._mixer(i, mixer, hidden)
            if sandwich:
                hidden = self._norm(hidden, f"{layer}.post_attention_layernorm")
            before_mlp = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
            hidden, residual = self._next(hidden, residual, f"{layer}.{before_mlp}")
            hidden = self._feed_forward(i, hidden, residual)
            if sandwich:
                hidden = self._norm(hidden, f"{layer}.post_feedforward_layernorm")
            following = f"layers.{i + 1}.input_layernorm" if i + 1 < count else "norm"
            if parts or decoder.layer_scalars:
                total = self._op("Add", [residual, hidden], f"{layer}.sum")
                residual = self._after_layer(i, total, parts[i] if parts else None)
                hidden = residual if i + 1 == own < count else self._norm(residual, following)
            elif i + 1 < count:
                hidden, residual = self._next(hidden, residual, following)
            else:
                hidden, _ = self._residual_norm(hidden, residual, following)
        return hidden

    def _cut(self, x: ir.Value, name: str) -> ir.Value:
        """The part of x [B, S, ..] that layers need which read only keys and values of earlier layers."""
        del name
        return x

    def _next(self, x: ir.Value, residual: ir.Value, weight: str) -> tuple[ir.Value, ir.Value]:
        """Adds a part's output to the residual stream; returns the input of the layer's next part, and the sum."""
        if self.decoder.norms_before:
            return self._residual_norm(x, residual, weight)
        total = self._op("Add", [residual, x], f"{weight}/sum")
        return total, total

    def _attention(self, index: int, hidden: ir.Value) -> ir.Value:
        decoder, name = self.decoder, f"layers.{index}.self_attn"
        layer = decoder.layers[index]
        past = self._past(index) if layer.shared is None else self.cached[layer.shared]
        caches: list[ir.Value | None] = [None, None]
        if layer.rotary.rotated:
            caches = [self._weight(n) for n in rotary_cache_names(decoder.rotaries.index(layer.rotary))]
        names = ("q_norm", "k_norm" if layer.shared is None else "q_norm")
        norms = [self._weight(f"{name}.{n}") if decoder.qk_norm else None for n in names]
        qkv = self._query_key_value(hidden, name, layer)
        sinks = self._weight(f"{name}.sinks") if decoder.head_sinks else None
        op_type, inputs, more = self._attend(layer, Attended(qkv, past, caches, norms, sinks))
        attributes: dict[str, int | float] = {
            "num_heads": decoder.heads,
            "kv_num_heads": layer.kv_heads or decoder.kv_heads,
            "head_size": layer.head_size or decoder.head_size,
            "scale": decoder.attention_scale,
            "softcap": decoder.attention_softcap,
            "local_window_size": -1 if layer.window is None else layer.window,
            "do_rotary": int(layer.rotary.rotated > 0),
            "qk_norm_epsilon": decoder.norm_epsilon,
            **more,
        }
        output, *present = self.tape.op_multi_out(
            op_type,
            inputs,
            attributes=attributes,
            num_outputs=3 if layer.shared is None else 1,
            domain=DOMAIN,
            version=VERSION,
            name=f"/{name}/attention",
        )
        output.name = f"/{name}/attention/output"
        if layer.shared is None:
            self.cached[index] = present
            self._add_present(index, present)
        if decoder.output_gate:
            gate = self._op("Sigmoid", [self._project(hidden, f"{name}.gate_proj")], f"{name}.open")
            output = self._op("Mul", [output, gate], f"{name}.gated")
        return self._project(output, f"{name}.o_proj", bias=decoder.output_bias)

    def _past(self, index: int) -> Sequence[ir.Value | None]:
        """The graph's inputs with a layer's cached keys and values."""
        shape = self._cache_shape(self.decoder.layers[index])
        return [self._input(f"past_key_values.{index}.{part}", self.kv_dtype, shape) for part in ("key", "value")]

    def _add_present(self, index: int, present: Sequence[ir.Value]) -> None:
        """Makes a layer's keys and values outputs of the graph."""
        for value, part in zip(present, ("key", "value"), strict=True):
            value.name = f"present.{index}.{part}"
            value.dtype, value.shape = self.kv_dtype, ir.Shape(self._cache_shape(self.decoder.layers[index]))
            self.present.append(value)

    def _query_key_value(self, hidden: ir.Value, module: str, layer: Layer) -> list[ir.Value | None]:
        """Queries, keys and values: packed in the first, or separate if attention itself has not all their norms."""
        decoder = self.decoder
        packed = self._project(hidden, f"{module}.qkv_proj", bias=decoder.qkv_bias)
        size, kv_heads = layer.head_size or decoder.head_size, layer.kv_heads or decoder.kv_heads
        if layer.shared is not None:
            nothing = self._nothing(packed, kv_heads * size)
            return [packed, nothing, nothing]
        if not decoder.projection_norms and not decoder.value_norm:
            return [packed, None, None]
        counts = (decoder.heads, kv_heads) if layer.keys_are_values else (decoder.heads, kv_heads, kv_heads)
        query, key, *values = self._split(packed, f"{module}.split", [count * size for count in counts])
        value = values[0] if values else key
        if decoder.value_norm:
            return [query, key, self._norm_of_heads(value, f"{module}.v_norm", kv_heads, size)]
        return [self._norm(query, f"{module}.q_norm"), self._norm(key, f"{module}.k_norm"), value]

    def _norm_of_heads(self, x: ir.Value, name: str, heads: int, size: int) -> ir.Value:
        """The RMS norm, without a weight, of each head of x [B, S, heads size]."""
        by_head = self._integers(f"by_head.{heads}_{size}", [0, 0, heads, size])
        ones = ir.tensor([1.0] * size, dtype=ir.DataType.FLOAT, name=f"ones.{size}")
        normed = self._op(
            "SimplifiedLayerNormalization",
            [self._op("Reshape", [x, by_head], f"{name}/heads"), self._initializer(f"ones.{size}", ones)],
            name,
            axis=-1,
            epsilon=self.decoder.norm_epsilon,
            stash_type=1,
        )
        flat = self._integers(f"flat.{heads * size}", [0, 0, heads * size])
        return self._op("Reshape", [normed, flat], f"{name}/flat")

    def _nothing(self, query: ir.Value, columns: int) -> ir.Value:
        """Keys or values of no tokens, [B, 0, columns], for attention to those of another layer."""
        name = f"no_keys.{columns}"
        if name not in self.shared:
            bounds = [
                self._integers(f"{name}.{part}", values)
                for part, values in (("starts", [0, 0]), ("ends", [0, columns]), ("axes", [1, 2]))
            ]
            self.shared[name] = self._op("Slice", [query, *bounds], name)
            self.shared[name].dtype, self.shared[name].shape = ir.DataType.FLOAT, ir.Shape(["batch_size", 0, columns])
        return self.shared[name]

    def _cache_shape(self, layer: Layer) -> list[int | str | None]:
        """The shape of a layer's cached keys, which is also that of its values."""
        raise NotImplementedError

    def _attend(self, layer: Layer, attended: Attended) -> tuple[str, list[ir.Value | None], dict[str, int]]:
        """The type of a layer's attention operator, its inputs, and the attributes that only this type has."""
        raise NotImplementedError

    def _logits(self, hidden: ir.Value, shape: list[int | str | None]) -> ir.Value:
        """The graph's output "logits", from hidden states [*shape, D]; its shape is [*shape, V]."""
        logits = self._project(hidden, "embed_tokens" if self.decoder.tied_embeddings else "lm_head", node="lm_head")
        if cap := self.decoder.logit_softcap:
            softcap = self._float("logit_softcap", cap)
            scaled = self._op("Div", [logits, softcap], "lm_head/scaled")
            logits = self._op("Mul", [self._op("Tanh", [scaled], "lm_head/tanh"), softcap], "lm_head/capped")
        return self._output(logits, "logits", [*shape, self.decoder.vocabulary_size])

    def _residual_norm(self, x: ir.Value, residual: ir.Value, weight: str) -> tuple[ir.Value, ir.Value]:
        """Both norm(residual + x) and the sum residual + x."""
        normalised, mean, inverse_deviation, total = self.tape.op_multi_out(
            "SkipSimplifiedLayerNormalization",
            [residual, x, self._weight(weight)],
            attributes={"epsilon": self.decoder.norm_epsilon},
            num_outputs=4,
            domain=MICROSOFT,
            version=1,
            name=f"/{weight}",
        )
        mean.name = inverse_deviation.name = ""  # optional outputs that are not used
        normalised.name, total.name = f"/{weight}/output", f"/{weight}/sum"
        return normalised, total


class _Writer(DecoderWriter):
    def __init__(
        self,
        decoder: Decoder,
        tensors: Mapping[str, ir.TensorProtocol],
        kv_dtype: ir.DataType,
        logits: Logits,
        sliding_window_cache: bool,
    ) -> None:
        super().__init__(decoder, tensors, kv_dtype)
        self.all_logits = logits == "all"
        self.sliding_window_cache = sliding_window_cache
        self.lengths: list[ir.Value] = []
        self.image_blocks: ir.Value | None = None
        self.positions: dict[int, ir.Value] = {}

    def model(self) -> ir.Model:
        input_ids = self._input("input_ids", ir.DataType.INT64, ["batch_size", "sequence_length"])
        attention_mask = self._input("attention_mask", ir.DataType.INT64, ["batch_size", "total_sequence_length"])
        lengths, total = self._lengths(attention_mask)
        if self.decoder.has_states:
            self._count_tokens(attention_mask, input_ids)
        for index, rotary in enumerate(self.decoder.rotaries):
            if rotary.has_two_tables(self.decoder.context_length):
                self.positions[index] = self._rows_of_tables(rotary, input_ids, lengths, total)
        if self.decoder.image_token_id is None:
            embeddings = self._embed(input_ids, self.decoder)
        else:
            shape: list[int | str | None] = ["batch_size", "sequence_length", self.decoder.hidden_size]
            embeddings = self._input("inputs_embeds", ir.DataType.FLOAT, shape)
            self.image_blocks = self._blocks(input_ids, self.decoder.image_token_id)
        self.lengths, self.input_ids = [lengths, total], input_ids
        for_layers = self._embed_for_layers(input_ids, embeddings) if self.decoder.per_layer_size else None
        hidden = self._layers(embeddings, for_layers)
        if not self.all_logits and self.decoder.own_layers == len(self.decoder.layers):
            hidden = self._last_token(hidden, "last_token")
        logits = self._logits(hidden, ["batch_size", "sequence_length" if self.all_logits else 1])
        return self._model(self.decoder.family, [logits, *self.present])

    def _blocks(self, input_ids: ir.Value, image_token: int) -> ir.Value:
        """The number of each token's block of image tokens, int32 [B, S]; 0 for a text token.

        It is 1 + the number of text tokens before: consecutive image tokens have the same, and the next run of them a
        higher one, however many pictures there are.
        """
        is_image = self._op("Equal", [input_ids, self._integers("image_token", image_token)], "image_blocks/is_image")
        image = self._op("Cast", [is_image], "image_blocks/image", to=ir.DataType.INT32.value)
        one = self._initializer("one_int32", ir.tensor(1, dtype=ir.DataType.INT32, name="one_int32"))
        text = self._op("Sub", [one, image], "image_blocks/text")
        texts = self._op("CumSum", [text, self._integers("index_1", 1)], "image_blocks/texts")
        return self._op("Mul", [image, self._op("Add", [texts, one], "image_blocks/number")], "image_blocks")

    def _rows_of_tables(self, rotary: Rotary, input_ids: ir.Value, lengths: ir.Value, total: ir.Value) -> ir.Value:
        """The rows of the rotary tables for the tokens, int64 [B, S]: in the second table if T exceeds the first."""
        first, name = rotary.first_rows(self.decoder.context_length), f"rotary.{self.decoder.rotaries.index(rotary)}"
        new = self._op("Shape", [input_ids], f"{name}/new_tokens", start=1, end=2)
        total = self._op("Cast", [total], f"{name}/total", to=ir.DataType.INT64.value)
        lasts = self._op("Cast", [lengths], f"{name}/lasts", to=ir.DataType.INT64.value)
        zero, one = self._integers("index_0", 0), self._integers("one", [1])
        before = self._op("Sub", [self._op("Add", [lasts, one], f"{name}/lengths"), new], f"{name}/tokens_before")
        is_first = self._op("Equal", [total, new], f"{name}/is_first_prompt")
        before = self._op("Where", [is_first, zero, before], f"{name}/past")
        before = self._op("Unsqueeze", [before, self._integers("axis_1", [1])], f"{name}/past_column")
        new = self._op("Squeeze", [new, self._integers("axis_0", [0])], f"{name}/new_token_count")
        counted = self._op("Range", [zero, new, self._integers("index_1", 1)], f"{name}/counted")
        positions = self._op("Add", [before, counted], f"{name}/positions")
        border = self._integers(f"{name}.first_rows", first)
        reaches = self._op("Greater", [total, border], f"{name}/reaches_second")
        return self._op("Add", [positions, self._op("Where", [reaches, border, zero], f"{name}/start")], f"{name}/rows")

    def _cache_shape(self, layer: Layer) -> list[int | str | None]:
        # The capacity has no name: ONNX Runtime takes dimensions of equal name for equal sizes, and would have the
        # GroupQueryAttention in the operator's definition write a longer present into the memory of the past.
        columns = cache_columns(self.kv_dtype, layer.head_size or self.decoder.head_size)
        return ["batch_size", layer.kv_heads or self.decoder.kv_heads, None, columns]

    def _cut(self, x: ir.Value, name: str) -> ir.Value:
        """The last tokens, whose logits alone are asked for: the others give keys and values to no layer behind."""
        return x if self.all_logits else self._last_token(x, f"last_token/{name}")

    def _attend(self, layer: Layer, attended: Attended) -> tuple[str, list[ir.Value | None], dict[str, int]]:
        windowed = layer.window is not None and self.sliding_window_cache
        positions = self.positions.get(self.decoder.rotaries.index(layer.rotary)) if layer.rotary.rotated else None
        inputs = [*attended.qkv, *attended.past, *self.lengths, *attended.rotary, positions, None, *attended.norms]
        inputs += [self.image_blocks, *([attended.sinks] if attended.sinks else [])]
        return "FlowQKVAttention", inputs, {"sliding_window_cache": int(windowed)}

    def _last_token(self, hidden: ir.Value, name: str) -> ir.Value:
        """The hidden states of each row's last token, [B, 1, D].

        Its index is min(seqlens_k, S - 1): the rows of a first prompt may be padded on the right.
        """
        if "last_token" not in self.shared:
            last = self._op("Cast", [self.lengths[0]], "last_token/position", to=ir.DataType.INT64.value)
            new = self._op("Shape", [self.input_ids], "last_token/new_tokens", start=1, end=2)
            newest = self._op("Sub", [new, self._integers("one", [1])], "last_token/newest")
            index = self._op("Min", [last, newest], "last_token/minimum")
            axes = self._integers("axes_1_2", [1, 2])
            self.shared["last_token"] = self._op("Unsqueeze", [index, axes], "last_token/index")
        return self._op("GatherND", [hidden, self.shared["last_token"]], f"{name}/hidden", batch_dims=1)

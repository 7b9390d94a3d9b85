# SPDX-License-Identifier: Apache-2.0
"""A decoder on the array: the designs' parameters of its layers, and the buffers that its programs share.

aie/designs/decode_layer/shape.py has the layouts:

weights   u8    [layer][QKV | output | gate and up | down], then the LM head
vectors   bf16  [layer][norms][line], each layer followed by its sinks and QK-norm weights; then the final norms
rotary    bf16  [tables][context][d]
cache     bf16  [layer with attention][context][G][2][d], and behind it, with an int8 cache, the same in rows of int8
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from flownpu._native import Attention, GatedDelta
from flownpu.aie.designs.bias import bias_column
from flownpu.aie.designs.common import BLOCK_COLUMNS, BLOCK_ROWS, ceil_div
from flownpu.aie.designs.decode_layer.call import BEFORE_STATE, CalledLayer
from flownpu.aie.designs.decode_layer.shape import LayerShape, Projection
from flownpu.aie.designs.gated_delta import GatedDelta as GatedDeltaDesign
from flownpu.aie.programs.host import Experts
from flownpu.aie.programs.program import BF16_BYTES, Buffer, CacheLayout, Role, View, attribute_words

if TYPE_CHECKING:
    from flownpu._native import Decoder
    from flownpu.aie.programs.program import ProgramWriter

# The dequantisation engine weaves 64 columns of a gate and of its up projection (designs/dequant_engine.py).
_GATE_COLUMNS = 64
# Attributes of the node that a program is for whatever their values are.
_ANY = {
    "positions",
    "all_logits",
    "position_ids",
    "rotated_size",
    "given_tables",
    "attention.mask",
    "attention.window_sized_cache",
    "attention.bidirectional_blocks",
}


def bits_name(eight_bits: int) -> str:
    """The part of calls' names that says which weights have 8 bits, as in `LayerShape.of_bits`, if any."""
    return f"-8bits{int(eight_bits)}" if eight_bits else ""


@dataclass(frozen=True)
class DecoderShape:
    """The array's view of a decoder: the description of its layers, and the designs' parameters.

    Attributes:
        model: the decoder's layers.
        positions: the longest context that the model is made for.
        image_tokens: tokens of an image, which see one another in both directions if the decoder takes images.

    Raises:
        ValueError: the designs do not take a layer of these sizes.
    """

    model: Decoder
    positions: int
    image_tokens: int = 0

    def __post_init__(self) -> None:
        _ = self.shape

    @cached_property
    def shape(self) -> LayerShape:
        """The parameters of the array that computes a layer."""
        attention, layer = self.attention, self.model.layers[0]
        states = {
            (self.model.input_rows(each), self.model.output_columns(each))
            for each in self.model.layers
            if not isinstance(each.mixer, Attention)
        }
        if len(states) > 1:
            raise ValueError(f"[decode_layer] expected layers that keep states of one size, got {sorted(states)}")
        state_rows, state_columns = states.pop() if states else (0, 0)
        return LayerShape(
            self.model.hidden,
            attention.heads,
            attention.kv_heads,
            attention.head_size,
            ceil_div(layer.feed_forward.size, _GATE_COLUMNS) * _GATE_COLUMNS,
            layer.feed_forward.activation,
            post_norms=layer.post_norms,
            qk_norm=attention.qk_norm != "none",
            norm_of_all_heads=attention.qk_norm == "all heads",
            norms_before=layer.norms_before,
            qkv_bias=attention.qkv_bias,
            output_bias=attention.output_bias,
            softcap=attention.softcap,
            experts=layer.feed_forward.experts_per_token if layer.feed_forward.experts else 0,
            int8_cache=attention.int8_cache,
            has_sinks=attention.sinks,
            output_gate=attention.output_gate,
            state_rows=state_rows,
            state_columns=state_columns,
        )

    @cached_property
    def attention(self) -> Attention:
        """The attention of the first layer that has one, whose sizes are those of all."""
        return next(layer.mixer for layer in self.model.layers if isinstance(layer.mixer, Attention))

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """For each layer with attention, the keys that a token sees, its own included; 0: all."""
        return tuple(layer.window or 0 for layer in self.layers if not layer.keeps_state)

    @property
    def has_plain_experts(self) -> bool:
        """Whether the array can compute the experts, if there are any."""
        of = self.model.layers[0].feed_forward
        return not of.expert_vectors and (of.swiglu_alpha, of.swiglu_beta, of.swiglu_limit) == (1, 0, 0)

    @property
    def block(self) -> int:
        """Tokens of a block, which see one another in both directions; 0: there are none."""
        return self.image_tokens if self.attention.bidirectional_blocks else 0

    @property
    def head(self) -> Projection:
        """The LM head, with rows of zeros that fill its last blocks."""
        rows = ceil_div(self.model.vocabulary, BLOCK_ROWS) * BLOCK_ROWS
        return Projection(rows, self.model.hidden, eight_bits=self.model.head_eight_bits)

    @cached_property
    def layers(self) -> tuple[CalledLayer, ...]:
        """The properties of each layer that others may not share."""
        return tuple(
            CalledLayer(layer.mixer.window or None, layer.mixer.table, layer.eight_bits)
            if isinstance(layer.mixer, Attention)
            else CalledLayer(eight_bits=layer.eight_bits, part=BEFORE_STATE)
            for layer in self.model.layers
        )

    def part(self, layer: int, part: str) -> CalledLayer:
        """A part of a layer that keeps a state."""
        return replace(self.layers[layer], part=part)

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep a state in the place of keys and values."""
        return bool(self.shape.state_rows)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all delta rules, in f32."""
        of = [layer.mixer for layer in self.model.layers if isinstance(layer.mixer, GatedDelta)]
        return sum(4 * each.value_heads * each.key_size * each.value_size for each in of)

    @property
    def has_delta_rule(self) -> bool:
        """Whether the states are those of a gated delta rule."""
        return any(isinstance(layer.mixer, GatedDelta) for layer in self.model.layers)

    def delta_design(self, target: str) -> GatedDeltaDesign:
        """The array for that rule.

        Raises:
            ValueError: it does not take the heads.
        """
        of = next(layer.mixer for layer in self.model.layers if isinstance(layer.mixer, GatedDelta))
        return GatedDeltaDesign(target, of.value_heads, of.key_size, of.value_size)

    def cached_before(self, layer: int) -> int:
        """How many of the layers before one have a cache."""
        return sum(not before.keeps_state for before in self.layers[:layer])

    def weights_before(self, layer: int) -> int:
        """Bytes of the weights of the layers before one, without experts."""
        return sum(
            self.shape.weight_bytes(before.eight_bits, keeps_state=before.keeps_state) for before in self.layers[:layer]
        )

    def experts_before(self, layer: int) -> int:
        """Bytes of the experts of the layers before one."""
        experts = self.model.layers[0].feed_forward.experts
        return experts * sum(self.shape.expert_bytes(before.eight_bits) for before in self.layers[:layer])

    @property
    def attributes(self) -> dict[str, tuple[int, ...]]:
        """The attributes of the node DecoderLayers, by which the host matches a program with its model."""
        values = self.model.attributes.items()
        return {key: attribute_words(value) for key, value in values if key not in _ANY}

    @property
    def name(self) -> str:
        """The part of arrays' names that identifies their heads, their soft cap and whether they have sinks."""
        shape = self.shape
        cap = f"-cap{shape.softcap:g}" * bool(shape.softcap)
        return f"h{shape.heads}-g{shape.kv_heads}-d{shape.d}{cap}{'-sinks' * shape.has_sinks}"

    def array_of_layers(self, way: str) -> str:
        """The name of the array for decode layers with this way of attention."""
        shape = self.shape
        norms = "-post" * shape.post_norms + "-qk" * shape.qk_norm + "-all" * shape.norm_of_all_heads
        norms += "-bias" * shape.qkv_bias + "-output" * shape.output_bias + "-after" * (not shape.norms_before)
        norms += "-int8" * shape.int8_cache + "-gate" * shape.output_gate
        norms += f"-state{shape.state_rows}-{shape.state_columns}" * bool(shape.state_rows)
        return f"decode_layer-{way}-{shape.hidden}-{shape.feed_forward}-{self.name}-{shape.activation}{norms}"


@dataclass(frozen=True)
class DecoderBuffers:
    """The buffers of a decoder with caches of `context` positions, and where a layer has its part of them."""

    decoder: DecoderShape
    context: int

    def constants(self) -> list[Buffer]:
        """Weights, vectors and rotary tables, and the cache."""
        decoder, shape, layers = self.decoder, self.decoder.shape, len(self.decoder.layers)
        vectors = layers * shape.vector_size + shape.entry_norms * shape.line
        return [
            Buffer("weights", Role.CONSTANT, decoder.weights_before(layers) + decoder.head.bytes),
            Buffer("vectors", Role.CONSTANT, vectors * BF16_BYTES),
            Buffer("rotary", Role.CONSTANT, decoder.model.tables * self.context * shape.d * BF16_BYTES),
            Buffer("cache", Role.CACHE, len(decoder.windows) * self.layout.layer),
        ]

    def host_experts(self, layer: int) -> Experts:
        """The host's steps in a layer with experts."""
        model = self.decoder.model
        return Experts(layer, model.layers[layer].feed_forward, model.hidden, model.epsilon)

    @property
    def context_line(self) -> int:
        """Elements from one token's output of attention to the next's: with a bias, the output projection's K, padded.

        A GEMM reads no farther, so that the elements behind the 1 stay zeros.
        """
        output = self.decoder.shape.projections[1]
        return output.column_blocks * BLOCK_COLUMNS if self.decoder.shape.output_bias else output.columns

    def fill_ones(self, writer: ProgramWriter) -> None:
        """Have x and context, where their projections have a bias, filled with a 1 in its column of each line.

        The programs of a token and of chunks share these buffers (designs/bias.py).
        """
        shape = self.decoder.shape
        if shape.qkv_bias:
            writer.fill("x", shape.line, bias_column(shape.hidden))
        if shape.output_bias:
            writer.fill("context", self.context_line, bias_column(shape.heads * shape.d))

    @property
    def layout(self) -> CacheLayout:
        """The places of keys and values in the cache, by layer and position."""
        shape = self.decoder.shape
        vector, position = shape.d * BF16_BYTES, shape.position_size * BF16_BYTES
        layer = self.context * position
        return CacheLayout(layer, position, 2 * vector, vector, len(self.decoder.windows) * layer * shape.int8_cache)

    def weights(self, layer: int, projection: int = 0) -> View:
        """The weights of a layer, from one of its projections on."""
        decoder, offset = self.decoder, self.decoder.weights_before(layer)
        if projection:
            of = decoder.layers[layer]
            parts = decoder.shape.of_bits(of.eight_bits, keeps_state=of.keeps_state)
            offset += sum(part.bytes for part in parts[:projection])
        return View("weights", offset)

    def norm(self, layer: int, number: int = 0) -> View:
        """The weight of a layer's norm of this number."""
        shape = self.decoder.shape
        return View("vectors", (layer * shape.vector_size + number * shape.line) * BF16_BYTES)

    def qk_norm(self, layer: int) -> View:
        """The weights of a layer's QK-norm."""
        shape = self.decoder.shape
        return View("vectors", ((layer + 1) * shape.vector_size - sum(shape.qk_norm_sizes)) * BF16_BYTES)

    def sinks(self, layer: int) -> list[View]:
        """The sinks of a layer, if there are any."""
        shape = self.decoder.shape
        begin = layer * shape.vector_size + shape.sinks_begin
        return [View("vectors", begin * BF16_BYTES)] * shape.has_sinks

    def cache(self, layer: int) -> View:
        """Keys and values of a layer."""
        return View("cache", self.decoder.cached_before(layer) * self.layout.layer)

    def read_by_token(self, layer: int) -> View:
        """Keys and values of a layer as a token reads them."""
        shape, begin = self.decoder.shape, self.layout.int8_rows
        cached = self.decoder.cached_before(layer)
        return View("cache", begin + cached * self.context * shape.kv_heads * 2 * shape.row_bytes)

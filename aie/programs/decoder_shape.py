# SPDX-License-Identifier: Apache-2.0
"""The sizes of a decoder, and the buffers that its programs share.

aie/designs/decode_layer/shape.py has the layouts:

weights   u8    [layer][QKV | output | gate and up | down], then the LM head
vectors   bf16  [layer][norms][line], each layer followed by its QK-norm weights; then the final norms
rotary    bf16  [tables][context][d]
cache     bf16  [layer][context][G][2][d]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flownpu.aie.designs.bias import bias_column
from flownpu.aie.designs.common import BLOCK_ROWS, ceil_div
from flownpu.aie.designs.decode_layer.shape import LayerShape, Projection
from flownpu.aie.programs.program import BF16_BYTES, Buffer, CacheLayout, Role, View, attribute_words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flownpu.aie.programs.program import ProgramWriter

__all__ = ["DecoderBuffers", "DecoderShape"]

# The dequantisation engine weaves 64 columns of a gate and of its up projection (designs/dequant_engine.py).
_GATE_COLUMNS = 64


@dataclass(frozen=True)
class DecoderShape:
    """What a decoder's programs depend on; see DecoderSizes in ops/layers/decoder_sizes.h.

    Attributes:
        shape: a layer's sizes.
        epsilon: of all norms.
        scale: factor of the scores.
        windows: for each layer, the keys that a token sees, its own included; 0: all.
        tables: for each layer, its rotary table.
        vocabulary: rows of the LM head.
        positions: the longest context that the model is made for.
        feed_forward: the model's feed-forward size; `shape` has it padded.
        block: tokens of a block, which see one another in both directions, as an image's do; 0: there are none.
    """

    shape: LayerShape
    epsilon: float
    scale: float
    windows: tuple[int, ...]
    tables: tuple[int, ...]
    vocabulary: int
    positions: int
    feed_forward: int
    block: int = 0

    @classmethod
    def of(cls, sizes: Mapping[str, Any], positions: int, block: int = 0) -> DecoderShape:
        """The decoder of these sizes, which `flownpu._native` found in a graph, made for `positions` positions.

        `block`: tokens of a block, which counts only if the decoder's attention has blocks.

        Raises:
            ValueError: the designs do not take a layer of these sizes.
        """
        shape = LayerShape(
            sizes["hidden"],
            sizes["heads"],
            sizes["kv_heads"],
            sizes["head_size"],
            ceil_div(sizes["feed_forward"], _GATE_COLUMNS) * _GATE_COLUMNS,
            sizes["activation"],
            post_norms=bool(sizes["post_norms"]),
            qk_norm=bool(sizes["qk_norm"]),
            qkv_bias=bool(sizes["qkv_bias"]),
        )
        windows, tables = tuple(sizes["windows"]), tuple(sizes["tables"])
        return cls(
            shape, sizes["epsilon"], sizes["scale"], windows, tables, sizes["vocabulary"], positions,
            sizes["feed_forward"], block if sizes["bidirectional_blocks"] else 0,
        )  # fmt: skip

    @property
    def table_count(self) -> int:
        """Rotary tables of the model."""
        return max(self.tables) + 1

    @property
    def head(self) -> Projection:
        """The LM head, with rows of zeros that fill its last blocks."""
        return Projection(ceil_div(self.vocabulary, BLOCK_ROWS) * BLOCK_ROWS, self.shape.hidden)

    @property
    def attributes(self) -> dict[str, tuple[int, ...]]:
        """The attributes of the node DecoderLayers, by which the host tells whether a program is for its model."""
        shape = self.shape
        values: dict[str, Any] = {
            "hidden": shape.hidden, "heads": shape.heads, "kv_heads": shape.kv_heads, "head_size": shape.d,
            "feed_forward": self.feed_forward, "activation": shape.activation, "post_norms": int(shape.post_norms),
            "qk_norm": int(shape.qk_norm), "qkv_bias": int(shape.qkv_bias), "epsilon": float(self.epsilon),
            "scale": float(self.scale), "windows": self.windows, "tables": self.tables, "vocabulary": self.vocabulary,
        }  # fmt: skip
        return {key: attribute_words(value) for key, value in values.items()}

    @property
    def name(self) -> str:
        """The part of arrays' names that says which heads they are for."""
        return f"h{self.shape.heads}-g{self.shape.kv_heads}-d{self.shape.d}"


@dataclass(frozen=True)
class DecoderBuffers:
    """The buffers of a decoder with caches of `context` positions, and where a layer has its part of them."""

    decoder: DecoderShape
    context: int

    def constants(self) -> list[Buffer]:
        """Weights, vectors and rotary tables, and the cache."""
        decoder, shape, layers = self.decoder, self.decoder.shape, len(self.decoder.windows)
        vectors = layers * shape.vector_size + shape.entry_norms * shape.line
        return [
            Buffer("weights", Role.CONSTANT, layers * shape.weight_bytes + decoder.head.bytes),
            Buffer("vectors", Role.CONSTANT, vectors * BF16_BYTES),
            Buffer("rotary", Role.CONSTANT, decoder.table_count * self.context * shape.d * BF16_BYTES),
            Buffer("cache", Role.CACHE, layers * self.layout.layer),
        ]

    def fill_x(self, writer: ProgramWriter) -> None:
        """With a bias of QKV, have the buffer x filled with a 1 in the bias's column of each line (designs/bias.py).

        The programs of a token and of chunks share the buffer x.
        """
        if self.decoder.shape.qkv_bias:
            writer.fill("x", self.decoder.shape.line, bias_column(self.decoder.shape.hidden))

    @property
    def layout(self) -> CacheLayout:
        """Where keys and values of layers and positions lie in the cache."""
        shape = self.decoder.shape
        vector, position = shape.d * BF16_BYTES, shape.position_size * BF16_BYTES
        return CacheLayout(self.context * position, position, 2 * vector, vector)

    def weights(self, layer: int, projection: int = 0) -> View:
        """The weights of a layer, from one of its projections on."""
        shape = self.decoder.shape
        before = sum(part.bytes for part in shape.projections[:projection])
        return View("weights", layer * shape.weight_bytes + before)

    def norm(self, layer: int, number: int = 0) -> View:
        """The weight of a layer's norm of this number."""
        shape = self.decoder.shape
        return View("vectors", (layer * shape.vector_size + number * shape.line) * BF16_BYTES)

    def qk_norm(self, layer: int) -> View:
        """The weights of a layer's QK-norm."""
        shape = self.decoder.shape
        return View("vectors", ((layer + 1) * shape.vector_size - 2 * shape.d) * BF16_BYTES)

    def cache(self, layer: int) -> View:
        """Keys and values of a layer."""
        return View("cache", layer * self.layout.layer)

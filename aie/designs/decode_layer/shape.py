# SPDX-License-Identifier: Apache-2.0
"""The sizes of a decoder layer, and the layout of its host buffers (design.py).

    weights   u8    [layer][QKV | output | gate and up | down], then an LM head; Q4NX blocks as in the file, but
                    gate and up, whose rows of blocks take turns: [I / 32][gate, up][D / 256][5120] (`interleave`);
                    of 8 bits, two planes of 4 (kernels/common/q4nx.h): [D / 256][high, low][5120]
    vectors   bf16  [layer][norms][line], each layer followed by its sinks (designs/attention.py) and its QK-norm
                    weights, q and k; then the final norms
    rotary    bf16  [tables][positions][d]: cos[d/2], sin[d/2] of a position, for each base that the model has
    cache     bf16  [layer][capacity][G][2][d] (designs/attention.py)
    int8_rows u8    [layer][capacity][G][2][5 d / 4], with `int8_cache`: the same keys and values as codes, their scale
                    (ops/definitions/int8_cache.py) and padding, so that rows begin at multiples of 16 bytes
    state     bf16  what passes between the phases of a layer (`DecodeLayer.regions`); zeros before the first use

`line` is D rounded up to 256; with a bias of QKV the columns of that projection, rounded up, since the bias is one of
them (designs/bias.py). A layer's *norms* are those of its two entries (design.py): [before attention, before
feed-forward], and with post-norms [after the layer before, before attention, after attention, before feed-forward]; the
final ones are those of one more entry. A weight of a norm is 0 beyond D. QK-norm weights are [d] each, or of one norm
of all heads [H d] and [G d]. Without norms before its parts (OLMo 2), a layer's norms have their places unused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from flownpu.aie.designs.attention import Sinks
from flownpu.aie.designs.bias import bias_column
from flownpu.aie.designs.common import BLOCK_BYTES, BLOCK_COLUMNS, BLOCK_ROWS, TILES, ceil_div, limits_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

ARRAY_COLUMNS = limits_of("npu2").columns
RESIDUAL_COLUMN, ROPE_COLUMN = ARRAY_COLUMNS - 2, ARRAY_COLUMNS - 1
ACTIVATIONS = ("geglu", "swiglu")


@dataclass(frozen=True)
class Projection:
    """y [rows] = W [rows, columns] x; gated: with two such W, y = act(gate x) * (up x)."""

    rows: int
    columns: int
    gated: bool = False
    eight_bits: bool = False

    def __post_init__(self) -> None:
        if self.rows % BLOCK_ROWS or self.rows < BLOCK_ROWS * TILES:
            raise ValueError(
                f"[decode_layer, fused_dqp] expected a projection's rows in multiples of {BLOCK_ROWS}, "
                f"{BLOCK_ROWS * TILES} or more, got {self.rows}"
            )

    @property
    def planes(self) -> int:
        """Blocks of 4 bits that hold 256 columns."""
        return 1 + self.eight_bits

    @property
    def column_blocks(self) -> int:
        """K / 256, rounded up."""
        return ceil_div(self.columns, BLOCK_COLUMNS)

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.planes * self.column_blocks

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of blocks; gated: of the gate's and up's."""
        return (2 if self.gated else 1) * self.blocks * BLOCK_BYTES

    @property
    def bytes(self) -> int:
        """Bytes of the weights."""
        return self.rows // BLOCK_ROWS * self.row_bytes


@dataclass(frozen=True)
class Region:
    """Elements offset .. offset + size of a host buffer."""

    offset: int
    size: int


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a decoder layer.

    Attributes:
        hidden: D, a multiple of 32.
        heads: query heads H.
        kv_heads: KV heads G, a divisor of H.
        d: head size, a multiple of 32.
        feed_forward: I, a multiple of 32; with experts, each one's.
        activation: geglu or swiglu.
        post_norms: the outputs of attention and feed-forward are normalised before they are added (Gemma3).
        qk_norm: queries and keys are normalised before RoPE (Gemma3, Qwen3).
        qkv_bias: the QKV projection has a bias (Qwen2).
        norm_of_all_heads: that norm is one of all query heads, and one of all key heads (OLMo 2).
        norms_before: attention and feed-forward read the residual stream normalised; if not, there are post-norms.
        output_bias: the output projection has a bias.
        softcap: c of c tanh(score / c), by which attention's scores are bounded (Gemma 2); 0: none.
        experts: experts that a token chooses, whose products are calls of their own (experts.py); 0: the feed-forward
            is dense.
        int8_cache: a token reads keys and values in int8, and a prompt in bf16.
        has_sinks: each query head has a sink, a score without a value in its softmax (GPT-OSS).
        output_gate: attention's output is multiplied by the sigmoid of rows that follow those of QKV (Qwen3.5).
        state_rows: rows of the projections before a state, in layers that keep one in the place of keys and values; 0:
            there are no such layers. The host computes what is between those and the output projection.
        state_columns: columns of the output projection in such a layer.
    """

    hidden: int
    heads: int
    kv_heads: int
    d: int
    feed_forward: int
    activation: str
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    norm_of_all_heads: bool = False
    norms_before: bool = True
    output_bias: bool = False
    softcap: float = 0
    experts: int = 0
    int8_cache: bool = False
    has_sinks: bool = False
    output_gate: bool = False
    state_rows: int = 0
    state_columns: int = 0

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"[decode_layer] expected activation {' or '.join(ACTIVATIONS)}, got {self.activation!r}")
        if self.heads % self.kv_heads or self.d % 32:
            raise ValueError(
                f"[decode_layer, norm_rope] expected heads in multiples of the KV heads and d in multiples of 32, "
                f"got {self.heads}, {self.kv_heads} and {self.d}"
            )
        if self.int8_cache and self.d % 64:
            raise ValueError(f"[decode_layer] expected d in multiples of 64 with an int8 cache, got {self.d}")
        if not (self.norms_before or self.post_norms) or (self.qkv_bias and not self.norms_before):
            raise ValueError("[decode_layer] expected post-norms and no bias of QKV where there are no norms before it")
        if self.experts and self.post_norms:
            raise ValueError("[decode_layer] expected no post-norms where a token chooses experts")
        if (self.output_gate or self.state_rows) and (
            self.experts or self.has_sinks or self.qkv_bias or self.output_bias or not self.norms_before
        ):
            raise ValueError(
                "[decode_layer] expected norms, a dense feed-forward, and neither biases nor sinks, where attention's "
                "output has a gate or layers keep states"
            )
        _ = self.projections, self.sinks  # raise for sizes that cannot be dealt to the tiles

    # --- Attention ----------------------------------------------------------------------------------------------------

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def batch(self) -> int:
        """Heads that the RoPE tile takes at once: the most, up to four, that share the KV heads evenly."""
        return next(heads for heads in (4, 2, 1) if self.kv_heads % heads == 0)

    @cached_property
    def sinks(self) -> Sinks | None:
        """The sinks of a layer, if there are any."""
        return Sinks(self.kv_heads, self.group, self.d) if self.has_sinks else None

    @property
    def dealt_heads(self) -> int:
        """Heads of a token, as they are dealt to projecting tiles: of queries, keys and values, and the sinks'."""
        return self.heads + (2 + self.has_sinks) * self.kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of a key or a value as a token reads it."""
        return self.d * 5 // 4 if self.int8_cache else 2 * self.d

    @property
    def position_size(self) -> int:
        """Elements of the cache for a position."""
        return self.kv_heads * 2 * self.d

    # --- Host buffers -------------------------------------------------------------------------------------------------

    @property
    def line(self) -> int:
        """Elements of a vector of D as it is moved: the columns of QKV, rounded up to a block's."""
        return ceil_div(self.qkv_columns, BLOCK_COLUMNS) * BLOCK_COLUMNS

    @property
    def qkv_columns(self) -> int:
        """Columns of the QKV projection: D, or with a bias all up to the column where x is 1."""
        return bias_column(self.hidden) + 1 if self.qkv_bias else self.hidden

    @cached_property
    def projections(self) -> tuple[Projection, Projection, Projection, Projection]:
        """QKV, output, gate and up, down, of 4 bits."""
        attention = self.heads * self.d
        return (
            Projection(self.heads_size + self.output_gate * attention, self.qkv_columns),
            Projection(self.hidden, bias_column(attention) + 1 if self.output_bias else attention),
            Projection(self.feed_forward, self.hidden, gated=True),
            Projection(self.hidden, self.feed_forward),
        )

    @property
    def heads_size(self) -> int:
        """Elements of a token's queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.d

    @cached_property
    def state_projections(self) -> tuple[Projection, ...]:
        """The projections of a layer that keeps a state, in the same order."""
        if not self.state_rows:
            return ()
        around = Projection(self.state_rows, self.hidden), Projection(self.hidden, self.state_columns)
        return *around, *self.projections[2:]

    def of_bits(self, eight_bits: int, *, keeps_state: bool = False) -> tuple[Projection, ...]:
        """The projections of a layer; bit i of `eight_bits` says that projection i has weights of 8 bits."""
        parts = self.state_projections if keeps_state else self.projections
        return tuple(replace(part, eight_bits=bool(eight_bits >> i & 1)) for i, part in enumerate(parts))

    def own_projections(self, eight_bits: int = 0, *, keeps_state: bool = False) -> tuple[Projection, ...]:
        """Those whose weights a layer has for itself: all, but for the ones of experts."""
        return self.of_bits(eight_bits, keeps_state=keeps_state)[: 2 if self.experts else None]

    def expert_projections(self, eight_bits: int = 0) -> tuple[Projection, ...]:
        """The others: an expert's."""
        return self.of_bits(eight_bits)[len(self.own_projections()) :]

    def weight_bytes(self, eight_bits: int = 0, *, keeps_state: bool = False) -> int:
        """Bytes of a layer's weights, without experts."""
        return sum(projection.bytes for projection in self.own_projections(eight_bits, keeps_state=keeps_state))

    def expert_bytes(self, eight_bits: int = 0) -> int:
        """Bytes of an expert's weights."""
        return sum(projection.bytes for projection in self.expert_projections(eight_bits))

    @property
    def entry_norms(self) -> int:
        """Norms of an entry of the residual stream."""
        return 2 if self.post_norms else 1

    @property
    def vector_size(self) -> int:
        """Elements of `vectors` for a layer."""
        return self.sinks_begin + (self.sinks.size if self.sinks else 0) + sum(self.qk_norm_sizes)

    @property
    def sinks_begin(self) -> int:
        """Elements of a layer's `vectors` before its sinks."""
        return 2 * self.entry_norms * self.line

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Elements of the norms of queries and of keys; 0: there are none."""
        if self.norm_of_all_heads:
            return self.heads * self.d, self.kv_heads * self.d
        return (self.d, self.d) if self.qk_norm else (0, 0)

    @property
    def x_size(self) -> int:
        """The longest x of a projection, as it is sent: whole lines."""
        parts = self.projections + self.state_projections
        return max(self.lines(projection.columns) for projection in parts) * self.line

    def lines(self, elements: int) -> int:
        """Lines that hold `elements` elements."""
        return ceil_div(elements, self.line)

    def regions(self, more: Mapping[str, int]) -> dict[str, Region]:
        """The regions of `state`; `more`: the elements of attention's own regions, in their order.

        hidden and update [line]: what a layer is given and leaves. The residual stream is their sum, the update
        normalised first where there are post-norms; adding them is the first thing the next layer does.
        qkv [(H + 2 G) d]: QKV before RoPE, and the rows of an output's gate. mixed: the products before a state.
        context [H d]: attention's output, a region of its own; with a bias of the
        output projection a 1 is behind it (`DecodeLayer.one`), which nothing overwrites. attended [line]: the
        output projection's output. activated [I]: act(gate) * up. answers [experts, line]: what each chosen expert
        makes. Each is padded to whole lines.
        """
        sizes = {
            "hidden": self.hidden,
            "update": self.hidden,
            "qkv": self.projections[0].rows,
            "attended": self.hidden,
            "activated": self.feed_forward,
            "answers": self.experts * self.line,
            "mixed": self.state_rows,
            **more,
        }
        regions, offset = dict[str, Region](), 0
        for name, elements in sizes.items():
            regions[name] = Region(offset, self.lines(elements) * self.line)
            offset += regions[name].size
        return regions


def interleave(gate_up: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Let the rows of blocks of gate and up take turns.

    Args:
        gate_up: Q4NX blocks [2 rows, blocks, 5120] of both, the gate's rows first: a gated projection's in the file.

    Returns:
        The same blocks, [rows, gate and up, blocks, 5120].
    """
    rows, blocks, block_bytes = gate_up.shape
    return gate_up.reshape(2, rows // 2, blocks, block_bytes).swapaxes(0, 1)

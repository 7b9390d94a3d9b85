# SPDX-License-Identifier: Apache-2.0
"""The papers' own implementation as equations, with which parameters are fitted to the papers' tables (docs/model.md).

    token     for each layer: weights through eight streams, then keys and values through two streams for each pair of
              tiles, each pair with whole KV heads; two dispatches. Then the LM head, and the host's choice of a token
    prompt    for each layer: dequantisation (blocks in, bf16 out), GEMMs padded to 512, attention, vector operators on
              a core each, four changes of the xclbin; then the LM head
    attention computes a query head on each tile, with `softmax_score` + d `score_element` cycles per score; with eight
              KV heads, each has a column of four tiles: groups of two or three query heads leave tiles idle

Sources: arXiv 2602.06063, section 3; Xu et al., section 3.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from flownpu.aie.cost.memory import STORED_WEIGHT_RUN, read_rate
from flownpu.aie.designs.common import BLOCK_BYTES, BLOCK_COLUMNS, BLOCK_ROWS, TILES, ceil_div

if TYPE_CHECKING:
    from flownpu._native import EncoderShape
    from flownpu.aie.cost.chips import Chip
    from flownpu.aie.cost.parameters import Values
    from flownpu.aie.designs.decode_layer.shape import Projection
    from flownpu.aie.programs.decoder_shape import DecoderShape

_COLUMNS, _STREAMS, _PAIRS, _PAIR_STREAMS = 4, 8, 4, 2  # of a decode layer
_ARRAY_TILES, _COLUMNS_OF_THE_ARRAY = 32, 8
_XCLBINS, _DISPATCHES = 4, 12  # of a layer of a prompt: four weights, their products, and four operators
_MEGATILE = 512
_BF16_BYTES = 2
_IMAGE_TOKENS, _QUESTION_TOKENS = 256, 16  # of the image in the decoder, and a short question about it


def token_seconds(decoder: DecoderShape, context: int, device: Chip, values: Values) -> float:
    """Seconds of a token that sees `context` keys."""
    shape = decoder.shape
    weights = sum(_weights(part, device, values) for part in shape.projections)
    pairs, run = min(_PAIRS, shape.kv_heads), shape.d * _BF16_BYTES
    rate = read_rate(pairs * _PAIR_STREAMS, run, values) / pairs  # bytes per second of a pair
    key = ceil_div(shape.kv_heads, pairs) * 2 * run / rate
    layers = sum(weights + min(window or context, context) * key + 2 * values["dispatch"] for window in decoder.windows)
    return layers + _head(decoder, device, values)


def prompt_seconds(decoder: DecoderShape, tokens: int, device: Chip, values: Values) -> float:
    """Seconds of a prompt from an empty cache to the first token."""
    shape = decoder.shape
    parts = [(part.columns, part.rows * (2 if part.gated else 1)) for part in shape.projections]
    blocks = shape.weight_bytes() // BLOCK_BYTES
    dequantised = blocks * (BLOCK_BYTES + BLOCK_ROWS * BLOCK_COLUMNS * _BF16_BYTES)
    heads = (shape.heads + shape.kv_heads) * shape.d
    # Elements that vector operators write per token: norms, QK-norm, RoPE; gate, up and their product.
    elements = 2 * shape.entry_norms * shape.hidden + (1 + shape.qk_norm) * heads + 3 * shape.feed_forward
    layer = (
        sum(_gemm(tokens, k, n, values) for k, n in parts)
        + max(dequantised / values["memory_read"], blocks * values["dequant_block"] / _ARRAY_TILES / device.clock)
        + tokens * elements * values["vector_element"] / device.clock
        + _XCLBINS * values["reconfiguration"]
        + _DISPATCHES * values["dispatch"]
    )
    sweeps = sum(
        count * _seen(tokens, window or tokens) * shape.kv_heads for window, count in Counter(decoder.windows).items()
    )
    # Figure 8 of arXiv 2602.06063: two tiles for each of Gemma3-4B's four KV heads.
    tiles = TILES if shape.kv_heads == _COLUMNS_OF_THE_ARRAY else shape.group
    attention = _attention(sweeps * tiles, shape.d, device, values)
    return len(decoder.windows) * layer + attention + _head(decoder, device, values)


def image_seconds(decoder: DecoderShape, encoder: EncoderShape, device: Chip, values: Values) -> float:
    """Seconds of an image in its encoder, then of its tokens and a short question, to the first token."""
    tokens, hidden, heads = encoder.patches, encoder.hidden, encoder.heads
    products = [(part.inner, part.columns) for part in encoder.projections]
    layer = (
        sum(_gemm(tokens, k, n, values) for k, n in products)
        + _attention(float(tokens * tokens * heads), encoder.head_size, device, values)
        + tokens * (2 * hidden + 2 * encoder.feed_forward) * values["vector_element"] / device.clock
        + _XCLBINS * values["reconfiguration"]
        + _DISPATCHES * values["dispatch"]
    )
    ends = [(tokens, encoder.embedding.inner, hidden), (_IMAGE_TOKENS, hidden, encoder.features)]
    seconds = encoder.layers * layer + sum(_gemm(m, k, n, values) for m, k, n in ends)
    return seconds + prompt_seconds(decoder, _IMAGE_TOKENS + _QUESTION_TOKENS, device, values)


def _weights(part: Projection, device: Chip, values: Values) -> float:
    """Seconds of a projection's weights: the slowest of the fullest stream, main memory and the tiles' kernels."""
    # Rows of blocks of a tile in the first column, which has the most.
    rows = ceil_div(part.rows, BLOCK_ROWS * TILES * _COLUMNS)
    kernels = rows * part.row_bytes / BLOCK_BYTES * values["dqp_block"] / device.clock
    of_stream = rows * TILES * _COLUMNS / _STREAMS * part.row_bytes
    return max(of_stream / read_rate(1, STORED_WEIGHT_RUN, values), part.bytes / values["memory_read"], kernels)


def _head(decoder: DecoderShape, device: Chip, values: Values) -> float:
    """Seconds of the LM head, its dispatch, and the host's choice of a token."""
    host = decoder.model.vocabulary * values["host_per_logit"]
    return _weights(decoder.head, device, values) + values["dispatch"] + host


def _gemm(m: int, k: int, n: int, values: Values) -> float:
    m, k, n = (ceil_div(size, _MEGATILE) * _MEGATILE for size in (m, k, n))
    return 2.0 * m * k * n / values["gemm_operations"]


def _attention(scores: float, d: int, device: Chip, values: Values) -> float:
    """Seconds of attention; `scores` is tokens x keys that are not masked x heads, where idle tiles count as heads."""
    return scores * (values["softmax_score"] + d * values["score_element"]) / _ARRAY_TILES / device.clock


def _seen(tokens: int, window: int) -> float:
    """The number of keys that `tokens` queries see, all together."""
    near = min(tokens, window)
    return near * (near + 1) / 2 + (tokens - near) * near

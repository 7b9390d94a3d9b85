# SPDX-License-Identifier: Apache-2.0
"""How much of an attention the NPU computes in one call (Zen-Attention, section III.B), of prompts and of one token.

A level is 3 (all of it), 2 (all but the product with the values) or 1 (nothing), and comes with its reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.aie.cost.attention_tiler import AttentionShape, tile_attention
from flownpu.aie.cost.device import DEVICES

if TYPE_CHECKING:
    from flownpu.graph_rewrites.report import AttentionGeometry

__all__ = ["prompt_folding", "token_folding"]

# XDNA 2; of one generation all have the same memory for a tile.
_TARGET = DEVICES["kraken-350"]
# Tokens of a call where the graph does not say how many there are: the prompt of the measurements
# (docs/performance.md).
_NOMINAL_TOKENS = 1024
# Positions that one new token is folded for; a longer cache is swept in more chunks of the same tiles.
_NOMINAL_KEYS = 4096


def prompt_folding(geometry: AttentionGeometry) -> tuple[int, str]:
    """Level and reason of a call with many tokens: those of the graph, or a nominal prompt."""
    tokens = geometry.tokens or _NOMINAL_TOKENS
    level, reason = _fold(geometry, tokens, tokens, causal=geometry.causal)
    return level, f"{tokens} tokens: {reason}"


def token_folding(geometry: AttentionGeometry) -> tuple[int, str]:
    """Level and reason of a call with one token over a cache."""
    level, reason = _fold(geometry, 1, _NOMINAL_KEYS, causal=True)
    return level, f"1 token of {_NOMINAL_KEYS}: {reason}"


def _fold(geometry: AttentionGeometry, queries: int, keys: int, *, causal: bool) -> tuple[int, str]:
    shape = AttentionShape(
        heads=geometry.heads,
        kv_heads=geometry.kv_heads,
        d=geometry.head_size,
        queries=queries,
        keys=keys,
        window=geometry.window if geometry.window > 0 else None,
        causal=causal,
        bias=geometry.biased,
    )
    tiling = tile_attention(shape, _TARGET)
    return tiling.level, tiling.reason

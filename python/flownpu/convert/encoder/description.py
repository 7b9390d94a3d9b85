# SPDX-License-Identifier: Apache-2.0
"""What a text encoder is made of, free of any model family's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from flownpu.convert.dense.graph import GeluKind

__all__ = ["TextEncoder"]


@dataclass(frozen=True)
class TextEncoder:
    """A transformer encoder with learned positions, whose layers normalise after the residual (post-LN).

    A layer is: attention of all tokens to all, residual, layer norm; GELU feed-forward, residual, layer norm; each
    product with a bias.
    """

    hidden_size: int
    feed_forward_size: int
    heads: int
    layers: int
    vocabulary_size: int
    positions: int
    """Tokens that a text may have."""
    first_position: int
    """The row of the positions' table that a text's first token takes."""
    types: int
    """Kinds of tokens (of the first text of a pair, of the second), each with an embedding; 1: all have the same."""
    norm_epsilon: float
    gelu: GeluKind
    head: Literal["none", "pooler", "dense"] = "none"
    """What makes a pair's score of its first token: tanh of a product, and a product. The two kinds differ in the
    names of their tensors."""

    @property
    def head_size(self) -> int:
        """The papers' d."""
        return self.hidden_size // self.heads

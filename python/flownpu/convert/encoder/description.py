# SPDX-License-Identifier: Apache-2.0
"""Describes a text encoder, without any model family's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from flownpu.convert.dense.graph import GeluKind


@dataclass(frozen=True)
class TextEncoder:
    """A transformer encoder with learned positions, whose layers normalise after the residual (post-LN).

    A layer is: attention of all tokens to all tokens, residual, layer norm; GELU feed-forward, residual, layer norm.
    All products have a bias.
    """

    hidden_size: int
    feed_forward_size: int
    heads: int
    layers: int
    vocabulary_size: int
    positions: int
    """How many tokens a text may have."""
    first_position: int
    """The row of the positions' table for a text's first token."""
    types: int
    """How many token types there are (first text of a pair, second text), each with an embedding; 1: all are alike."""
    norm_epsilon: float
    gelu: GeluKind
    head: Literal["none", "pooler", "dense"] = "none"
    """The head that computes a pair's score from its first token: a product, tanh, and another product. The two kinds
    differ in the names of their tensors only. "none": the model embeds texts."""

    @property
    def head_size(self) -> int:
        """The papers' d: how many dimensions a head has."""
        return self.hidden_size // self.heads

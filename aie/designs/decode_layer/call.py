# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call of decode layers (design.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

_Part = TypeVar("_Part")
BEFORE_STATE, AFTER_STATE = "before state", "after state"


@dataclass(frozen=True)
class CalledLayer:
    """The properties of a layer of a call that may differ from the other layers'.

    Attributes:
        window: keys that the token sees, its own included; None: all.
        table: which table of `rotary` turns its heads.
        eight_bits: which projections have weights of 8 bits, see `LayerShape.of_bits`.
        part: the part of a layer that keeps a state, whose mixer the host computes between two calls: BEFORE_STATE, its
            first projection, with which a call ends, or AFTER_STATE, all from its output projection on, with which one
            begins. Otherwise the whole layer.
    """

    window: int | None = None
    table: int = 0
    eight_bits: int = 0
    part: str = ""

    @property
    def keeps_state(self) -> bool:
        """Whether it is a part of a layer without attention."""
        return bool(self.part)

    def own(self, projections: Sequence[_Part]) -> Sequence[_Part]:
        """Those of a layer's projections, or of what there is for each, that the part has."""
        if not self.part:
            return projections
        return projections[:1] if self.part == BEFORE_STATE else projections[1:]


@dataclass(frozen=True)
class Token:
    """The token that a call is for, and what its layers share.

    Attributes:
        position: the token's, from 0.
        capacity: positions of a layer's cache, see `DecodeLayer.program`.
        epsilon: of all norms.
        scale: factor of the scores.
        positions: positions of a table of `rotary`.
        tables: tables of `rotary`.
    """

    position: int
    capacity: int
    epsilon: float
    scale: float
    positions: int
    tables: int = 1


class HostBuffers(NamedTuple):
    """The buffers of a call (shape.py), as its sequence has them.

    `cache_bytes`: what attention reads as bytes, the cache once more or its rows of int8, else None; `int8_rows`: these
    rows once more, to which the new position is written; `logits`: None without a head; `rotary`, `cache`: None without
    attention.
    """

    weights: Any
    vectors: Any
    state: Any
    rotary: Any = None
    cache: Any = None
    cache_bytes: Any = None
    int8_rows: Any = None
    logits: Any = None

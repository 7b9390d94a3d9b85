# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call of decode layers (design.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class CalledLayer:
    """The properties of a layer of a call that may differ from the other layers'.

    Attributes:
        window: keys that the token sees, its own included; None: all.
        table: which table of `rotary` turns its heads.
        eight_bits: which projections have weights of 8 bits, see `LayerShape.of_bits`.
    """

    window: int | None = None
    table: int = 0
    eight_bits: int = 0


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

# SPDX-License-Identifier: Apache-2.0
"""Describes mixers that stand in the place of a layer's attention, whose memory of earlier tokens is a state.

A state's size does not grow with the tokens, and depends on all of them, so that rows of a batch must not be padded.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Convolution:
    """A gated depthwise convolution: out_proj(C * conv(B * x)) with B, C and x = in_proj(h)."""

    taps: int
    """The tokens that it sees, the newest included."""


@dataclass(frozen=True)
class DeltaRule:
    """Linear attention by the gated delta rule (Yang et al., "Gated Delta Networks", 2024).

    Queries, keys and values go through a depthwise convolution and SiLU; queries and keys have length 1. The state of a
    head of values is [key_size, value_size], and value heads i * value_heads / key_heads .. share the i-th key.
    """

    taps: int
    """The tokens that the convolution sees, the newest included."""
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def keys(self) -> int:
        """Elements of all keys of a token, and of all queries."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Elements of all values of a token."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


Mixer = Convolution | DeltaRule

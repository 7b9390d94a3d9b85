# SPDX-License-Identifier: Apache-2.0
"""Lists the weights of a head for multi-token prediction: a projection of two vectors, a layer, and a norm.

Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction", 2024; in the form of DeepSeek-V3's
report (2024, section 2.2). Tensors of checkpoints begin with "mtp.", and so do the weights' names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flownpu.convert.weights.kinds import NormWeight, ProjectionWeight, TensorSource
from flownpu.convert.weights.plan import weight_plan

if TYPE_CHECKING:
    from flownpu.convert.decoder import Decoder
    from flownpu.convert.weights.kinds import Weight

PREFIX = "mtp."
SHARED = ("embed_tokens", "lm_head")
"""The weights that the head shares with its decoder."""
JOINED = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
"""The norms of the two vectors, in the order in which they are joined."""


def head_of(decoder: Decoder) -> Decoder:
    """The decoder of one layer that a decoder's head is, behind the projection: its layer has attention."""
    layer = next(layer for layer in decoder.layers if layer.mixer is None)
    return replace(decoder, layers=(layer,), prediction_head=False)


def joining_projection(decoder: Decoder) -> ProjectionWeight:
    """The projection of a token's embedding and the hidden state before it, of 2D columns."""
    return ProjectionWeight("fc", (TensorSource("fc.weight", decoder.hidden_size),), 2 * decoder.hidden_size)


def head_plan(decoder: Decoder) -> list[Weight]:
    """The weights of a decoder's head but for those that it shares; none if the decoder has no head."""
    if not decoder.prediction_head:
        return []
    norms = [NormWeight(name, f"{name}.weight", decoder.hidden_size) for name in JOINED]
    layer = [weight for weight in weight_plan(head_of(decoder)) if weight.name not in SHARED]
    return [_of_head(weight) for weight in (*norms, joining_projection(decoder), *layer)]


def _of_head(weight: Weight) -> Weight:
    name = PREFIX + weight.name
    if isinstance(weight, NormWeight):
        return replace(weight, name=name, tensor=PREFIX + weight.tensor)
    sources = tuple(replace(source, tensor=PREFIX + source.tensor) for source in weight.sources)
    return replace(weight, name=name, sources=sources)

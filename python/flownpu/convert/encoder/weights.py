# SPDX-License-Identifier: Apache-2.0
"""Lists the weights of a text encoder's graph, and the tensors of a checkpoint that each is made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.convert.dense.weights import WordTable, layer_norm, linear, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flownpu.convert.dense.weights import EncoderWeight
    from flownpu.convert.encoder.description import TextEncoder

WORDS, POSITIONS, TYPES = (f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type"))
# The two modules of each kind of head: BERT's first one belongs to the encoder, all others to the classifier.
HEADS = {"pooler": ("pooler.dense", "classifier"), "dense": ("classifier.dense", "classifier.out_proj")}


def encoder_weight_plan(encoder: TextEncoder) -> list[EncoderWeight]:
    """The weights of an encoder's graph, in order of use, by the initializers' names; sources have the checkpoint's."""
    hidden = encoder.hidden_size
    plan: list[EncoderWeight] = [
        WordTable(WORDS, WORDS, encoder.vocabulary_size, hidden),
        table(POSITIONS, (encoder.first_position + encoder.positions, hidden)),
        table(TYPES, (encoder.types, hidden)),
        *layer_norm("embeddings.norm", "embeddings.LayerNorm", hidden),
    ]
    for i in range(encoder.layers):
        plan += _layer(encoder, f"encoder.layer.{i}")
    if encoder.head != "none":
        dense, scores = HEADS[encoder.head]
        plan += [*linear(dense, (dense,), hidden, hidden), *linear(scores, (scores,), 1, hidden)]
    return plan


def _layer(encoder: TextEncoder, layer: str) -> Iterator[EncoderWeight]:
    hidden, feed_forward = encoder.hidden_size, encoder.feed_forward_size
    attention = f"{layer}.attention"
    qkv = tuple(f"{attention}.self.{name}" for name in ("query", "key", "value"))
    yield from linear(f"{attention}.qkv", qkv, 3 * hidden, hidden)
    yield from linear(f"{attention}.output", (f"{attention}.output.dense",), hidden, hidden)
    yield from layer_norm(f"{attention}.norm", f"{attention}.output.LayerNorm", hidden)
    yield from linear(f"{layer}.intermediate", (f"{layer}.intermediate.dense",), feed_forward, hidden)
    yield from linear(f"{layer}.output", (f"{layer}.output.dense",), hidden, feed_forward)
    yield from layer_norm(f"{layer}.norm", f"{layer}.output.LayerNorm", hidden)

# SPDX-License-Identifier: Apache-2.0
"""Lists the weights of a text encoder's graph, and finds the tensors of a checkpoint that each is made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.convert.dense.checkpoint import EncoderCheckpoint
from flownpu.convert.dense.weights import WordTable, layer_norm, linear, table
from flownpu.convert.encoder.families import ENCODERS
from flownpu.convert.errors import refuse_unplaced

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.dense.weights import EncoderWeight
    from flownpu.convert.encoder.families import TextEncoder

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


class TextEncoderCheckpoint(EncoderCheckpoint):
    """Reads the values of `encoder_weight_plan`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Finds the tensors' common prefix, which they have in a model that was saved with a head."""
        super().__init__(checkpoint)
        prefix = ENCODERS[checkpoint.config["model_type"]].prefix
        self._prefix = prefix if f"{prefix}{WORDS}" in checkpoint.names() else ""

    def locate(self, tensor: str) -> str:
        """A tensor's name in this checkpoint; a classifier's has no prefix."""
        return tensor if tensor.startswith("classifier") else self._prefix + tensor

    def check_places(self, plan: Sequence[EncoderWeight]) -> None:
        """Raises ConversionError if layers or embeddings have tensors that the plan has no place for."""
        known = {self.locate(source) for weight in plan for source in weight.sources}
        parts = (f"{self._prefix}encoder.", f"{self._prefix}embeddings.")
        unknown = [
            name
            for name in sorted(self._checkpoint.names())
            if name.startswith(parts) and name not in known and not name.endswith("position_ids")
        ]
        refuse_unplaced(self._checkpoint.folder, unknown)

# SPDX-License-Identifier: Apache-2.0
"""Lists the weights of a vision tower's graph, and finds the tensors of a checkpoint that each is made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.convert.dense.checkpoint import EncoderCheckpoint
from flownpu.convert.dense.weights import DenseWeight, EncoderWeight, Table, layer_norm, linear, table
from flownpu.convert.errors import ConversionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flownpu.convert.checkpoint import Checkpoint
    from flownpu.convert.vision.tower import VisionTower

_TOWER = "vision_tower."
# A tensor that every tower has, and the prefixes before and after `_TOWER` in different versions of transformers.
_KNOWN = "embeddings.patch_embedding.weight"
_PREFIXES = ("", "model.")
_INNER = ("", "vision_model.")


def vision_weight_plan(tower: VisionTower) -> list[EncoderWeight]:
    """The weights of a tower's graph, in order of use, by the initializers' names; sources have the checkpoint's."""
    hidden, patch = tower.hidden_size, tower.patch_size
    norm, projection = (f"multi_modal_projector.mm_{name}" for name in ("soft_emb_norm", "input_projection"))
    embeddings, last = "vision_tower.embeddings", "vision_tower.post_layernorm"
    plan: list[EncoderWeight] = [
        table(f"{embeddings}.patch_embedding.weight", (hidden, tower.channels, patch, patch)),
        table(f"{embeddings}.patch_embedding.bias", (hidden,)),
        table(f"{embeddings}.position_embedding.weight", (tower.patches, hidden)),
    ]
    for i in range(tower.layers):
        plan += _layer(tower, f"vision_tower.encoder.layers.{i}")
    plan += layer_norm(last, last, hidden)
    plan += [
        Table(norm, (f"{norm}.weight",), (hidden,), tower.pooled_norm_offset),
        DenseWeight(projection, (f"{projection}_weight",), tower.output_size, hidden, transposed=True),
    ]
    return plan


def _layer(tower: VisionTower, layer: str) -> Iterator[EncoderWeight]:
    hidden, feed_forward = tower.hidden_size, tower.feed_forward_size
    attention = f"{layer}.self_attn"
    qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
    yield from layer_norm(f"{layer}.layer_norm1", f"{layer}.layer_norm1", hidden)
    yield from linear(f"{attention}.qkv_proj", qkv, 3 * hidden, hidden)
    yield from linear(f"{attention}.out_proj", (f"{attention}.out_proj",), hidden, hidden)
    yield from layer_norm(f"{layer}.layer_norm2", f"{layer}.layer_norm2", hidden)
    yield from linear(f"{layer}.mlp.fc1", (f"{layer}.mlp.fc1",), feed_forward, hidden)
    yield from linear(f"{layer}.mlp.fc2", (f"{layer}.mlp.fc2",), hidden, feed_forward)


class VisionCheckpoint(EncoderCheckpoint):
    """Reads the values of `vision_weight_plan`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Finds the tensors' common prefix.

        Raises:
            ConversionError: the checkpoint has no vision tower.
        """
        super().__init__(checkpoint)
        names = set(checkpoint.names())
        places = [(prefix, inner) for prefix in _PREFIXES for inner in _INNER]
        found = [place for place in places if f"{place[0]}{_TOWER}{place[1]}{_KNOWN}" in names]
        if not found:
            raise ConversionError(
                f"{checkpoint.folder}: config.json has a vision_config, and tensor {_TOWER}{_KNOWN} is missing from "
                "the weight files; --vision-weights none converts the text decoder alone"
            )
        self._prefix, self._inner = found[0]

    def locate(self, tensor: str) -> str:
        """A tensor's name in this checkpoint."""
        inner = tensor.removeprefix(_TOWER)
        return self._prefix + (tensor if inner == tensor else f"{_TOWER}{self._inner}{inner}")

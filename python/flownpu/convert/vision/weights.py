# SPDX-License-Identifier: Apache-2.0
"""Lists the weights of a vision tower's graph, and the tensors of a checkpoint that each is made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.convert.dense.weights import DenseWeight, EncoderWeight, Table, layer_norm, linear, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flownpu.convert.vision.tower import VisionTower


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

# SPDX-License-Identifier: Apache-2.0
"""The weights of a vision tower's graph: which they are, and from which tensors of a checkpoint they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flownpu.convert.vision.tower import VisionTower

__all__ = ["DenseWeight", "Table", "VisionWeight", "vision_weight_plan"]


@dataclass(frozen=True)
class DenseWeight:
    """A matrix that activations are multiplied by: the rows of its sources below one another, [M, K]."""

    name: str
    sources: tuple[str, ...]
    rows: int
    columns: int
    transposed: bool = False
    """The one source is [K, M]."""

    @property
    def size(self) -> int:
        """Weights."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Table:
    """A tensor that stays float32: a bias, a norm, positions, the patches' kernel. Its sources follow one another."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    offset: float = 0.0
    """Added to every value."""


VisionWeight: TypeAlias = DenseWeight | Table


def vision_weight_plan(tower: VisionTower) -> list[VisionWeight]:
    """The weights of a tower's graph, in order of use. Initializers have these names, sources the checkpoint's."""
    hidden, patch = tower.hidden_size, tower.patch_size
    norm, projection = (f"multi_modal_projector.mm_{name}" for name in ("soft_emb_norm", "input_projection"))
    embeddings = "vision_tower.embeddings"
    plan: list[VisionWeight] = [
        _table(f"{embeddings}.patch_embedding.weight", (hidden, tower.channels, patch, patch)),
        _table(f"{embeddings}.patch_embedding.bias", (hidden,)),
        _table(f"{embeddings}.position_embedding.weight", (tower.patches, hidden)),
    ]
    for i in range(tower.layers):
        plan += _layer(tower, f"vision_tower.encoder.layers.{i}")
    plan += _norm("vision_tower.post_layernorm", hidden)
    plan += [
        Table(norm, (f"{norm}.weight",), (hidden,), tower.pooled_norm_offset),
        DenseWeight(projection, (f"{projection}_weight",), tower.output_size, hidden, transposed=True),
    ]
    return plan


def _layer(tower: VisionTower, layer: str) -> Iterator[VisionWeight]:
    hidden, feed_forward = tower.hidden_size, tower.feed_forward_size
    attention = f"{layer}.self_attn"
    qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
    yield from _norm(f"{layer}.layer_norm1", hidden)
    yield from _linear(f"{attention}.qkv_proj", qkv, 3 * hidden, hidden)
    yield from _linear(f"{attention}.out_proj", (f"{attention}.out_proj",), hidden, hidden)
    yield from _norm(f"{layer}.layer_norm2", hidden)
    yield from _linear(f"{layer}.mlp.fc1", (f"{layer}.mlp.fc1",), feed_forward, hidden)
    yield from _linear(f"{layer}.mlp.fc2", (f"{layer}.mlp.fc2",), hidden, feed_forward)


def _linear(name: str, modules: tuple[str, ...], rows: int, columns: int) -> Iterator[VisionWeight]:
    yield DenseWeight(f"{name}.weight", tuple(f"{module}.weight" for module in modules), rows, columns)
    yield Table(f"{name}.bias", tuple(f"{module}.bias" for module in modules), (rows,))


def _norm(name: str, size: int) -> Iterator[VisionWeight]:
    for part in ("weight", "bias"):
        yield _table(f"{name}.{part}", (size,))


def _table(name: str, shape: tuple[int, ...]) -> Table:
    return Table(name, (name,), shape)

# SPDX-License-Identifier: Apache-2.0
"""The weights of a decoder's graph: which they are, and from which tensors of a checkpoint they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from flownpu.convert.decoder import Decoder

__all__ = [
    "BlockPart",
    "NormWeight",
    "ProjectionWeight",
    "TensorSource",
    "Weight",
    "WeightSource",
    "embedding_table",
    "weight_plan",
]


@dataclass(frozen=True)
class TensorSource:
    """A tensor [rows, columns] of the checkpoint; its name comes without the prefix that checkpoints differ in."""

    tensor: str
    rows: int


@dataclass(frozen=True)
class ProjectionWeight:
    """A weight that is stored as Q4NX: the rows of its sources below one another."""

    name: str
    sources: tuple[TensorSource, ...]
    columns: int
    gated: bool = False
    """Two sources, the gate and the up projection, each padded to whole blocks by itself."""

    @property
    def rows(self) -> int:
        """M of Q4NXMatMul: what a product with this weight yields."""
        return self.sources[0].rows if self.gated else sum(source.rows for source in self.sources)

    def blocks_shape(self, layout: q4nx.Layout) -> tuple[int, int, int]:
        """The shape of the uint8 tensor."""
        return q4nx.blocks_shape(self.rows, self.columns, layout, gated=self.gated)

    @property
    def runs(self) -> tuple[tuple[TensorSource, ...], ...]:
        """Sources whose rows share blocks."""
        return tuple((source,) for source in self.sources) if self.gated else (self.sources,)

    @property
    def size(self) -> int:
        """Weights, padding not counted."""
        return sum(source.rows for source in self.sources) * self.columns


@dataclass(frozen=True)
class NormWeight:
    """A norm's weight, float32 [size]."""

    name: str
    tensor: str
    size: int


Weight: TypeAlias = ProjectionWeight | NormWeight


class BlockPart(NamedTuple):
    """Some rows of blocks of a projection.

    Attributes:
        blocks: uint8 [n, ceil(columns / 32), 640 or 576], in the layout that the source says.
        size: weights in them, padding not counted.
        squared_error: sum of (w - w')^2 over them, w' being what the blocks hold.
        squares: sum of w^2.
    """

    blocks: NDArray[np.uint8]
    size: int
    squared_error: float = 0.0
    squares: float = 0.0


class WeightSource(Protocol):
    """Where the values of a decoder's weights come from."""

    def layout(self, projection: ProjectionWeight) -> q4nx.Layout:
        """How the projection's blocks are laid out: narrow, without minima where the weight needs none."""

    def blocks(self, projection: ProjectionWeight) -> Iterator[BlockPart]:
        """The projection's blocks, part by part in their order."""

    def norm(self, weight: NormWeight) -> NDArray[np.float32]:
        """The norm's weight as the operator multiplies by it, [size]."""


def embedding_table(decoder: Decoder) -> ProjectionWeight:
    """The table of the tokens' embeddings, which is the LM head too where the two are tied."""
    return ProjectionWeight(
        "embed_tokens", (TensorSource("embed_tokens.weight", decoder.vocabulary_size),), decoder.hidden_size
    )


def weight_plan(decoder: Decoder) -> list[Weight]:
    """The weights of a decoder's graph, in order of use. Initializers have these names."""
    hidden, heads = decoder.hidden_size, decoder.heads * decoder.head_size
    kv_heads, feed_forward = decoder.kv_heads * decoder.head_size, decoder.feed_forward_size
    plan: list[Weight] = [embedding_table(decoder)]
    for i in range(len(decoder.layers)):
        layer, attention, mlp = f"layers.{i}", f"layers.{i}.self_attn", f"layers.{i}.mlp"
        before_mlp = "pre_feedforward_layernorm" if decoder.sandwich_norms else "post_attention_layernorm"
        qkv = (
            TensorSource(f"{attention}.q_proj.weight", heads),
            TensorSource(f"{attention}.k_proj.weight", kv_heads),
            TensorSource(f"{attention}.v_proj.weight", kv_heads),
        )
        gate_up = tuple(TensorSource(f"{mlp}.{name}_proj.weight", feed_forward) for name in ("gate", "up"))
        plan += [_norm(layer, "input_layernorm", hidden), ProjectionWeight(f"{attention}.qkv_proj", qkv, hidden)]
        if decoder.qk_norm:
            plan += [_norm(attention, name, decoder.head_size) for name in ("q_norm", "k_norm")]
        plan.append(
            ProjectionWeight(f"{attention}.o_proj", (TensorSource(f"{attention}.o_proj.weight", hidden),), heads)
        )
        if decoder.sandwich_norms:
            plan.append(_norm(layer, "post_attention_layernorm", hidden))
        down = (TensorSource(f"{mlp}.down_proj.weight", hidden),)
        plan += [
            _norm(layer, before_mlp, hidden),
            ProjectionWeight(f"{mlp}.gate_up_proj", gate_up, hidden, gated=True),
            ProjectionWeight(f"{mlp}.down_proj", down, feed_forward),
        ]
        if decoder.sandwich_norms:
            plan.append(_norm(layer, "post_feedforward_layernorm", hidden))
    plan.append(NormWeight("norm", "norm.weight", hidden))
    if not decoder.tied_embeddings:
        plan.append(ProjectionWeight("lm_head", (TensorSource("lm_head.weight", decoder.vocabulary_size),), hidden))
    return plan


def _norm(module: str, name: str, size: int) -> NormWeight:
    return NormWeight(f"{module}.{name}", f"{module}.{name}.weight", size)

# SPDX-License-Identifier: Apache-2.0
"""Lists the weights of a decoder's graph, and the tensors of a checkpoint that each is made from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from flownpu.convert.layer_parts import Convolution
from flownpu.ops import q4nx

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from flownpu.convert.decoder import Decoder, Layer
    from flownpu.convert.layer_parts import DeltaRule, Mixture


@dataclass(frozen=True)
class HeadOrder:
    """The order of a head's d dimensions in which dimension i is rotated with dimension i + d/2.

    Checkpoints rotate the first r of d dimensions, i with i + r/2, and leave the rest. Here the first half of the head
    is the first half of those r and then the first half of the rest, and the second half likewise. If queries and keys
    are both reordered so, their products stay the same.
    """

    size: int
    rotated: int

    def rows(self) -> NDArray[np.int64]:
        """For each row of a head in the graph, its row in the checkpoint, int64 [d]."""
        rotated, rest = np.split(np.arange(self.size), [self.rotated])
        return np.concatenate(
            [part for half in zip(np.split(rotated, 2), np.split(rest, 2), strict=True) for part in half]
        )


@dataclass(frozen=True)
class TensorSource:
    """Rows first..first+rows-1 of a checkpoint's tensor, whose name comes without the prefix in which models differ."""

    tensor: str
    rows: int
    first: int = 0
    stored: int = 0
    """How many rows the tensor has in all; 0: `rows`."""
    order: HeadOrder | None = None
    """The order of each head's rows; None: as they are stored."""

    @property
    def stored_rows(self) -> int:
        """Rows of the whole tensor."""
        return self.stored or self.rows


@dataclass(frozen=True)
class ProjectionWeight:
    """A weight that is stored as Q4NX: the rows of its sources, one source after the other."""

    name: str
    sources: tuple[TensorSource, ...]
    columns: int
    gated: bool = False
    """The sources are a gate and an up projection (for each expert), each padded to whole blocks by itself."""
    by_expert: bool = False
    """The sources of one expert follow those of the one before it, each padded to whole blocks by itself."""

    @property
    def rows(self) -> int:
        """M of Q4NXMatMul: how many values a product with this weight, or with one expert's part of it, yields."""
        one = self.gated or self.by_expert
        return self.sources[0].rows if one else sum(source.rows for source in self.sources)

    def blocks_shape(self, layout: q4nx.Layout) -> tuple[int, int, int]:
        """The shape of the uint8 tensor of blocks: rows of blocks, blocks in a row, bytes of a block."""
        rows = (sum(source.rows for source in run) for run in self.runs)
        shapes = [q4nx.blocks_shape(count, self.columns, layout) for count in rows]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def runs(self) -> tuple[tuple[TensorSource, ...], ...]:
        """The sources in groups; within a group, rows of different sources may share a block."""
        one = self.gated or self.by_expert
        return tuple((source,) for source in self.sources) if one else (self.sources,)

    @property
    def size(self) -> int:
        """How many weights it has, padding not counted."""
        return sum(source.rows for source in self.sources) * self.columns


@dataclass(frozen=True)
class NormWeight:
    """A norm's weight, float32 [size]."""

    name: str
    tensor: str
    size: int
    scale: float = 1.0
    """A factor of the weight, applied after its family's offset was added."""
    order: HeadOrder | None = None
    """The order of each head's values; None: as they are stored."""

    @property
    def sources(self) -> tuple[TensorSource, ...]:
        """The tensor that it is made of."""
        return (TensorSource(self.tensor, self.size, order=self.order),)


@dataclass(frozen=True)
class BiasWeight:
    """A vector that is not a norm's, such as a projection's bias, float32 [size]: its sources, one after the other."""

    name: str
    sources: tuple[TensorSource, ...]
    minus_exp: bool = False
    """It is -exp(x) of what the sources have."""

    @property
    def size(self) -> int:
        """How many elements it has: the rows of all sources."""
        return sum(source.rows for source in self.sources)


@dataclass(frozen=True)
class RouterWeight:
    """A router's weight [experts, columns]; stored in bfloat16 if that holds it exactly, else in float32."""

    name: str
    sources: tuple[TensorSource, ...]
    columns: int

    @property
    def rows(self) -> int:
        """The rows of all sources."""
        return sum(source.rows for source in self.sources)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.rows * self.columns


@dataclass(frozen=True)
class FloatWeight(RouterWeight):
    """A matrix in float32: a depthwise convolution's [rows, 1, columns], or a right operand [columns, rows]."""

    is_operand: bool = False

    def arranged(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """The values, [rows, columns], in the graph's shape."""
        return np.ascontiguousarray(values.T) if self.is_operand else values[:, None]


Weight: TypeAlias = ProjectionWeight | NormWeight | BiasWeight | RouterWeight


class BlockPart(NamedTuple):
    """Some rows of blocks of a projection.

    Attributes:
        blocks: uint8 [n, ceil(columns / 32), 640 or 576], in the layout that `WeightSource.layout` gives.
        size: how many weights they hold, padding not counted.
        squared_error: the sum of (w - w')^2 over these weights, where the blocks hold w' for w.
        squares: the sum of w^2.
    """

    blocks: NDArray[np.uint8]
    size: int
    squared_error: float = 0.0
    squares: float = 0.0


class WeightSource(Protocol):
    """A source of the values of a decoder's weights."""

    def layout(self, projection: ProjectionWeight) -> q4nx.Layout:
        """The layout of the projection's blocks: q4nx.NARROW, or q4nx.SYMMETRIC if the weight needs no minima."""

    def blocks(self, projection: ProjectionWeight) -> Iterator[BlockPart]:
        """The projection's blocks, in parts from the first row to the last."""

    def vector(self, weight: NormWeight | BiasWeight) -> NDArray[np.float32]:
        """A norm's weight with offset and scale applied, or a bias, [size]."""

    def matrix(self, weight: RouterWeight) -> NDArray[np.float32]:
        """A weight that is not quantised, as the source has it, [rows, columns]."""


def embedding_table(decoder: Decoder) -> ProjectionWeight:
    """The table of the tokens' embeddings, which is also the LM head if the two are tied."""
    return ProjectionWeight(
        "embed_tokens", (TensorSource("embed_tokens.weight", decoder.vocabulary_size),), decoder.hidden_size
    )


def weight_plan(decoder: Decoder) -> list[Weight]:
    """The weights of a decoder's graph, in order of use; their names are those of the graph's initializers."""
    plan: list[Weight] = [embedding_table(decoder)]
    for i, layer in enumerate(decoder.layers):
        plan += _mixer(decoder, layer, f"layers.{i}") + _feed_forward(decoder, i)
    plan.append(NormWeight("norm", "norm.weight", decoder.hidden_size, decoder.logit_scale))
    if not decoder.tied_embeddings:
        head = TensorSource("lm_head.weight", decoder.vocabulary_size)
        plan.append(ProjectionWeight("lm_head", (head,), decoder.hidden_size))
    return [_renamed(weight, decoder.tensor_names) for weight in plan]


def _renamed(weight: Weight, names: Mapping[str, str]) -> Weight:
    """The weight, of tensors in which a family's names stand for Llama's."""

    def source(one: TensorSource) -> TensorSource:
        tensor = names.get(one.tensor, one.tensor)
        for usual, name in names.items():
            tensor = tensor.replace(f".{usual}.", f".{name}.")
        return replace(one, tensor=tensor)

    if not names:
        return weight
    if isinstance(weight, NormWeight):
        return replace(weight, tensor=source(weight.sources[0]).tensor)
    return replace(weight, sources=tuple(source(one) for one in weight.sources))


def _mixer(decoder: Decoder, described: Layer, layer: str) -> list[Weight]:
    if described.mixer is None:
        return _attention(decoder, layer)
    norm = _norm(layer, "input_layernorm", decoder.hidden_size)
    if isinstance(described.mixer, Convolution):
        return [norm, *_convolution(decoder, layer, described.mixer)]
    return [norm, *_delta_rule(decoder, layer, described.mixer)]


def _convolution(decoder: Decoder, layer: str, mixer: Convolution) -> list[Weight]:
    module, hidden = f"{layer}.conv", decoder.hidden_size
    inner = (TensorSource(f"{module}.in_proj.weight", 3 * hidden),)
    output = (TensorSource(f"{module}.out_proj.weight", hidden),)
    return [
        ProjectionWeight(f"{module}.in_proj", inner, hidden),
        FloatWeight(f"{module}.conv", (TensorSource(f"{module}.conv.weight", hidden),), mixer.taps),
        ProjectionWeight(f"{module}.out_proj", output, hidden),
    ]


def _delta_rule(decoder: Decoder, layer: str, mixer: DeltaRule) -> list[Weight]:
    module, hidden, heads = f"{layer}.linear_attn", decoder.hidden_size, mixer.value_heads

    def whole(name: str, rows: int) -> tuple[TensorSource, ...]:
        return (TensorSource(f"{module}.{name}", rows),)

    qkv, z = whole("in_proj_qkv.weight", mixer.channels), whole("in_proj_z.weight", mixer.values)
    if mixer.tensors.fused_qkvz:
        each = mixer.values // mixer.key_heads
        sizes = (mixer.key_size, mixer.key_size, each, each)
        *parts, z = _by_head(f"{module}.in_proj_qkvz.weight", mixer.key_heads, sizes)
        qkv = tuple(source for part in parts for source in part)
    b, a = (whole(f"in_proj_{rate}.weight", heads) for rate in "ba")
    if mixer.tensors.fused_ba:
        b, a = _by_head(f"{module}.in_proj_ba.weight", mixer.key_heads, [heads // mixer.key_heads] * 2)
    return [
        ProjectionWeight(f"{module}.in_proj_qkv", qkv, hidden),
        ProjectionWeight(f"{module}.in_proj_z", z, hidden),
        ProjectionWeight(f"{module}.out_proj", whole("out_proj.weight", hidden), mixer.values),
        FloatWeight(f"{module}.conv1d", whole("conv1d.weight", mixer.channels), mixer.taps),
        FloatWeight(f"{module}.in_proj_a", a, hidden, is_operand=True),
        FloatWeight(f"{module}.in_proj_b", b, hidden, is_operand=True),
        BiasWeight(f"{module}.dt_bias", whole("dt_bias", heads)),
        BiasWeight(f"{module}.decay_scale", whole("A_log", heads), minus_exp=mixer.tensors.logarithms),
        BiasWeight(f"{module}.norm", whole("norm.weight", mixer.value_size)),
    ]


def _by_head(tensor: str, heads: int, sizes: Sequence[int]) -> list[tuple[TensorSource, ...]]:
    """Parts of a tensor in which each head has `sizes` rows of them, one after the other: all heads' rows of each."""
    each = sum(sizes)
    return [
        tuple(TensorSource(tensor, size, head * each + sum(sizes[:i]), heads * each) for head in range(heads))
        for i, size in enumerate(sizes)
    ]


def _attention(decoder: Decoder, layer: str) -> list[Weight]:
    module, hidden, size = f"{layer}.self_attn", decoder.hidden_size, decoder.head_size
    heads, kv_heads = decoder.heads * size, decoder.kv_heads * size
    partial = 0 < decoder.rotated_size < size
    order = HeadOrder(size, decoder.rotated_size) if partial else None
    shapes = {"q_proj": (heads, order), "k_proj": (kv_heads, order), "v_proj": (kv_heads, None)}
    qkv = _sources(module, "qkv_proj", shapes, fused=decoder.fused_projections)
    plan: list[Weight] = []
    if decoder.output_gate:
        queries, gate = _by_head(f"{module}.q_proj.weight", decoder.heads, (size, size))
        qkv = (*(replace(query, order=order) for query in queries), *qkv[1:])
        plan.append(ProjectionWeight(f"{module}.gate_proj", gate, hidden))
    if decoder.norms_before:
        plan.append(_norm(layer, "input_layernorm", hidden))
    plan.append(ProjectionWeight(f"{module}.qkv_proj", qkv, hidden))
    if decoder.qkv_bias:
        plan.append(_bias(f"{module}.qkv_proj", qkv))
    if decoder.qk_norm:
        plan += [NormWeight(f"{module}.{n}", f"{module}.{n}.weight", size, order=order) for n in ("q_norm", "k_norm")]
    if decoder.projection_norms:
        for name, rows in (("q_norm", heads), ("k_norm", kv_heads)):
            plan.append(NormWeight(f"{module}.{name}", f"{module}.{name}.weight", rows, order=order))
    output = (TensorSource(f"{module}.o_proj.weight", hidden),)
    plan.append(ProjectionWeight(f"{module}.o_proj", output, heads))
    if decoder.output_bias:
        plan.append(_bias(f"{module}.o_proj", output))
    if decoder.sandwich_norms:
        plan.append(_norm(layer, "post_attention_layernorm", hidden))
    return plan


def _feed_forward(decoder: Decoder, index: int) -> list[Weight]:
    layer, hidden, mixture = f"layers.{index}", decoder.hidden_size, decoder.mixture
    plan: list[Weight] = []
    if decoder.norms_before:
        before = "pre_feedforward_layernorm" if decoder.sandwich_norms else "post_attention_layernorm"
        plan.append(_norm(layer, before, hidden))
    if mixture is None:
        plan += _mlp(decoder, f"{layer}.mlp", decoder.feed_forward_size)
    elif index < mixture.dense_layers:
        plan += _mlp(decoder, f"{layer}.mlp", mixture.dense_size)
    else:
        plan += _experts(decoder, mixture, layer)
    if decoder.sandwich_norms:
        plan.append(_norm(layer, "post_feedforward_layernorm", hidden))
    return plan


def _mlp(decoder: Decoder, module: str, size: int) -> list[Weight]:
    hidden = decoder.hidden_size
    plan: list[Weight] = []
    shapes: dict[str, tuple[int, HeadOrder | None]] = {"gate_proj": (size, None), "up_proj": (size, None)}
    gate_up = _sources(module, "gate_up_proj", shapes, fused=decoder.fused_projections)
    if decoder.feed_forward_bias:
        # A gated product takes no bias, so gate and up projection are two products.
        for name, source in zip(shapes, gate_up, strict=True):
            plan.append(ProjectionWeight(f"{module}.{name}", (source,), hidden))
            plan.append(_bias(f"{module}.{name}", (source,)))
    else:
        plan.append(ProjectionWeight(f"{module}.gate_up_proj", gate_up, hidden, gated=True))
    down = (TensorSource(f"{module}.down_proj.weight", hidden),)
    plan.append(ProjectionWeight(f"{module}.down_proj", down, size))
    if decoder.feed_forward_bias:
        plan.append(_bias(f"{module}.down_proj", down))
    return plan


def _experts(decoder: Decoder, mixture: Mixture, layer: str) -> list[Weight]:
    """The weights of a layer's Q4NXMoE, and of its shared expert."""
    hidden, size, names = decoder.hidden_size, decoder.feed_forward_size, mixture.tensors
    # How many rows of each expert a tensor of gates or ups has, and at which of them the up projection begins.
    inner, up = (2 * size, size) if names.gate == names.up else (size, 0)
    gate_up = []
    for expert in range(mixture.experts):
        gate_up.append(_of_expert(mixture, f"{layer}.{names.gate}", expert, TensorSource("", size, 0, inner)))
        gate_up.append(_of_expert(mixture, f"{layer}.{names.up}", expert, TensorSource("", size, up, inner)))
    down = [
        _of_expert(mixture, f"{layer}.{names.down}", expert, TensorSource("", hidden))
        for expert in range(mixture.experts)
    ]
    plan: list[Weight] = [
        RouterWeight(f"{layer}.mlp.router", (TensorSource(f"{layer}.{names.router}", mixture.experts),), hidden),
        ProjectionWeight(f"{layer}.mlp.experts.gate_up_proj", tuple(gate_up), hidden, gated=True, by_expert=True),
        ProjectionWeight(f"{layer}.mlp.experts.down_proj", tuple(down), size, by_expert=True),
    ]
    if mixture.biased:
        plan.append(BiasWeight(f"{layer}.mlp.router.bias", (TensorSource(f"{layer}.{names.bias}", mixture.experts),)))
    if mixture.shared_size:
        gate = TensorSource(f"{layer}.mlp.shared_expert_gate.weight", 1)
        plan.append(FloatWeight(f"{layer}.mlp.shared_expert_gate", (gate,), hidden, is_operand=True))
        plan += _mlp(decoder, f"{layer}.mlp.shared_expert", mixture.shared_size)
    return plan


def _of_expert(mixture: Mixture, tensor: str, expert: int, rows: TensorSource) -> TensorSource:
    """An expert's rows: in a tensor of its own, if the name has {} for its number, or in the tensor of all experts."""
    if "{}" in tensor:
        return replace(rows, tensor=tensor.format(expert))
    each = rows.stored_rows
    return replace(rows, tensor=tensor, first=expert * each + rows.first, stored=mixture.experts * each)


def _sources(
    module: str, whole: str, shapes: Mapping[str, tuple[int, HeadOrder | None]], *, fused: bool
) -> tuple[TensorSource, ...]:
    """The sources of projections, given by name with rows and order: a tensor each, or one after the other in one."""
    total = sum(rows for rows, _ in shapes.values())
    sources, first = [], 0
    for name, (rows, order) in shapes.items():
        tensor = f"{module}.{whole if fused else name}.weight"
        sources.append(TensorSource(tensor, rows, first, total if fused else 0, order))
        first += rows if fused else 0
    return tuple(sources)


def _norm(module: str, name: str, size: int) -> NormWeight:
    return NormWeight(f"{module}.{name}", f"{module}.{name}.weight", size)


def _bias(projection: str, sources: tuple[TensorSource, ...]) -> BiasWeight:
    biases = (replace(source, tensor=source.tensor.removesuffix("weight") + "bias") for source in sources)
    return BiasWeight(f"{projection}.bias", tuple(biases))

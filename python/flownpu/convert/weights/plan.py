# SPDX-License-Identifier: Apache-2.0
"""Lists the weights of a decoder's graph."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flownpu.convert.layer_parts import Convolution
from flownpu.convert.weights.kinds import (
    BiasWeight,
    FloatWeight,
    HeadOrder,
    NormWeight,
    ProjectionWeight,
    RouterWeight,
    TensorSource,
    Weight,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flownpu.convert.decoder import Decoder, Layer
    from flownpu.convert.layer_parts import DeltaRule, Drafting, Mixture

# The beginning of names, in sources, of a drafter's tensors that are outside of its inner model.
DRAFTER = "drafter."
# The factor of each of the two parts of an embedding for a layer, which are added.
PER_LAYER_SCALE = 2**-0.5


def embedding_table(decoder: Decoder) -> ProjectionWeight:
    """The table of the tokens' embeddings, which is also the LM head if the two are tied."""
    return ProjectionWeight(
        "embed_tokens", (TensorSource("embed_tokens.weight", decoder.vocabulary_size),), decoder.hidden_size
    )


def weight_plan(decoder: Decoder) -> list[Weight]:
    """The weights of a decoder's graph, in order of use; their names are those of the graph's initializers."""
    plan: list[Weight] = [embedding_table(decoder)]
    if decoder.per_layer_size:
        plan += _per_layer_embeddings(decoder)
    for i, layer in enumerate(decoder.layers):
        plan += _mixer(decoder, layer, f"layers.{i}") + _feed_forward(decoder, i) + _after(decoder, f"layers.{i}")
    plan.append(NormWeight("norm", "norm.weight", decoder.hidden_size, decoder.logit_scale))
    if not decoder.tied_embeddings:
        head = TensorSource("lm_head.weight", decoder.vocabulary_size)
        plan.append(ProjectionWeight("lm_head", (head,), decoder.hidden_size))
    if decoder.drafting is not None:
        plan += _drafter(decoder, decoder.drafting)
    return [_renamed(weight, decoder.tensor_names) for weight in plan]


def _drafter(decoder: Decoder, drafting: Drafting) -> list[Weight]:
    """Weights between a drafter and the model that it drafts for, and those by which its LM head is searched."""
    hidden = decoder.hidden_size
    plan: list[Weight] = [
        ProjectionWeight(name, (TensorSource(f"{DRAFTER}{name}.weight", rows),), columns)
        for name, rows, columns in (
            ("pre_projection", hidden, 2 * drafting.hidden_size),
            ("post_projection", drafting.hidden_size, hidden),
        )
    ]
    if drafting.clusters:
        centroids = TensorSource(f"{DRAFTER}masked_embedding.centroids.weight", drafting.clusters)
        order = TensorSource(f"{DRAFTER}masked_embedding.token_ordering", decoder.vocabulary_size)
        plan.append(ProjectionWeight("centroids", (centroids,), hidden))
        plan.append(BiasWeight("tokens_of_clusters", (order,), experts=drafting.clusters))
    return plan


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
        return _attention(decoder, described, layer)
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


def _attention(decoder: Decoder, described: Layer, layer: str) -> list[Weight]:
    module, hidden, size = f"{layer}.self_attn", decoder.hidden_size, described.head_size or decoder.head_size
    heads, kv_heads = decoder.heads * size, (described.kv_heads or decoder.kv_heads) * size
    rotated = described.rotary.rotated_size(size) if described.head_size else decoder.rotated_size
    order = HeadOrder(size, rotated) if 0 < rotated < size else None
    shapes = {"q_proj": (heads, order)}
    if described.shared is None:
        shapes["k_proj"] = (kv_heads, order)
    if described.shared is None and not described.keys_are_values:
        shapes["v_proj"] = (kv_heads, None)
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
        names = ("q_norm", "k_norm") if described.shared is None else ("q_norm",)
        plan += [NormWeight(f"{module}.{n}", f"{module}.{n}.weight", size, order=order) for n in names]
    if decoder.head_sinks:
        plan.append(BiasWeight(f"{module}.sinks", (TensorSource(f"{module}.sinks", decoder.heads),)))
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
        size = decoder.layers[index].feed_forward_size or decoder.feed_forward_size
        plan += _mlp(decoder, f"{layer}.mlp", size)
    elif index < mixture.dense_layers:
        plan += _mlp(decoder, f"{layer}.mlp", mixture.dense_size)
    elif mixture.beside:
        plan += _beside(decoder, mixture, layer)
    else:
        plan += _experts(decoder, mixture, layer)
    if decoder.sandwich_norms:
        plan.append(_norm(layer, "post_feedforward_layernorm", hidden))
    return plan


def _per_layer_embeddings(decoder: Decoder) -> list[Weight]:
    """The weights that the embeddings of a token for each layer are made of."""
    size, hidden = len(decoder.layers) * decoder.per_layer_size, decoder.hidden_size
    projection = (TensorSource("per_layer_model_projection.weight", size),)
    return [
        per_layer_table(decoder),
        ProjectionWeight("per_layer_model_projection", projection, hidden),
        NormWeight(
            "per_layer_projection_norm", "per_layer_projection_norm.weight", decoder.per_layer_size, PER_LAYER_SCALE
        ),
    ]


def per_layer_table(decoder: Decoder) -> ProjectionWeight:
    """The table of the tokens' embeddings for each layer, a row for each token."""
    size = len(decoder.layers) * decoder.per_layer_size
    source = TensorSource("embed_tokens_per_layer.weight", decoder.vocabulary_size)
    return ProjectionWeight("embed_tokens_per_layer", (source,), size)


def _after(decoder: Decoder, layer: str) -> list[Weight]:
    """Weights of what follows a layer's feed-forward."""
    plan: list[Weight] = []
    if size := decoder.per_layer_size:
        for name, rows, columns in (
            ("per_layer_input_gate", size, decoder.hidden_size),
            ("per_layer_projection", decoder.hidden_size, size),
        ):
            plan.append(ProjectionWeight(f"{layer}.{name}", (TensorSource(f"{layer}.{name}.weight", rows),), columns))
        plan.append(_norm(layer, "post_per_layer_input_norm", decoder.hidden_size))
    if decoder.layer_scalars:
        plan.append(BiasWeight(f"{layer}.layer_scalar", (TensorSource(f"{layer}.layer_scalar", 1),)))
    return plan


def unused_tensors(decoder: Decoder) -> tuple[str, ...]:
    """The beginnings of names of tensors that checkpoints may have, and that change nothing.

    Layers that share keys and values have projections to keys and values of their own in some files.
    """
    return tuple(
        f"layers.{i}.self_attn.{name}."
        for i, layer in enumerate(decoder.layers)
        if layer.shared is not None
        for name in ("k_proj", "v_proj", "k_norm")
    )


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
    if mixture.has_biases:
        plan += _expert_biases(decoder, mixture, layer)
    if mixture.biased:
        plan.append(BiasWeight(f"{layer}.mlp.router.bias", (TensorSource(f"{layer}.{names.bias}", mixture.experts),)))
    if mixture.shared_size:
        gate = TensorSource(f"{layer}.mlp.shared_expert_gate.weight", 1)
        plan.append(FloatWeight(f"{layer}.mlp.shared_expert_gate", (gate,), hidden, is_operand=True))
        plan += _mlp(decoder, f"{layer}.mlp.shared_expert", mixture.shared_size)
    return plan


def _beside(decoder: Decoder, mixture: Mixture, layer: str) -> list[Weight]:
    """The weights of a plain feed-forward, and of experts beside it."""
    hidden, names = decoder.hidden_size, mixture.tensors
    router = (TensorSource(f"{layer}.{names.router}", mixture.experts),)
    scales = (TensorSource(f"{layer}.{names.scales}", mixture.experts),)
    return [
        *_mlp(decoder, f"{layer}.mlp", mixture.dense_size),
        _norm(layer, "post_feedforward_layernorm_1", hidden),
        NormWeight(f"{layer}.mlp.router.norm", f"{layer}.{names.router_norm}", hidden, hidden**-0.5),
        FloatWeight(f"{layer}.mlp.router", router, hidden, is_operand=True),
        _norm(layer, "pre_feedforward_layernorm_2", hidden),
        *(weight for weight in _experts(decoder, mixture, layer) if weight.name != f"{layer}.mlp.router"),
        BiasWeight(f"{layer}.mlp.router.scales", scales),
        _norm(layer, "post_feedforward_layernorm_2", hidden),
    ]


def _expert_biases(decoder: Decoder, mixture: Mixture, layer: str) -> list[Weight]:
    """Biases of a router's logits and of the experts' projections."""
    size, names, experts = decoder.feed_forward_size, mixture.tensors, range(mixture.experts)
    inner, up = (2 * size, size) if names.gate_bias == names.up_bias else (size, 0)
    parts = ((names.gate_bias, 0), (names.up_bias, up))
    gate_up = (
        _of_expert(mixture, f"{layer}.{name}", expert, TensorSource("", size, first, inner))
        for expert in experts
        for name, first in parts
    )
    down = TensorSource(f"{layer}.{names.down_bias}", mixture.experts * decoder.hidden_size)
    logits = TensorSource(f"{layer}.{names.logits_bias}", mixture.experts)
    return [
        BiasWeight(f"{layer}.mlp.router.logits_bias", (logits,)),
        BiasWeight(f"{layer}.mlp.experts.gate_up_proj.bias", tuple(gate_up), experts=mixture.experts),
        BiasWeight(f"{layer}.mlp.experts.down_proj.bias", (down,), experts=mixture.experts),
    ]


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

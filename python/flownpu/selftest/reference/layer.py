# SPDX-License-Identifier: Apache-2.0
"""Layers of a decoder: random weights, the host buffers of a token's call, and the expected results in float64.

The expected results are computed with the operators' references (flownpu.ops), without any rounding: `expectation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.aie.designs.bias import with_bias
from flownpu.aie.designs.decode_layer.design import DecodeLayer
from flownpu.aie.designs.decode_layer.shape import interleave
from flownpu.ops import q4nx
from flownpu.ops.definitions import flow_kv_attention, q4nx_matmul
from flownpu.ops.definitions.int8_cache import SCALE_BYTES, dequantise_rows, quantise_rows
from flownpu.ops.q4nx import as_read
from flownpu.selftest.reference.attention import random_sinks, sink_heads
from flownpu.selftest.reference.numbers import BF16_ROUNDING, BFLOAT16, bf16, wide

if TYPE_CHECKING:
    from flownpu.aie.designs.decode_layer.design import CalledLayer
    from flownpu.aie.designs.decode_layer.shape import LayerShape, Projection
    from flownpu.aie.iron.compat import Program

    Rng = np.random.Generator

EPSILON = 1e-6
# The number of perturbed copies of a layer, from which each number's standard deviation is estimated, and the number of
# standard deviations that a number may be off: see `expectation`.
SAMPLES = 32
DEVIATIONS = 7


@dataclass
class LayerWeights:
    """A layer's weights: Q4NX blocks, and norms in bf16.

    norms: [norms of both entries, D]. qk_norm: [q, k][d], [(H + G) d] of all heads, or None. sinks: f32 [H], or None.
    """

    qkv: np.ndarray
    output: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray
    norms: np.ndarray
    qk_norm: np.ndarray | None
    sinks: np.ndarray | None = None

    def blocks(self) -> np.ndarray:
        """All blocks in the order in which the array reads them."""
        qkv, output, gate_up, down = (as_read(part) for part in (self.qkv, self.output, self.gate_up, self.down))
        return np.concatenate([part.reshape(-1) for part in (qkv, output, interleave(gate_up), down)])

    def vectors(self, shape: LayerShape) -> np.ndarray:
        """The layer's norms as part of the host buffer `vectors`."""
        lines = np.zeros((len(self.norms), shape.line), BFLOAT16)
        lines[:, : shape.hidden] = self.norms
        more = [] if self.sinks is None else [sink_heads(self.sinks, shape.kv_heads, shape.d)]
        more += [] if self.qk_norm is None else [self.qk_norm.reshape(-1)]
        return np.concatenate([lines.reshape(-1), *more])


def random_projection(rng: Rng, rows: int, columns: int, *, eight_bits: bool = False) -> np.ndarray:
    """Blocks of a random weight of mean 0 and variance 1 / columns: products with normal numbers are about normal."""
    groups = -(-columns // q4nx.GROUP)
    if eight_bits:
        signed = rng.integers(-128, 128, (rows, columns), np.int8)
        # Codes -128..127 have the variance (256^2 - 1) / 12.
        scale = bf16(rng.uniform(0.5, 1.5, (rows, groups)) / np.sqrt(5461.25 * columns))
        minimum = bf16(rng.normal(size=(rows, groups)) / 8 / np.sqrt(columns))
        return q4nx.pack(signed, scale, minimum, q4nx.EIGHT_BITS_WITH_MINIMA)
    codes = rng.integers(0, 16, (rows, columns), np.uint8)
    # Codes 0..15 have the variance (16^2 - 1) / 12.
    scale = bf16(rng.uniform(0.5, 1.5, (rows, groups)) / np.sqrt(21.25 * columns))
    minimum = bf16(-7.5 * wide(scale) + rng.normal(size=(rows, groups)) / 8 / np.sqrt(columns))
    return q4nx.pack(codes, scale, minimum)


def random_layer(shape: LayerShape, rng: Rng, eight_bits: int = 0) -> LayerWeights:
    """Random weights with which the layer's outputs are about as large as its inputs.

    `eight_bits`: which of them have 8 bits, see `LayerShape.of_bits`; with a bias of the output projection, not that.
    """
    (m_qkv, k), (m_output, _), (m_gate, _), (m_down, k_down) = [(p.rows, p.columns) for p in shape.projections]
    of_qkv, of_output, of_gate, of_down = (part.eight_bits for part in shape.of_bits(eight_bits))
    gate_up = np.concatenate([random_projection(rng, m_gate, k, eight_bits=of_gate) for _ in range(2)])
    norms = bf16(rng.uniform(0.5, 1.5, (2 * shape.entry_norms, shape.hidden)))
    qk_norm = None
    if shape.qk_norm:
        sizes = [sum(shape.qk_norm_sizes)] if shape.norm_of_all_heads else [2, shape.d]
        qk_norm = bf16(rng.uniform(0.5, 1.5, sizes))
    output = random_projection(rng, m_output, shape.heads * shape.d, eight_bits=of_output)
    if shape.output_bias:
        output = with_bias(output, rng.normal(size=m_output).astype(np.float32), shape.heads * shape.d)
    return LayerWeights(
        random_projection(rng, m_qkv, k, eight_bits=of_qkv), output, gate_up,
        random_projection(rng, m_down, k_down, eight_bits=of_down), norms, qk_norm,
        random_sinks(shape.heads, rng) if shape.has_sinks else None,
    )  # fmt: skip


def rotary_table(positions: int, d: int, base: float = 10000.0) -> np.ndarray:
    """cos[d/2], sin[d/2] for each position, bf16."""
    angle = np.arange(positions)[:, None] * base ** (-2 * np.arange(d // 2) / d)
    return bf16(np.concatenate([np.cos(angle), np.sin(angle)], axis=1))


def padded(values: np.ndarray, size: int) -> np.ndarray:
    """The values, followed by zeros up to `size`."""
    return np.concatenate([values, np.zeros(size - len(values), values.dtype)])


@dataclass
class LayerInputs:
    """Inputs of layers for a token.

    hidden, update: bf16 [D], the residual stream before the first layer and the update that this layer adds to it.
    cache: bf16 [layers, capacity, G, 2, d]. rotary: bf16 [tables, positions, d].
    """

    design: DecodeLayer
    weights: list[LayerWeights]
    layers: list[CalledLayer]
    position: int
    hidden: np.ndarray
    update: np.ndarray
    cache: np.ndarray
    rotary: np.ndarray
    scale: float = 0.0
    final_norms: np.ndarray | None = None  # bf16 [norms of an entry, D]
    head: np.ndarray | None = None  # blocks of the LM head
    vocabulary: int = 0

    def program(self) -> Program:
        """The design's program."""
        of_head = self.head is not None and q4nx.layout_of(self.head).bits == 8
        return self.design.program(
            self.position, self.cache.shape[1], layers=self.layers, vocabulary=self.vocabulary,
            head_eight_bits=of_head, epsilon=EPSILON, scale=self.scale or None, positions=self.rotary.shape[1],
            tables=len(self.rotary),
        )  # fmt: skip

    def buffers(self) -> dict[str, np.ndarray]:
        """The host buffers of the inputs, by name."""
        shape, regions = self.design.shape, self.design.regions
        state = np.zeros(self.design.state_size, BFLOAT16)
        if shape.output_bias:
            state[self.design.one] = 1
        for name, values in (("hidden", self.hidden), ("update", self.update)):
            state[regions[name].offset :][: shape.hidden] = values
        weights, vectors = [w.blocks() for w in self.weights], [w.vectors(shape) for w in self.weights]
        if self.head is not None and self.final_norms is not None:
            weights.append(as_read(self.head).reshape(-1))
            vectors += [padded(norm, shape.line) for norm in self.final_norms]
        return {
            "weights": np.concatenate(weights), "vectors": np.concatenate(vectors), "rotary": self.rotary,
            "cache": self.cache, "state": state, **({"int8_rows": self.int8_rows()} if shape.int8_cache else {}),
        }  # fmt: skip

    def int8_rows(self) -> np.ndarray:
        """The cache in int8, u8 [layers, capacity, G, 2, 5 d / 4], with zeros for padding."""
        rows = quantise_rows(wide(self.cache))
        padding = [(0, 0)] * (rows.ndim - 1) + [(0, self.design.shape.row_bytes - rows.shape[-1])]
        return np.pad(rows, padding).view(np.uint8)

    def seen(self, index: int) -> np.ndarray:
        """The keys and values that a layer has of earlier positions, as the array multiplies them."""
        kept = wide(self.cache[index, : self.position])
        return wide(bf16(dequantise_rows(quantise_rows(kept)))) if self.design.shape.int8_cache else kept

    def outcome(self, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The array's results, taken from its buffers, by the names of `expectation`."""
        shape = self.design.shape
        hidden = dict.fromkeys(("hidden", "update", "attended"), shape.hidden)
        heads = {"qkv": shape.projections[0].rows, "context": shape.heads * shape.d}
        sizes = hidden | heads | {"activated": shape.feed_forward}
        regions = self.design.regions
        result = {name: found["state"][regions[name].offset :][:size] for name, size in sizes.items()}
        cache = found["cache"].reshape(self.cache.shape)
        result["position"] = cache[:, self.position].reshape(-1)
        result["other positions"] = np.delete(cache, self.position, axis=1).reshape(-1)
        if shape.int8_cache:
            rows = found["int8_rows"].reshape(self.int8_rows().shape)
            made = rows[:, self.position, ..., : shape.d + SCALE_BYTES].view(np.int8)
            scales = made[..., shape.d :].copy().view(np.float32)
            result["int8 position"] = (dequantise_rows(made) - wide(cache[:, self.position])) / scales
            result["other int8 positions"] = np.delete(rows, self.position, axis=1)
        if self.head is not None:
            result["logits"] = found["logits"]
        return result


def random_call(
    shape: LayerShape,
    rng: Rng,
    position: int,
    layers: list[CalledLayer],
    capacity: int,
    tables: int = 1,
    way: str = "pairs",
) -> LayerInputs:
    """A call with random weights, a KV cache full of random numbers, and an update to be added."""
    hidden, update = bf16(rng.normal(size=shape.hidden) * 3), bf16(rng.normal(size=shape.hidden))
    cache = bf16(rng.normal(size=(len(layers), capacity, shape.kv_heads, 2, shape.d)))
    rotary = np.stack([rotary_table(capacity, shape.d, 10000.0 * 10**table) for table in range(tables)])
    weights = [random_layer(shape, rng, layer.eight_bits) for layer in layers]
    return LayerInputs(DecodeLayer(shape, way), weights, list(layers), position, hidden, update, cache, rotary)


# --- The expectation --------------------------------------------------------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Rows divided by their root mean square, times a weight."""
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * wide(weight))


class Rounding:
    """Adds random relative errors of up to 2^-8, a bound of rounding to bf16, to all rows but row 0, which is exact."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """The values [copies, ...], with independent errors in each copy."""
        error = self._rng.uniform(-BF16_ROUNDING, BF16_ROUNDING, values.shape)
        error[0] = 0
        return np.asarray(values * (1 + error))


def expectation(call: LayerInputs, rng: Rng, samples: int = SAMPLES) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The expected results, and how far each number may be off.

    The array rounds to bf16 where this function perturbs (kernels/README.md): entries, projections, heads, attention's
    weights (factors of the values, which are perturbed instead), its output and that times its gate. So the error of a
    result is a sum of many small independent errors. Its standard deviation is estimated from `samples` copies of the
    layer, each with errors of its own, uniform up to the largest that a rounding makes: this over- rather than
    underestimates it, for a rounding's largest error is between 2^-9 and 2^-8. The tolerance is 7 such deviations: 32
    samples give the deviation to within a factor of 2/3 in all but 1 of 10^4 cases, and 1 number in 2 x 10^5 would be
    beyond 4.6 true deviations if every rounding were as bad as assumed. What f32 arithmetic adds is below 3 x 2^-14, a
    hundredth of a rounding.

    Returns:
        By name the expected numbers in float64, and their tolerances.
    """
    shape, rounded, rows = call.design.shape, Rounding(rng), samples + 1
    hidden, update = (np.repeat(wide(v)[None], rows, 0) for v in (call.hidden, call.update))
    found: dict[str, np.ndarray] = {}
    positions = []
    for index, (weights, layer) in enumerate(zip(call.weights, call.layers, strict=True)):
        norms = np.split(weights.norms, 2)
        residual, x = enter(shape, norms[0], hidden, update, rounded)
        found["qkv"] = rounded(product(x, weights.qkv, shape.projections[0]))
        context, position = attend(call, index, layer, rounded(found["qkv"])[:, : shape.heads_size], rounded)
        positions.append(position)
        found["context"] = rounded(context)
        x = with_one(opened(shape, found["context"], found["qkv"], rounded), shape)
        found["attended"] = rounded(product(x, weights.output, shape.projections[1]))
        hidden, x = enter(shape, norms[1], residual, found["attended"], rounded)
        found["activated"] = rounded(product(x, weights.gate_up, shape.projections[2], shape.activation))
        update = rounded(product(found["activated"], weights.down, shape.projections[3]))
        found["hidden"], found["update"] = hidden, update
    found["position"] = np.concatenate(positions, axis=1)
    if call.head is not None and call.final_norms is not None:
        _, x = enter(shape, call.final_norms, hidden, update, rounded, final=True)
        found["logits"] = rounded(q4nx_matmul.reference(x, call.head, rows=call.vocabulary, columns=shape.hidden))
    kept = wide(np.delete(call.cache, call.position, axis=1)).reshape(-1)
    expected = {name: (copies[0], DEVIATIONS * copies[1:].std(0)) for name, copies in found.items()}
    expected["other positions"] = kept, np.zeros(kept.shape)
    if shape.int8_cache:
        # Steps by which codes are off the bf16 that they are made from (kernels/int8_rows.cc).
        codes = np.zeros((len(call.layers), shape.kv_heads, 2, shape.d))
        others = np.delete(call.int8_rows(), call.position, axis=1)
        expected["int8 position"] = codes, codes + 0.5 + 127e-4
        expected["other int8 positions"] = others, np.zeros(others.shape)
    return expected


def enter(
    shape: LayerShape,
    norms: np.ndarray,
    residual: np.ndarray,
    update: np.ndarray,
    rounded: Rounding,
    *,
    final: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The residual stream after the update is added, and its norm, which the next projection reads.

    Without norms before a layer's parts, `final` is for the entry of the LM head, which has one.
    """
    after = rounded(residual + (rms_norm(update, norms[0]) if shape.post_norms else update))
    if not (shape.norms_before or final):
        return after, after
    return after, rounded(rms_norm(after, norms[-1]))


def opened(shape: LayerShape, context: np.ndarray, qkv: np.ndarray, rounded: Rounding) -> np.ndarray:
    """Attention's output, times the sigmoid of its gate if it has one: of the rows of QKV that follow the heads.

    The array's sigmoid errs by 2e-4 (kernels/common/float_math.h), a twentieth of the bound of its product's rounding.
    """
    if not shape.output_gate:
        return context
    return rounded(context / (1 + np.exp(-qkv[:, shape.heads_size :])))


def with_one(context: np.ndarray, shape: LayerShape) -> np.ndarray:
    """The output projection's x: with a bias a group of 32 columns more, the first of them 1 (designs/bias.py)."""
    group = np.eye(1, q4nx.GROUP) if shape.output_bias else np.zeros((1, 0))
    return np.concatenate([context, np.broadcast_to(group, (*context.shape[:-1], group.size))], axis=-1)


def product(x: np.ndarray, blocks: np.ndarray, projection: Projection, gating: str = "none") -> np.ndarray:
    """A projection of rows x, with the same dequantised float32 weights as the operator."""
    return q4nx_matmul.reference(x, blocks, rows=projection.rows, columns=x.shape[-1], gating=gating)


def with_norms_of_all_heads(shape: LayerShape, qkv: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Packed rows whose queries, and whose keys, are normalised together by weights [(H + G) d]."""
    if weights is None:
        return qkv
    ends = np.cumsum(shape.qk_norm_sizes)
    *parts, values = np.split(qkv, ends, axis=-1)
    return np.concatenate(
        [*(rms_norm(part, of) for part, of in zip(parts, np.split(weights, ends[:1]), strict=True)), values], axis=-1
    )


def attend(
    call: LayerInputs, index: int, layer: CalledLayer, qkv: np.ndarray, rounded: Rounding
) -> tuple[np.ndarray, np.ndarray]:
    """The output of FlowKVAttention with norms and RoPE; and the position's keys and values in the cache's layout."""
    shape, rows = call.design.shape, len(qkv)
    past = np.repeat(call.seen(index)[None], rows, 0).transpose(3, 0, 2, 1, 4)  # [2][rows, G, position, d]
    half = shape.d // 2
    angles = wide(call.rotary[layer.table])
    norms: dict[str, Any] = {}
    weights = call.weights[index].qk_norm
    if shape.norm_of_all_heads:
        qkv = with_norms_of_all_heads(shape, qkv, weights)
    elif weights is not None:
        norms = dict(zip(("q_norm_weight", "k_norm_weight"), wide(weights), strict=True))
    qkv = qkv.copy()
    context, keys, values = flow_kv_attention.reference(
        qkv[:, None], past_key=past[0], past_value=rounded(past[1]), seqlens_k=np.full(rows, call.position),
        total_sequence_length=np.array([call.position + 1]), cos_cache=angles[:, :half], sin_cache=angles[:, half:],
        num_heads=shape.heads, kv_num_heads=shape.kv_heads, head_size=shape.d, scale=call.scale, do_rotary=1,
        local_window_size=layer.window or -1, qk_norm_epsilon=EPSILON, softcap=shape.softcap,
        head_sink=call.weights[index].sinks, **norms,
    )  # fmt: skip
    line = np.stack([keys[:, :, call.position], values[:, :, call.position]], axis=2)
    return context[:, 0], line.reshape(rows, -1)

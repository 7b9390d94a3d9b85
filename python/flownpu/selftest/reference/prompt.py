# SPDX-License-Identifier: Apache-2.0
"""The expected results of prefill in float64, and the tolerance of each number.

As in layer.py (`expectation`), copies of the model are computed beside the exact one, each with errors of its own
wherever the array rounds; a number may be off by `DEVIATIONS` times their standard deviation. A sum of many errors
divided by the deviation of 32 such sums has Student's t distribution with 31 degrees of freedom: it is beyond 9 in 4 of
10^10 cases, and the tests compare 10^7 numbers. Beyond layer.py:

- On XDNA2 the matrix unit reads 8 neighbours with one exponent (kernels/README.md, "Arithmetic"): A and B of a GEMM
  along K, queries and keys along d, attention's weights and values along 8 neighbouring keys. The unit of a mantissa is
  2^-6 of the largest's power of two, and rounding to it is off by half of that at most.
- The dequantised weights are rounded to bf16 before that (weights stored in bfp16 at once have one error less). A
  product sums so many of these errors that its error is normal, with the sum of their variances. A weight's error is
  the same for all tokens, so a copy draws one normal number for each row of a weight and uses it for all tokens, as if
  the product's error were the same multiple of its deviation for all of them.
- The residual stream is the host's, in f32, whose roundings are 2^-16 of bf16's.
- Each copy has its own KV cache, so that the errors of a chunk carry over to the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flownpu.ops import q4nx
from flownpu.ops.definitions import flow_qkv_attention, q4nx_matmul
from flownpu.selftest.reference.layer import EPSILON, SAMPLES, Rounding, rms_norm, with_norms_of_all_heads, with_one
from flownpu.selftest.reference.numbers import BF16_ROUNDING, wide
from flownpu.selftest.reference.projections import ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flownpu.aie.designs.decode_layer.design import CalledLayer, LayerShape
    from flownpu.selftest.reference.layer import LayerWeights

    _Step = tuple[int, str, np.ndarray, np.ndarray]

DEVIATIONS = 9


@dataclass
class PrefillModel:
    """The layers' weights, and the KV caches of the exact model and its copies.

    Attributes:
        shape: sizes of all layers.
        layers: window and rotary table of each layer.
        weights: weights of each layer.
        rotary: bf16 [tables, context, d].
        scale: factor of the scores; 0: d^-0.5.
        rng: draws the errors.
        cache: float64 [1 + copies, layers, context, G, 2, d]; row 0 is exact.
    """

    shape: LayerShape
    layers: list[CalledLayer]
    weights: list[LayerWeights]
    rotary: np.ndarray
    scale: float
    rng: np.random.Generator
    cache: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        shape = self.shape
        rows = 1 + SAMPLES, len(self.layers), self.rotary.shape[1], shape.kv_heads, 2, shape.d
        self.cache = np.zeros(rows)
        self._rounded = Rounding(self.rng)
        self._off: dict[tuple[int, int], np.ndarray] = {}

    def prefill(self, hidden: np.ndarray, position: int) -> Iterator[_Step]:
        """Computes all layers of some tokens, and their keys and values in `cache`.

        Args:
            hidden: the tokens' embeddings, bf16 [tokens, D].
            position: position of the first token.

        Yields:
            layer, buffer (aie/programs/prefill.py), the expected numbers [tokens, ..], their tolerance. The last layer
            ends with its update.
        """

        def made(index: int, name: str, copies: np.ndarray) -> _Step:
            return index, name, copies[0], deviation(copies)

        stream = np.repeat(wide(hidden)[None], 1 + SAMPLES, 0)
        x = stream
        if self.shape.norms_before:
            x = self._norm(np.split(self.weights[0].norms, 2)[0], stream)
            yield made(0, "x", x)
        for index in range(len(self.layers)):
            qkv = self._product(index, 0, x)
            yield made(index, "qkv", qkv)
            q, context = self._attend(index, qkv, position)
            yield made(index, "q", q)
            yield made(index, "context", context)
            attended = self._product(index, 1, with_one(context, self.shape))
            yield made(index, "attended", attended)
            stream, x = self._add(np.split(self.weights[index].norms, 2)[1], stream, attended)
            yield made(index, "residual", stream)
            yield made(index, "x", x)
            activated = self._product(index, 2, x)
            yield made(index, "activated", activated)
            update = self._product(index, 3, activated)
            yield made(index, "update", update)
            if index + 1 < len(self.layers):
                stream, x = self._add(np.split(self.weights[index + 1].norms, 2)[0], stream, update)
                yield made(index, "residual", stream)
                yield made(index, "x", x)

    def outcome(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """The cache's positions first .. last - 1 [layers, positions, G, 2, d], and their tolerance."""
        written = self.cache[:, :, first:last]
        return written[0], deviation(written)

    # --- The steps ----------------------------------------------------------------------------------------------------

    def _add(self, norms: np.ndarray, stream: np.ndarray, update: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The residual stream plus the update (normalised first if there are post-norms), and the stream's norm."""
        added = rms_norm(update, norms[0]) if self.shape.post_norms else update
        stream = stream + added
        return stream, self._norm(norms, stream) if self.shape.norms_before else self._rounded(stream)

    def _norm(self, norms: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """The norm of the residual stream, which the next projection reads."""
        return self._rounded(rms_norm(residual, norms[-1]))

    def _product(self, index: int, number: int, x: np.ndarray) -> np.ndarray:
        """A projection, [copies, tokens, rows]; row 0 is the operator's exact result."""
        shape, weights, projection = self.shape, self.weights[index], self.shape.projections[number]
        blocks = (weights.qkv, weights.output, weights.gate_up, weights.down)[number]
        gating = shape.activation if projection.gated else "none"
        exact = q4nx_matmul.reference(x[0], blocks, rows=projection.rows, columns=x.shape[-1], gating=gating)
        weight = q4nx.dequantize(blocks, 32 * len(blocks), x.shape[-1]).astype(np.float64)
        variance = ((BF16_ROUNDING * weight) ** 2 + (_units(weight) / 2) ** 2) / 3  # of uniform errors up to these
        if (index, number) not in self._off:
            self._off[index, number] = self.rng.normal(size=(SAMPLES, 1, len(weight)))
        read = self._in_blocks(x)[1:]
        sums = (read.reshape(-1, read.shape[-1]) @ weight.T).reshape(*read.shape[:2], -1)  # one large product is faster
        sums += self._off[index, number] * np.sqrt(x[0] ** 2 @ variance.T)
        if projection.gated:
            gate, up = np.split(sums, 2, axis=-1)
            sums = ACTIVATIONS[gating](gate) * up
        return self._rounded(np.concatenate([exact[None], sums]))

    def _attend(self, index: int, qkv: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Queries and attention's output, [copies, tokens, H d]; row 0 is exact. Keys and values go into `cache`."""
        shape, layer, rows, tokens = self.shape, self.layers[index], *qkv.shape[:2]
        heads, kv_heads, end = shape.heads, shape.kv_heads, position + tokens
        weights = self.weights[index].qk_norm
        norms = [None, None] if weights is None or shape.norm_of_all_heads else wide(weights)
        if shape.norm_of_all_heads:
            qkv = with_norms_of_all_heads(shape, qkv, weights)
        cosine, sine = np.split(wide(self.rotary[layer.table]), 2, axis=1)
        past = self.cache[:1, index].transpose(3, 0, 2, 1, 4)
        expected, *_ = flow_qkv_attention.reference(
            qkv[:1], past_key=past[0], past_value=past[1], seqlens_k=np.array([end - 1]),
            total_sequence_length=np.array([self.cache.shape[2]]), cos_cache=cosine, sin_cache=sine,
            q_norm_weight=norms[0], k_norm_weight=norms[1], num_heads=heads, kv_num_heads=kv_heads,
            head_size=shape.d, scale=self.scale, do_rotary=1, local_window_size=layer.window or -1,
            qk_norm_epsilon=EPSILON, softcap=shape.softcap, head_sink=self.weights[index].sinks,
        )  # fmt: skip

        by_head = qkv.reshape(rows, tokens, -1, shape.d)
        q, k, v = np.split(by_head, [heads, heads + kv_heads], axis=2)
        angles = cosine[position:end, None], sine[position:end, None]
        q, k = (self._rounded(turned(part, norm, *angles)) for part, norm in zip((q, k), norms, strict=True))
        self.cache[:, index, position:end] = np.stack([k, v], axis=3)
        keys, values = self.cache[:, index, :end].transpose(3, 0, 2, 1, 4)  # [copies, G, keys, d]
        group = heads // kv_heads
        queries = self._in_blocks(q).reshape(rows, tokens, kv_heads, group, shape.d).transpose(0, 2, 3, 1, 4)
        scores = (self.scale or shape.d**-0.5) * queries @ self._in_blocks(keys)[:, :, None].swapaxes(-1, -2)
        if shape.softcap:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        at, key = position + np.arange(tokens)[:, None], np.arange(end)
        seen = (key <= at) & (key > at - (layer.window or end))
        scores = np.where(seen, scores, -np.inf)
        of_group = self.weights[index].sinks
        sinks = np.full((kv_heads, 1), -np.inf) if of_group is None else of_group.reshape(kv_heads, -1)
        sinks = sinks[..., None, None]
        largest = np.maximum(scores.max(-1, keepdims=True), sinks)
        weights = self._rounded(np.exp(scores - largest))
        total = weights.sum(-1, keepdims=True) + np.exp(sinks - largest)
        # Blocks of 8 keys must lie along the last axis, for which the values are transposed.
        padded = [(0, 0)] * 4 + [(0, -end % 8)]
        weights = self._in_blocks(np.pad(weights, padded))
        values = self._in_blocks(np.pad(values.swapaxes(-1, -2), padded[1:])).swapaxes(-1, -2)
        context = (weights @ values[:, :, None] / total).transpose(0, 3, 1, 2, 4).reshape(rows, tokens, -1)
        _require_equal(context[:1], expected)
        return q.reshape(rows, tokens, -1), self._rounded(context)

    def _in_blocks(self, values: np.ndarray) -> np.ndarray:
        """Adds the errors of block floating point, 8 numbers along the last axis per exponent; row 0 stays exact."""
        error = self.rng.uniform(-0.5, 0.5, values.shape)
        error[0] = 0
        return np.asarray(values + error * _units(values))


def _units(values: np.ndarray) -> np.ndarray:
    """The unit of each number's mantissa in block floating point, in blocks of 8 along the last axis."""
    largest = np.abs(values).reshape(*values.shape[:-1], -1, 8).max(-1)
    exponent = np.floor(np.log2(np.where(largest > 0, largest, 1))) - 6
    return np.repeat(np.where(largest > 0, np.exp2(exponent), 0), 8, -1)


def turned(x: np.ndarray, norm: np.ndarray | None, cosine: np.ndarray, sine: np.ndarray) -> np.ndarray:
    """Heads [.., d], normalised if there is a norm, then rotated by their token's angles (RoPE)."""
    x = x if norm is None else x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * norm
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


def _require_equal(copy: np.ndarray, expected: np.ndarray) -> None:
    """Checks that the equations of the copies give the operator's result.

    Raises:
        ArithmeticError: they do not.
    """
    if not np.allclose(copy, expected, rtol=1e-9, atol=1e-12):
        raise ArithmeticError("expected the model of attention to be the operator, and it is not: a bug of flownpu")


def deviation(copies: np.ndarray) -> np.ndarray:
    """The tolerance: `DEVIATIONS` standard deviations of the copies; 0 for numbers that are equal in all copies."""
    return np.asarray(DEVIATIONS * copies[1:].std(0))

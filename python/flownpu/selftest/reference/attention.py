# SPDX-License-Identifier: Apache-2.0
"""Attention over a sweep of keys: the operators' float64 reference, and the tolerance of a kernel's results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.aie.designs.attention import SINK_PADDING
from flownpu.aie.designs.common import bits
from flownpu.ops.definitions import flow_kv_attention, flow_qkv_attention
from flownpu.selftest.reference.case import Case
from flownpu.selftest.reference.numbers import (
    BF16_ROUNDING,
    BFLOAT16,
    F32_ROUNDING,
    INVERSE,
    PRODUCT,
    ROUGH_EXP2,
    TANH,
    bf16,
    blocks_of,
    wide,
)

if TYPE_CHECKING:
    from types import ModuleType

    from flownpu.aie.designs.flow_kv import FlowKV
    from flownpu.aie.designs.flow_qkv import FlowQKV

    Rng = np.random.Generator

LOG2_E = 1.4426950408889634
ALL = 2**31 - 1


@dataclass
class Sweep:
    """Queries of one group of heads against `key_end` keys, which are read in chunks from `first_key` on.

    q [heads, queries, d], k and v [capacity, d] in bf16; capacity is a multiple of the chunk.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    chunk: int
    key_end: int
    first_query: int = 0
    first_key: int = 0
    window: int = ALL
    causal: int = 1
    scale: float = 0.0
    block: int = 0  # whether the queries see one another (bidirectional_blocks); the array then gets causal = 0
    softcap: float = 0.0
    sinks: np.ndarray | None = None  # f32 [heads], a score of each head that has no value

    @property
    def d(self) -> int:
        """Head size."""
        return int(self.q.shape[-1])

    @property
    def factor(self) -> float:
        """The factor of scores."""
        return float(self.scale or self.d**-0.5)

    @property
    def cap(self) -> int:
        """The kernels' argument for the soft cap."""
        return bits(self.softcap)

    def capped(self, scores: np.ndarray) -> np.ndarray:
        """The scores within the soft cap."""
        return self.softcap * np.tanh(scores / self.softcap) if self.softcap else scores

    @property
    def starts(self) -> range:
        """First key of each chunk."""
        return range(self.first_key, self.key_end, self.chunk)

    def rtp(self) -> np.ndarray:
        """The run-time parameters of a tile."""
        words = [len(self.starts), self.first_query, self.first_key, self.key_end, self.window, self.causal]
        return np.array([*words, bits(self.factor * LOG2_E), self.q.shape[1], *[0] * 8], np.int32)


def make_sweep(
    rng: Rng, heads: int, queries: int, d: int, keys: int, chunk: int, *, strength: float = 1.0, **settings: Any
) -> Sweep:
    """A sweep of random numbers; padding after the last key is of the same size as keys, so that its use would show."""
    capacity = settings.get("first_key", 0) % chunk + -(-keys // chunk) * chunk + chunk
    q, k, v = (bf16(rng.normal(size=s) * strength) for s in ((heads, queries, d), (capacity, d), (capacity, d)))
    return Sweep(q, k, v, chunk, keys, **settings)


def as_multiplied(sweep: Sweep, *, in_blocks: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q, K and V as the matrix unit reads them, in float64.

    in_blocks: whether it reads block floating point: along d for Q and K, along 8 neighbouring keys of a chunk for V.
    """
    if not in_blocks:
        return wide(sweep.q), wide(sweep.k), wide(sweep.v)
    read = slice(sweep.first_key, sweep.first_key + len(sweep.starts) * sweep.chunk)
    v = wide(sweep.v)
    v[read] = blocks_of(sweep.v[read].T)[1].T
    return blocks_of(sweep.q)[1], blocks_of(sweep.k)[1], v


def expectation(
    sweep: Sweep, *, in_blocks: bool = False, operator: ModuleType = flow_qkv_attention
) -> tuple[np.ndarray, np.ndarray]:
    """The operator's reference on the numbers that the matrix unit reads, [heads, real queries, d], and its tolerance.

    in_blocks: see `as_multiplied`.
    """
    heads, queries, d = sweep.q.shape
    end = sweep.key_end
    real = min(queries, end - sweep.first_query)  # the rows after them are padding
    positions = sweep.first_query + np.arange(real)
    q, k, v = as_multiplied(sweep, in_blocks=in_blocks)
    q, k, v = q[:, :real], k[:end], v[:end]
    shape = {"num_heads": heads, "kv_num_heads": 1, "head_size": d, "scale": sweep.scale, "causal": sweep.causal}
    shape |= {"softcap": sweep.softcap, "head_sink": sweep.sinks}
    if sweep.window != ALL:
        shape["local_window_size"] = sweep.window
    if operator is flow_kv_attention:
        past, new = (a[None, None, : end - 1] for a in (k, v)), (a[None, end - 1 :] for a in (k, v))
        length = np.array([end - 1], np.int32), np.array([end], np.int32)
        expected = operator.reference(q.reshape(1, 1, -1), *new, *past, *length, **shape)[0]
    else:  # all queries of the prompt, which include these
        query = np.zeros((1, end, heads, d))
        query[0, positions] = q.swapaxes(0, 1)
        if sweep.block:
            shape |= {"causal": 1, "bidirectional_blocks": (np.arange(end) >= sweep.first_query)[None].astype(np.int32)}
        expected = operator.reference(query.reshape(1, end, -1), k[None], v[None], **shape)[0][:, positions]
    expected = expected.reshape(real, heads, d).swapaxes(0, 1)
    # The probabilities, for the tolerance.
    key = np.arange(end)
    seen = (key > positions[:, None] - sweep.window) & ((key <= positions[:, None]) | (sweep.causal == 0))
    t = np.where(seen, LOG2_E * sweep.capped(sweep.factor * (q @ k.T)), -np.inf)
    sinks = np.full((heads, 1, 1), -np.inf) if sweep.sinks is None else LOG2_E * wide(sweep.sinks)[:, None, None]
    largest_t = np.maximum(t.max(-1, keepdims=True), sinks)
    p = np.exp2(t - largest_t)
    p /= p.sum(-1, keepdims=True) + np.exp2(sinks - largest_t)
    # The error of the exponent t (base 2) comes from f32 sums over d and the product with the scale. The relative error
    # of F = 2^t is ln 2 times that, and the errors of exp2 and of F's rounding to bf16.
    magnitude = sweep.factor * LOG2_E * (np.abs(q) @ np.abs(k.T))
    share = np.log(2) * (d * F32_ROUNDING + PRODUCT) * magnitude + ROUGH_EXP2 + BF16_ROUNDING
    if sweep.softcap:  # a tanh raises no error of its argument, to which the quotient scale / c adds one
        share += np.log(2) * (INVERSE * magnitude + (TANH + PRODUCT) * np.abs(np.where(seen, t, 0)))
    # The output O is an average weighted by F, and l is the sum of the same F, so errors of F move O by no more than
    # this. A sink's share of l has but errors of f32.
    tolerance = (p * share) @ np.abs(v) + (p * share).sum(-1, keepdims=True) * np.abs(expected)
    if in_blocks:  # in the product F V, F is off by up to 2^-6 of the largest F of 8 neighbouring keys, but not in l
        padded = np.pad(p[..., sweep.first_key :], ((0, 0), (0, 0), (0, -(end - sweep.first_key) % 8)))
        largest = np.repeat(padded.reshape(heads, real, -1, 8).max(-1), 8, -1)
        values = np.abs(as_multiplied(sweep, in_blocks=True)[2][sweep.first_key :][: largest.shape[-1]])
        tolerance += 2.0**-6 * largest @ values
    tolerance += (3 * PRODUCT + BF16_ROUNDING) * np.abs(expected) + len(key) * F32_ROUNDING * (p @ np.abs(v))
    return expected, 1.02 * tolerance  # second-order terms: shares are below 2 %


def sink_heads(sinks: np.ndarray, kv_heads: int, d: int) -> np.ndarray:
    """Sinks [H] as the array reads them (designs/attention.py): bf16 [G d], and padding of NaN that nothing may use."""
    t = sinks.astype(np.float64).reshape(kv_heads, -1) * LOG2_E
    heads = np.full((kv_heads, d // 2), np.nan, np.float32)
    group = t.shape[1]
    heads[:, :group], heads[:, group : 2 * group] = np.ceil(t), np.exp2(t - np.ceil(t))
    return np.concatenate([heads.reshape(-1), np.full(SINK_PADDING // 2, np.nan, np.float32)]).view(BFLOAT16)


def random_sinks(heads: int, rng: Rng) -> np.ndarray:
    """Sinks about as large as scores are, one far above them and one far below."""
    return np.concatenate([[40.0, -200.0], rng.normal(size=heads - 2) * 2]).astype(np.float32)


def _cache(rng: Rng, capacity: int, kv_heads: int, d: int) -> np.ndarray:
    """A KV cache [capacity, KV heads, 2, d] of random numbers, also behind the last key."""
    return bf16(rng.normal(size=(capacity, kv_heads, 2, d)))


def attention_expectation(
    q: np.ndarray, kv: np.ndarray, operator: ModuleType, *, sinks: np.ndarray | None = None, **of_sweep: int
) -> tuple[np.ndarray, np.ndarray]:
    """Expected output and tolerance of queries [tokens, heads, d], in the same shape; a `Sweep` for each KV head."""
    heads = q.shape[1]
    kv_heads, in_blocks = kv.shape[1], bool(of_sweep.pop("in_blocks"))
    parts = []
    for head in range(kv_heads):
        group = q[:, head * heads // kv_heads : (head + 1) * heads // kv_heads].swapaxes(0, 1)
        of_group = None if sinks is None else sinks.reshape(kv_heads, -1)[head]
        sweep = Sweep(group, kv[:, head, 0], kv[:, head, 1], sinks=of_group, **of_sweep)
        parts.append(expectation(sweep, in_blocks=in_blocks, operator=operator))
    expected, tolerance = (np.concatenate(part).swapaxes(0, 1) for part in zip(*parts, strict=True))
    return expected, tolerance


def flow_kv_case(design: FlowKV, total: int, capacity: int, rng: Rng, *, window: int | None = None) -> Case:
    """FlowKV: the token at position total - 1 over the keys up to its own."""
    q, kv = bf16(rng.normal(size=(1, design.heads, design.d))), _cache(rng, capacity, design.kv_heads, design.d)
    sweep = {"chunk": design.keys, "key_end": total, "first_query": total - 1, "window": window or ALL}
    sinks, inputs = _sinks(design, rng)
    expected, tolerance = attention_expectation(q, kv, flow_kv_attention, in_blocks=False, sinks=sinks, **sweep)
    make = partial(design.program, total, capacity, window=window)
    return Case(make, {"q": q, "kv": kv, **inputs}, "o", expected, tolerance)


def _sinks(design: FlowKV | FlowQKV, rng: Rng) -> tuple[np.ndarray | None, dict[str, np.ndarray]]:
    """Random sinks, and the host buffer that has them; None and no buffer for a design without."""
    if not design.has_sinks:
        return None, {}
    sinks = random_sinks(design.heads, rng)
    return sinks, {"sinks": sink_heads(sinks, design.kv_heads, design.d)}


def flow_qkv_case(
    design: FlowQKV, tokens: int, past: int, capacity: int, rng: Rng, *, window: int | None = None, causal: bool = True,
    block: bool = False,
) -> Case:  # fmt: skip
    """FlowQKV: tokens from position `past` on; the padding to whole blocks holds numbers and is not compared.

    `block`: not causal, and compared with the operator whose bidirectional_blocks has these tokens as one block.
    """
    causal = causal and not block
    size = design.padded(tokens), design.heads, design.d
    q, kv = bf16(rng.normal(size=size)), _cache(rng, capacity, design.kv_heads, design.d)
    sweep = {
        "key_end": past + tokens,
        "first_query": past,
        "window": window or ALL,
        "causal": int(causal),
        "block": int(block),
    }
    in_blocks = design.target == "npu2"
    chunks = {"chunk": design.keys, "in_blocks": in_blocks}
    sinks, inputs = _sinks(design, rng)
    expected, tolerance = attention_expectation(q[:tokens], kv, flow_qkv_attention, sinks=sinks, **sweep, **chunks)
    make = partial(design.program, tokens, past, capacity, window=window, causal=causal)
    inputs |= {"q": q, "kv": kv}
    return Case(make, inputs, "o", expected, tolerance, lambda o: o.reshape(size)[:tokens])

# SPDX-License-Identifier: Apache-2.0
"""Cases of layers that keep a state: the short convolution, the gated delta rule, and the norm with a gate."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from flownpu.selftest.gpu.case import F32, Case, Expected

Rng = np.random.Generator

_MICROSOFT = "com.microsoft"
_EPSILON = 1e-6
_LANES = 64  # work-items that sum a row together
_EXP = 6  # of F32, as in attention.py
_CHUNK = 16  # tokens of a prompt's chunk (ops/gpu/kernels/states/kernels.h)


def states() -> Iterator[tuple[str, Callable[[Rng], Case]]]:
    """Pairs of a case's name and the function that makes the case."""
    yield "short_convolution, one token", partial(_convolution, 2, 1, 70, 4, silu=True)
    yield "short_convolution, as many tokens as the state has", partial(_convolution, 1, 3, 64, 4, silu=True)
    yield "short_convolution, prompt without silu", partial(_convolution, 2, 19, 65, 3, silu=False)
    yield "gated_delta, one token", partial(_delta, 2, 1, 2, 4, 16, 24)
    yield "gated_delta, few tokens", partial(_delta, 2, 7, 2, 4, 16, 24)
    yield "gated_delta, prompt", partial(_delta, 2, 37, 2, 4, 30, 70)
    yield "gated_rms_norm", partial(_norm, (2, 3, 4 * 40), 40)


def _convolution(batch: int, tokens: int, channels: int, taps: int, rng: Rng, *, silu: bool) -> Case:
    x = rng.standard_normal((batch, tokens, channels), dtype=np.float32)
    weight = rng.standard_normal((channels, 1, taps), dtype=np.float32)
    past = rng.standard_normal((batch, taps - 1, channels), dtype=np.float32)
    rows = np.concatenate([past, x], axis=1).astype(np.float64)
    seen = np.stack([rows[:, tap : tap + tokens] for tap in range(taps)], axis=-1)
    y = np.einsum("btcj,cj->btc", seen, weight[:, 0])
    tolerance = (taps + 1) * F32 * np.einsum("btcj,cj->btc", np.abs(seen), np.abs(weight[:, 0]))
    if silu:
        # The largest slope of SiLU is 1.1; exp's error, the sum and the quotient.
        tolerance = 1.1 * tolerance + (_EXP + 4) * F32 * np.abs(y)
        y = y / (1 + np.exp(-y))
    return Case(
        op_type="CausalConvWithState", domain=_MICROSOFT, inputs=[x, weight, None, past], constants=[1],
        attributes={"activation": "silu" if silu else "none", "channels_last": 1}, outputs=["float", "float"],
        expected={0: Expected(y, tolerance), 1: Expected(rows[:, tokens:], 0.0)},
    )  # fmt: skip


def _delta(
    batch: int, tokens: int, key_heads: int, value_heads: int, key_size: int, value_size: int, rng: Rng
) -> Case:  # fmt: skip
    q, k = (rng.standard_normal((batch, tokens, key_heads, key_size), dtype=np.float32) for _ in range(2))
    k /= np.sqrt(np.square(k).sum(-1, keepdims=True))
    v = rng.standard_normal((batch, tokens, value_heads, value_size), dtype=np.float32)
    decay = -rng.uniform(0.01, 1, (batch, tokens, value_heads)).astype(np.float32)
    beta = rng.uniform(0, 1, (batch, tokens, value_heads)).astype(np.float32)
    past = rng.standard_normal((batch, value_heads, key_size, value_size), dtype=np.float32)
    state, y = past.astype(np.float64), np.zeros(v.shape)
    # `off`: the length of a column's error. The rule with |k| = 1 and beta <= 1 carries it on and does not enlarge it.
    # Each token adds the roundings of a sum of key_size terms, of at most a column's length, and of the few operations
    # on each element. y is two such sums times |q|, and has the error of the state and of what the token adds to it.
    # In a chunk the tokens before act through A and T (delta_chunks.cc), too: A's rounding is relative to the sum of
    # |A d|, and that of the product T R relative to |T R|, where T is no more than the decay between both tokens (as P
    # is) and R no more than a value and what a column knows of it.
    off, largest, summed = 0.0, float(np.abs(past).max()), 0.0
    earlier: list[tuple[np.ndarray, float]] = []  # decayed keys and what they added of a chunk's tokens
    heads = np.arange(value_heads) // (value_heads // key_heads)
    for token in range(tokens):
        of_key, of_query = (part[:, token, heads].astype(np.float64) for part in (k, q))
        factor = np.exp(decay[:, token].astype(np.float64))[:, :, None, None]
        held = factor * np.einsum("bhij,bhi->bhj", state, of_key)[:, :, None]
        error = beta[:, token, :, None, None] * (v[:, token, :, None] - held)
        state = factor * state + of_key[..., None] * error
        earlier = [(factor[..., 0] * key, added) for key, added in earlier] if token % _CHUNK else []
        by_pairs = sum(np.abs(np.einsum("bhi,bhi->bh", of_key, key)).max() * added for key, added in earlier)
        reach = 1 + sum(float(np.sqrt(np.square(key).sum(-1)).max()) for key, _ in earlier)
        earlier.append((of_key, float(np.abs(error).max())))
        y[:, token] = np.einsum("bhij,bhi->bhj", state, of_query) * key_size**-0.5
        largest = max(largest, float(np.abs(state).max()), float(np.abs(v).max()))
        known = (1 + key_size**0.5) * largest
        off += ((key_size + _EXP + 8) * key_size**0.5 * largest + _CHUNK * reach * known) * F32
        off += (key_size + _EXP + _CHUNK) * F32 * by_pairs
        summed = max(summed, (key_size + _EXP + _CHUNK) * F32 * reach * known)
    length = np.sqrt(np.square(q.astype(np.float64)).sum(-1))[:, :, heads, None] * key_size**-0.5
    tolerance = length * (off + summed + (4 * key_size + _EXP + 8) * F32 * key_size**0.5 * largest)
    flat = [part.reshape(batch, tokens, -1) for part in (q, k, v)]
    return Case(
        op_type="LinearAttention", domain=_MICROSOFT, inputs=[*flat, past, decay, beta],
        attributes={"q_num_heads": key_heads, "kv_num_heads": value_heads, "update_rule": "gated_delta"},
        outputs=["float", "float"],
        expected={
            0: Expected(y.reshape(batch, tokens, -1), np.broadcast_to(tolerance, y.shape).reshape(batch, tokens, -1)),
            1: Expected(state, off),
        },
    )  # fmt: skip


def _norm(shape: tuple[int, ...], size: int, rng: Rng) -> Case:
    x, gate = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    weight = rng.uniform(0.5, 1.5, size).astype(np.float32)
    parts = x.astype(np.float64).reshape(*shape[:-1], -1, size)
    normed = parts / np.sqrt(np.mean(parts**2, axis=-1, keepdims=True) + _EPSILON) * weight
    y = normed.reshape(shape) * gate / (1 + np.exp(-gate.astype(np.float64)))
    # As rows.py's norms, then exp, a sum, a quotient and two products.
    additions = -(-size // _LANES) + 32
    tolerance = (additions / 2 + 12 + _EXP + 4) * F32 * np.abs(y)
    return Case(
        op_type="GatedRMSNorm", domain=_MICROSOFT, inputs=[x, weight, gate], constants=[1],
        attributes={"epsilon": _EPSILON}, expected={0: Expected(y, tolerance)},
    )  # fmt: skip

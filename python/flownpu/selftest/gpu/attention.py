# SPDX-License-Identifier: Apache-2.0
"""Cases of attention: a token's and a prompt's, heads that share KV heads, windows, soft caps, types of the cache."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from flownpu.ops.definitions.int8_cache import dequantise_rows, quantise_rows
from flownpu.selftest.gpu.case import F32, HALF, LEAST_HALF, Case, Expected

Rng = np.random.Generator

_TYPES = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8}
# Errors of exp and tanh in F32: at most 3 and 5 units in the last place (OpenCL's bounds).
_EXP, _TANH = 6, 10
_CHUNK, _CHUNK_OF_MATRICES = 64, 32  # keys
# Inputs attention_bias and head_sink, of 15.
_MASK, _SINKS, _INPUTS = 10, 14, 15


def attention() -> Iterator[tuple[str, Callable[[Rng], Case]]]:
    """Pairs of a case's name and the function that makes the case."""
    for cache in _TYPES:
        yield f"flow_kv_attention, {cache} cache", partial(_attention, 4, 2, 26, 1, 90, cache=cache)
        yield f"flow_kv_attention, {cache} cache by fours", partial(_attention, 4, 2, 36, 1, 90, cache=cache)
    yield "flow_kv_attention, window", partial(_attention, 3, 1, 72, 1, 150, window=77)
    yield "flow_kv_attention, softcap", partial(_attention, 4, 4, 26, 1, 20, softcap=3.0)
    yield "flow_kv_attention, sinks", partial(_attention, 4, 2, 26, 1, 90, has_sinks=True)
    yield "flow_qkv_attention, first prompt", partial(_attention, 4, 2, 26, 13, 0)
    yield "flow_qkv_attention, later prompt", partial(_attention, 4, 2, 26, 5, 66, cache="bfloat16")
    yield "flow_qkv_attention, window and softcap", partial(_attention, 6, 2, 72, 9, 70, window=7, softcap=2.0)
    yield "flow_qkv_attention, not causal", partial(_attention, 2, 1, 26, 7, 0, causal=False)
    yield "flow_qkv_attention, mask", partial(_attention, 4, 2, 26, 9, 70, has_mask=True)
    yield "flow_qkv_attention, sinks and window", partial(_attention, 4, 2, 26, 9, 70, window=7, has_sinks=True)


def attention_of_matrices() -> Iterator[tuple[str, Callable[[Rng], Case]]]:
    """Cases that are multiplied by matrix units, whose sizes divide those of the heads."""
    of_matrices = partial(partial, _attention, matrices=True)
    for cache in _TYPES:
        yield f"flow_attention_of_matrices, {cache} cache", of_matrices(4, 2, 32, 41, 50, cache=cache)
    yield "flow_attention_of_matrices, first prompt", of_matrices(3, 1, 32, 35, 0)
    yield "flow_attention_of_matrices, heads of 256", of_matrices(4, 1, 256, 13, 70, cache="float16")
    yield "flow_attention_of_matrices, window and softcap", of_matrices(6, 2, 64, 90, 70, window=7, softcap=2.0)
    yield "flow_attention_of_matrices, not causal", of_matrices(2, 1, 32, 37, 0, causal=False)
    yield "flow_attention_of_matrices, sinks", of_matrices(8, 2, 64, 9, 70, has_sinks=True)


def _attention(
    heads: int, kv_heads: int, size: int, tokens: int, past: int, rng: Rng, *, cache: str = "float", window: int = -1,
    softcap: float = 0.0, causal: bool = True, has_mask: bool = False, has_sinks: bool = False, matrices: bool = False,
) -> Case:  # fmt: skip
    batch, total = 2, past + tokens
    query = rng.standard_normal((batch, tokens, heads * size), dtype=np.float32) * 2
    new = [rng.standard_normal((batch, tokens, kv_heads * size), dtype=np.float32) for _ in range(2)]
    old = [_stored(rng.standard_normal((batch, kv_heads, past, size), dtype=np.float32), cache) for _ in range(2)]
    by_head = [_stored(part.reshape(batch, tokens, kv_heads, size).swapaxes(1, 2), cache) for part in new]
    keys, values = (_read(np.concatenate(pair, axis=2)) for pair in zip(old, by_head, strict=True))
    seen = _seen(tokens, past, window, causal=causal)
    # Some keys are hidden, by head; row 0 sees its first key.
    mask = rng.standard_normal((1, heads, tokens, total), dtype=np.float32)
    mask[..., 1:][rng.random((1, heads, tokens, total - 1)) < 0.3] = -np.inf
    sinks = rng.standard_normal(heads, dtype=np.float32) * 3
    y, tolerance = _attended(
        query.astype(np.float64), keys, values, seen, softcap, mask if has_mask else None,
        sinks if has_sinks else None, rounds_to_halves=matrices,
    )  # fmt: skip
    inputs: list[np.ndarray | None] = [query, *new, *[None] * 4]
    if past:
        lengths, all_tokens = np.full(batch, total - 1, np.int32), np.array(total, np.int32)
        inputs = [query, *new, *old, lengths, all_tokens]
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads, "head_size": size}
    attributes |= {"softcap": softcap, "local_window_size": window, "causal": int(causal)}
    inputs += [None] * (_INPUTS - len(inputs))
    inputs[_MASK], inputs[_SINKS] = mask if has_mask else None, sinks if has_sinks else None
    return Case(
        op_type="FlowKVAttention" if tokens == 1 else "FlowQKVAttention", inputs=inputs,
        attributes=attributes, outputs=["float", cache, cache], expected={0: Expected(y, tolerance)},
        options={"gpu_matrices": "on"} if matrices else {},
    )  # fmt: skip


def _stored(rows: np.ndarray, cache: str) -> np.ndarray:
    """Rows in the form in which a cache of that type stores them; int8 rows with their scales."""
    return quantise_rows(rows) if cache == "int8" else rows.astype(_TYPES[cache])


def _read(rows: np.ndarray) -> np.ndarray:
    """The values of stored rows, in float64."""
    return (dequantise_rows(rows) if rows.dtype == np.int8 else rows).astype(np.float64)


def _seen(tokens: int, past: int, window: int, *, causal: bool) -> np.ndarray:
    """Whether a query sees a key, bool [tokens, past + tokens]."""
    position, key = np.arange(past, past + tokens)[:, None], np.arange(past + tokens)[None]
    seen = key <= position if causal else np.ones((tokens, past + tokens), bool)
    return seen & (key > position - window) if window > 0 else seen


def _attended(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, seen: np.ndarray, softcap: float,
    mask: np.ndarray | None = None, sinks: np.ndarray | None = None, *, rounds_to_halves: bool,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The output in float64 [batch, tokens, heads * size], and its tolerance.

    A score is a sum of `size` products with a scaled query: size + 2 roundings of the sum of magnitudes. A weight of
    the softmax is off by e to the power of the errors of its score and of the maximum, and by exp's own error.
    Numerator and denominator are sums over all keys, and are rescaled with each chunk. With `rounds_to_halves` both
    factors of all products become float16: those of scores, values, and weights times 2^15, but not in the denominator.
    """
    batch, tokens, width = query.shape
    kv_heads, total, size = keys.shape[1:]
    q = query.reshape(batch, tokens, kv_heads, -1, size) * size**-0.5
    scores = np.einsum("btghd,bgkd->bghtk", q, keys)
    off = (size + 2) * F32 * np.einsum("btghd,bgkd->bghtk", np.abs(q), np.abs(keys))
    if rounds_to_halves:
        off += off_by_halves("btghd,bgkd->bghtk", np.abs(q), np.abs(keys))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)  # its slope is 1 at most
        off += _TANH * F32 * softcap
    hidden = np.broadcast_to(~seen[None, None, None], scores.shape)
    if mask is not None:  # the sum is rounded
        added = mask.reshape(1, kv_heads, -1, tokens, total)
        hidden = hidden | np.isneginf(added)
        scores = scores + np.where(np.isneginf(added), 0, added)
        off = off + F32 * np.abs(scores)
    scores[hidden] = -np.inf
    off = np.where(hidden, 0, off).max(axis=-1, keepdims=True)
    # The difference to the maximum is rounded, too; it is no larger than twice the largest score's magnitude.
    spread = 2 * F32 * np.abs(np.where(hidden, 0, scores)).max(axis=-1, keepdims=True)
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - largest)
    denominators = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:  # its weight has the error of the maximum alone
        denominators = denominators + np.exp(sinks.reshape(1, kv_heads, -1, 1, 1) - largest)
    weights /= denominators
    chunks = -(-total // (_CHUNK_OF_MATRICES if rounds_to_halves else _CHUNK))
    relative = 2 * off + 2 * spread + (_EXP * 2 + 2 * total + (_EXP + 2) * chunks) * F32
    y = np.einsum("bghtk,bgkd->bghtd", weights, values)
    tolerance = 2 * relative * np.einsum("bghtk,bgkd->bghtd", weights, np.abs(values))
    if rounds_to_halves:  # the largest weight is 2^15, so that all are off by at most the second number of it
        tolerance += off_by_halves("bghtk,bgkd->bghtd", weights, np.abs(values), LEAST_HALF / 2**15)
    by_token = [part.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, width) for part in (y, tolerance)]
    return by_token[0], by_token[1]


def off_by_halves(product: str, left: np.ndarray, right: np.ndarray, least: float = LEAST_HALF) -> np.ndarray:
    """How far sums of products, as np.einsum names them, are off whose factors become float16.

    Args:
        product: of left and right.
        left: magnitudes of the left factors.
        right: likewise.
        least: the left factor below which it may become 0.
    """
    rounded = np.einsum(product, left * (1 + HALF) + least, right * (1 + HALF) + LEAST_HALF)
    return np.asarray(rounded - np.einsum(product, left, right))

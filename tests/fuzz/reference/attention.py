# SPDX-License-Identifier: Apache-2.0
"""Bounds of attention, from the operator's reference in float64 and one error bound for all elements; and of RoPE."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu import _native
from flownpu.ops.contracts import contract_of, defaults, input_names
from flownpu.ops.definitions import flow_qkv_attention
from tests.fuzz.arrays import Array, limits
from tests.fuzz.reference.bounds import Bounds, Unknown, rounded, unknown_where

if TYPE_CHECKING:
    from tests.fuzz.reference.evaluate import Node, Table

FLOAT32 = 2.0**-24
# Rounding of queries and weights in prompts on AVX-512 with a bf16 cache (docs/performance.md, Accuracy).
BFLOAT16 = 2.0**-8
NAMES = input_names("FlowQKVAttention")
FLOATS = {port.name for port in contract_of("FlowQKVAttention").inputs if "float" in port.types}
# Inputs that must be known exactly.
TABLES = {"cos_cache", "sin_cache", "q_norm_weight", "k_norm_weight", "head_sink"}
OF_GROUP_QUERY_ATTENTION = next(
    [port.name for port in contract.inputs]
    for contract in _native.contracts()
    if contract.op_type == "GroupQueryAttention"
)


def flow_attention(node: Node) -> list[Bounds | None]:
    inputs = {name: node.optional(i) for i, name in enumerate(NAMES)}
    return attend(inputs, defaults("FlowQKVAttention") | node.attributes)


def group_query_attention(node: Node) -> list[Bounds | None]:
    """Bounds of com.microsoft GroupQueryAttention, whose inputs and attributes mean what FlowQKVAttention's do."""
    attributes = node.attributes
    if node.outputs < 3:
        raise Unknown  # without outputs for keys and values, ONNX Runtime's kernel reads uninitialised memory
    by_name = {name: node.optional(i) for i, name in enumerate(OF_GROUP_QUERY_ATTENTION)}
    if by_name["k_scale"] is not None or by_name["v_scale"] is not None:
        raise Unknown
    if attributes.get("qk_output", 0) or attributes.get("kv_cache_bit_width", 0):
        raise Unknown
    heads, groups = attributes["num_heads"], attributes["kv_num_heads"]
    width = node.input(0).shape[-1]
    known = defaults("FlowQKVAttention")
    given = known | {name: attributes[name] for name in {*known, "num_heads", "kv_num_heads"} & attributes.keys()}
    given["head_size"] = width // (heads if node.has(1) else heads + 2 * groups)
    if not given["head_size"]:
        raise Unknown
    inputs = {name: by_name.get(name) for name in NAMES}
    if attributes.get("smooth_softmax", 0) and inputs["head_sink"] is None:
        zeros = np.zeros(heads)
        inputs["head_sink"] = Bounds(zeros, zeros, np.dtype(np.float32))
    if given["softcap"] < 0 or given["scale"] < 0:
        raise Unknown
    return [*attend(inputs, given), None]


def attend(inputs: dict[str, Bounds | None], attributes: dict[str, Any]) -> list[Bounds | None]:
    """Bounds of output, present key and present value, from FlowQKVAttention's inputs and attributes."""
    middles: dict[str, Any] = dict.fromkeys(inputs)
    radius = 0.0
    for name, value in inputs.items():
        if value is None:
            continue
        if name not in FLOATS:
            middles[name] = value.exact()
            continue
        middle, own = _finite(value)
        if own > 0 and name in TABLES:
            raise Unknown
        radius = max(radius, own)
        middles[name] = middle.astype(value.dtype) if name.startswith("past_") else middle
    given = SimpleNamespace(**middles)
    if given.q_norm_weight is not None and radius > 0:
        raise Unknown
    if any(
        past is not None and past.shape[3] != attributes["head_size"] for past in (given.past_key, given.past_value)
    ):
        raise Unknown  # the operator's ONNX function takes such caches if they have no rows
    batch, tokens = given.query.shape[:2]
    if given.bidirectional_blocks is not None and given.bidirectional_blocks.shape != (batch, tokens):
        raise Unknown
    _check_positions(given, attributes)
    longest = given.total_sequence_length
    first_prompt = longest is None or int(longest.reshape(-1)[0]) == tokens
    if attributes["do_rotary"] and given.position_ids is not None and first_prompt:
        # For a first prompt ONNX Runtime reads only the first position of the first row.
        if not given.position_ids.size:
            raise Unknown
        counted = given.position_ids.reshape(-1)[0] + np.arange(tokens)
        given.position_ids = np.tile(counted, (batch, 1))
    output, key, present_value = flow_qkv_attention.reference(**vars(given), **attributes)
    sizes = _sizes(given, attributes)
    past = inputs["past_key"]
    dtype = np.dtype(np.float32) if past is None else past.dtype
    made = _bounds(output, key, present_value, sizes, radius, dtype, attributes)
    totals = np.full(batch, tokens) if given.seqlens_k is None else given.seqlens_k.reshape(batch) + 1
    padding = np.arange(tokens) >= (totals if first_prompt else np.full(batch, tokens))[:, None]
    kept = np.arange(key.shape[2]) >= totals[:, None]
    unspecified = (padding[:, :, None], kept[:, None, :, None], kept[:, None, :, None])
    if attributes["sliding_window_cache"]:
        return [unknown_where(made[0], np.broadcast_to(padding[:, :, None], made[0].shape)), None, None]
    return [unknown_where(m, np.broadcast_to(u, m.shape)) for m, u in zip(made, unspecified, strict=True)]


def _finite(value: Bounds) -> tuple[Array, float]:
    """The middles of the bounds, and the largest radius. Raises Unknown for infinities and enormous numbers."""
    middle = (value.low + value.high) / 2
    if value.nan is not None or not np.isfinite(middle).all() or np.abs(middle).max(initial=0) > 1e6:
        raise Unknown
    return middle, float((value.high - value.low).max(initial=0)) / 2


def _check_positions(given: SimpleNamespace, attributes: dict[str, Any]) -> None:
    batch, tokens = given.query.shape[:2]
    if given.seqlens_k is not None:
        totals = given.seqlens_k.reshape(-1) + 1
        longest = int(given.total_sequence_length.reshape(-1)[0])
        capacity = 0 if given.past_key is None else given.past_key.shape[2]
        first = longest == tokens
        if len(totals) != batch or totals.max(initial=0) > longest or totals.min(initial=1) < 1 or longest < tokens:
            raise Unknown
        if not first and (totals.min() < tokens or longest - tokens > capacity):
            raise Unknown
    ids = given.position_ids if attributes["do_rotary"] else None
    if ids is not None and (ids.shape != (batch, tokens) or ids.min() < 0):
        raise Unknown


def _sizes(given: SimpleNamespace, attributes: dict[str, Any]) -> tuple[float, float, float]:
    """The largest norms of a query and a key, and the largest value."""
    d, heads, groups = attributes["head_size"], attributes["num_heads"], attributes["kv_num_heads"]
    by_head = given.query.reshape(*given.query.shape[:2], -1, d)
    if given.key is None:
        q, k, v = np.split(by_head, [heads, heads + groups], axis=2)
    else:
        q, k, v = by_head, *(x.reshape(*x.shape[:2], -1, d) for x in (given.key, given.value))

    def norm(x: Array) -> float:
        return float(np.sqrt((np.asarray(x, np.float64) ** 2).sum(-1)).max(initial=0))

    query, key, value = norm(q), norm(k), float(np.abs(v).max(initial=0))
    if given.q_norm_weight is not None:
        query, key = (np.sqrt(d) * float(np.abs(x).max()) for x in (given.q_norm_weight, given.k_norm_weight))
    if given.past_key is not None:
        key = max(key, norm(given.past_key))
        value = max(value, float(np.abs(given.past_value.astype(np.float64)).max(initial=0)))
    return query, key, value


def _bounds(
    output: Array, key: Array, value: Array, sizes: tuple[float, float, float], radius: float, dtype: np.dtype[Any],
    attributes: dict[str, Any],
) -> list[Bounds]:  # fmt: skip
    """Bounds of output, keys and values.

    If every score is off by at most e, every weight is off by a factor within exp(+-2 e), and weights add up to 1. A
    score of d products, of numbers that were rotated and perhaps normalised, is off by (2 d + 16) roundings of the
    product of the norms; by the roundings of bf16 queries and of keys in the cache; and by the inputs' radius.
    """
    d = attributes["head_size"]
    query, key_size, value_size = sizes
    scale = attributes["scale"] or d**-0.5
    cache = float(limits(dtype).eps)
    # A prompt's queries and weights are rounded to bf16 if the cache is, or if there is none (causal = 0).
    rounds = BFLOAT16 if dtype.itemsize == 2 or not attributes["causal"] else 0.0
    slack = (2 * d + 16) * FLOAT32 + rounds + (cache if dtype != np.float32 else rounds)
    wide = radius * np.sqrt(d) * 1.5  # a rotation mixes pairs
    score = scale * (query * key_size * slack + (query + key_size + wide) * wide) + radius
    terms = key.shape[2] + 8
    error = (
        value_size * (np.expm1(min(2 * score, 30.0)) + terms * FLOAT32 + rounds) + value_size * cache + 1.01 * radius
    )
    low, high = output - error, output + error
    made = [rounded(low, high, np.dtype(np.float32))]
    for rows, spread in ((key, 1.5), (value, 1.01)):
        numbers = rows.astype(np.float64)
        own = (
            np.abs(numbers) * (cache + 8 * FLOAT32)
            + spread * radius * (1 + cache)
            + 8 * FLOAT32 * (key_size if spread > 1.1 else 0)
        )
        made.append(rounded(numbers - own, numbers + own, dtype))
    return made


def rotary(node: Node) -> Bounds:
    """com.microsoft RotaryEmbedding."""
    x, ids = node.float(0), node.input(1).exact()
    cos, sin = node.float(2).exact(), node.float(3).exact()
    four = len(x.shape) == 4
    half = cos.shape[1]
    size = node.attributes.get("rotary_embedding_dim", 0)
    heads = node.attributes.get("num_heads", 0)
    d = x.shape[-1] // heads if size and not four else x.shape[-1] if four else 2 * half
    middle, radius = _finite(x)
    if x.shape[-1] % d or not middle.size:
        raise Unknown
    shaped = middle.transpose(0, 2, 1, 3) if four else middle.reshape(*middle.shape[:2], -1, d)
    batch, tokens = shaped.shape[:2]
    positions = (
        ids.reshape(-1)[0] + np.arange(tokens)[None].repeat(batch, 0) if ids.size == 1 else ids.reshape(batch, tokens)
    )
    if positions.min(initial=0) < 0 or positions.max(initial=0) >= len(cos):
        raise Unknown
    c, s = (table[positions][:, :, None] for table in (cos, sin))
    part, rest = shaped[..., : 2 * half], shaped[..., 2 * half :]
    turned = np.concatenate(
        [flow_qkv_attention._rotate(part, c, s, bool(node.attributes.get("interleaved", 0))), rest], -1
    )
    made = turned.transpose(0, 2, 1, 3) if four else turned.reshape(middle.shape)
    error = 2 * np.abs(middle).max(initial=0) * 3 * FLOAT32 + 2 * radius
    return rounded(made - error, made + error, x.dtype)


TABLE: Table = {
    ("ai.flownpu", "FlowQKVAttention"): flow_attention,
    ("ai.flownpu", "FlowKVAttention"): flow_attention,
    ("com.microsoft", "GroupQueryAttention"): group_query_attention,
    ("com.microsoft", "RotaryEmbedding"): rotary,
}

# SPDX-License-Identifier: Apache-2.0
"""Samples of attention, from the operator's reference in float64; and of RoPE."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from flownpu import _native
from flownpu.ops.contracts import contract_of, defaults, input_names
from flownpu.ops.definitions import flow_qkv_attention
from tests.fuzz.arrays import Array, limits
from tests.fuzz.reference.evaluate import Node, Table
from tests.fuzz.reference.products import BFLOAT16
from tests.fuzz.reference.samples import Samples, Unknown, each, of

FLOAT32 = 2.0**-24
NAMES = input_names("FlowQKVAttention")
FLOATS = {port.name for port in contract_of("FlowQKVAttention").inputs if "float" in port.types}
OF_GROUP_QUERY_ATTENTION = next(
    [port.name for port in contract.inputs]
    for contract in _native.contracts()
    if contract.op_type == "GroupQueryAttention"
)


def flow_attention(node: Node) -> list[Samples | None]:
    inputs = {name: node.optional(i) for i, name in enumerate(NAMES)}
    return attend(inputs, defaults("FlowQKVAttention") | node.attributes)


def group_query_attention(node: Node) -> list[Samples | None]:
    """Samples of com.microsoft GroupQueryAttention, whose inputs and attributes mean what FlowQKVAttention's do."""
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
        inputs["head_sink"] = of(np.zeros(heads, np.float32))
    if given["softcap"] < 0 or given["scale"] < 0:
        raise Unknown
    return [*attend(inputs, given), None]


def attend(inputs: dict[str, Samples | None], attributes: dict[str, Any]) -> list[Samples | None]:
    """Samples of output, present key and present value, from FlowQKVAttention's inputs and attributes."""
    known = {
        name: None if value is None else _finite(value) if name in FLOATS else value.exact()
        for name, value in inputs.items()
    }
    given = SimpleNamespace(
        **{name: value.numbers[0] if name in FLOATS and value else value for name, value in known.items()}
    )
    d = attributes["head_size"]
    past = inputs["past_key"]
    dtype = np.dtype(np.float32) if past is None else past.dtype
    if dtype == np.int8 or any(x is not None and x.shape[3] != d for x in (given.past_key, given.past_value)):
        raise Unknown  # the operator's ONNX function takes caches of another width if they have no rows
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
        known["position_ids"] = np.tile(given.position_ids.reshape(-1)[0] + np.arange(tokens), (batch, 1))
    # A prompt's queries, keys and weights are rounded to bf16 if the cache is, or if there is none (causal = 0).
    rounds = BFLOAT16 if dtype.itemsize == 2 or not attributes["causal"] else 0.0
    floats = {name: value for name, value in known.items() if isinstance(value, Samples)}
    # Sums of d products of rotated, perhaps normalised numbers; shaken queries stand for keys' roundings, too.
    sums = (2 * d + 16) * FLOAT32
    for name in ("query", "key", "value"):
        if name in floats:
            error = sums + 2 * rounds if name == "query" else 8 * FLOAT32 if name == "key" else 0.0
            floats[name] = floats[name].shaken(error)
    if given.key is None:  # packed: values of the query tensor are stored as they are
        columns = d * (attributes["num_heads"] + attributes["kv_num_heads"])
        packed = _finite(inputs["query"])
        factor = np.where(np.arange(given.query.shape[2]) < columns, sums, 0)
        factor = np.where(np.arange(given.query.shape[2]) < d * attributes["num_heads"], sums + 2 * rounds, factor)
        floats["query"] = packed.shaken(factor)
    rest = {name: value for name, value in known.items() if name not in floats}

    def once(*arrays: Array) -> list[Array]:
        named = dict(zip(floats, arrays, strict=True))
        for name in ("past_key", "past_value"):
            if name in named:
                named[name] = named[name].astype(dtype)
        return list(flow_qkv_attention.reference(**named, **rest, **attributes))

    output, key, value = each(once, list(floats.values()), np.dtype(np.float32))
    # Weights are rounded, sums of values added up in any order, new rows rounded to the cache's type.
    largest = np.abs(value.numbers.astype(np.float64)).max(initial=0)
    output = output.shaken(absolute=largest * ((key.shape[2] + 8) * FLOAT32 + rounds + float(limits(dtype).eps)))
    made = [output, *(x._replace(dtype=dtype).rounded(0.0 if dtype == np.float32 else 1.0) for x in (key, value))]
    totals = np.full(batch, tokens) if given.seqlens_k is None else given.seqlens_k.reshape(batch) + 1
    padding = np.arange(tokens) >= (totals if first_prompt else np.full(batch, tokens))[:, None]
    kept = np.arange(key.shape[2]) >= totals[:, None]
    unspecified = (padding[:, :, None], kept[:, None, :, None], kept[:, None, :, None])
    made = [m.unknown_where(np.broadcast_to(u, m.shape)) for m, u in zip(made, unspecified, strict=True)]
    return [made[0], None, None] if attributes["sliding_window_cache"] else list(made)


def _finite(value: Samples) -> Samples:
    """The samples. Raises Unknown for infinities and enormous numbers."""
    if not np.isfinite(value.numbers).all() or np.abs(value.numbers).max(initial=0) > 1e6:
        raise Unknown
    return value


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


def rotary(node: Node, *, standard: bool = False) -> Samples:
    """RotaryEmbedding of com.microsoft; and ONNX's, with the inputs in another order."""
    x = node.float(0)
    ids = node.optional(3) if standard else node.input(1)
    cos, sin = (node.float(i if standard else i + 1).exact() for i in (1, 2))
    four = len(x.shape) == 4
    half = cos.shape[-1]
    size = node.attributes.get("rotary_embedding_dim", 0)
    heads = node.attributes.get("num_heads", 0)
    d = x.shape[-1] // heads if size and not four else x.shape[-1] if four else 2 * half
    if x.shape[-1] % d or not x.numbers.size:
        raise Unknown
    batch, tokens = (x.shape[0], x.shape[2]) if four else x.shape[:2]
    if ids is None:
        c, s = (table[:, :, None] for table in (cos, sin))
    else:
        places = ids.exact()
        first = np.arange(tokens)[None].repeat(batch, 0)
        positions = places.reshape(-1)[0] + first if places.size == 1 else places.reshape(batch, tokens)
        if positions.min(initial=0) < 0 or positions.max(initial=0) >= len(cos):
            raise Unknown
        c, s = (table[positions][:, :, None] for table in (cos, sin))

    def once(array: Array) -> Array:
        heads = array.transpose(0, 2, 1, 3) if four else array.reshape(batch, tokens, -1, d)
        turned = flow_qkv_attention._rotate(heads[..., : 2 * half], c, s, bool(node.attributes.get("interleaved", 0)))
        turned = np.concatenate([turned, heads[..., 2 * half :]], -1)
        return turned.transpose(0, 2, 1, 3) if four else turned.reshape(array.shape)

    return _finite(x).shaken(3 * FLOAT32).map(once)


def _bias(mask: Samples, tokens: int, keys: int, causal: bool) -> Samples:
    """A mask of ONNX's Attention as a bias of 4 axes. Raises Unknown if a query sees nothing."""
    numbers = mask.exact()
    if not mask.is_float:
        seen = np.tri(tokens, keys, keys - tokens, dtype=bool) if causal else np.ones((tokens, keys), bool)
        if not (numbers & seen).any(axis=-1).all():
            raise Unknown
        numbers = np.where(numbers, 0, -1e5)  # whose exponential is 0 beside any other
    rows = np.broadcast_to(numbers, (*numbers.shape[:-2], tokens, keys))
    return of(rows.reshape((1,) * (4 - rows.ndim) + rows.shape).astype(np.float32))


def standard_attention(node: Node) -> list[Samples | None]:
    """ONNX's Attention, by FlowQKVAttention's reference where both say the same."""
    attributes = node.attributes
    q, k, v = (node.float(i) for i in range(3))
    if node.has(6) or attributes.get("qk_matmul_output_mode", 0) or (node.has(4) != node.has(5)):
        raise Unknown
    by_head = len(q.shape) == 4
    heads = q.shape[1] if by_head else attributes["q_num_heads"]
    groups = k.shape[1] if by_head else attributes["kv_num_heads"]
    d = q.shape[3] if by_head else q.shape[2] // heads

    def by_token(x: Samples) -> Samples:
        return x.map(lambda a: a.transpose(0, 2, 1, 3).reshape(a.shape[0], a.shape[2], -1)) if by_head else x

    query, key, value = (by_token(x) for x in (q, k, v))
    tokens = query.shape[1]
    if key.shape[1] != tokens or value.shape != key.shape or attributes.get("scale", 1) == 0 or not query.numbers.size:
        raise Unknown
    inputs: dict[str, Samples | None] = dict.fromkeys(NAMES)
    inputs |= {"query": query, "key": key, "value": value, "past_key": node.optional(4), "past_value": node.optional(5)}
    past = 0 if inputs["past_key"] is None else inputs["past_key"].shape[2]
    if past:
        total = past + tokens
        inputs["seqlens_k"] = of(np.full(query.shape[0], total - 1, np.int32))
        inputs["total_sequence_length"] = of(np.array([total], np.int32))
    if (mask := node.optional(3)) is not None:
        inputs["attention_bias"] = _bias(mask, tokens, past + tokens, bool(attributes.get("is_causal", 0)))
    given = defaults("FlowQKVAttention") | {"num_heads": heads, "kv_num_heads": groups, "head_size": d}
    given |= {"scale": attributes.get("scale", 0.0), "softcap": attributes.get("softcap", 0.0)}
    given["causal"] = attributes.get("is_causal", 0)
    output, present_key, present_value = attend(inputs, given)
    assert output is not None
    if by_head:
        shape = (q.shape[0], tokens, heads, d)
        output = output.map(lambda a: a.reshape(shape).transpose(0, 2, 1, 3))
    return [output, present_key, present_value]


TABLE: Table = {
    ("", "Attention"): standard_attention,
    ("ai.flownpu", "FlowQKVAttention"): flow_attention,
    ("ai.flownpu", "FlowKVAttention"): flow_attention,
    ("com.microsoft", "GroupQueryAttention"): group_query_attention,
    ("com.microsoft", "RotaryEmbedding"): rotary,
    ("", "RotaryEmbedding"): partial(rotary, standard=True),
}

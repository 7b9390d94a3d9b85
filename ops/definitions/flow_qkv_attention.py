# SPDX-License-Identifier: Apache-2.0
"""FlowQKVAttention: attention of S new tokens over the KV cache, which it appends to.

For a query head h, with the keys k and values v of its KV head floor(h G / H), positions p of queries and j of keys:

    s(p, j) = softcap(scale q_p . k_j) + attention_bias(p, j)          softcap(x) = c tanh(x / c), or x where c <= 0
    o_p = sum_j exp(s(p, j) - m_p) v_j / (sum_j exp(s(p, j) - m_p) + exp(head_sink_h - m_p)),   m_p = max_j s(p, j)
                                                                           (Gemma3 on NPU, equations 6 to 12)

over the keys j <= p or in p's block (causal), with j > p - local_window_size (sliding-window attention; -1: no window),
or over all keys (causal = 0: non-causal attention). Before that, with norm weights, every head of q and k is
RMS-normalised; then, with do_rotary, rotated by its position. New keys and values are rounded to the cache's type
before anything reads them, so that the result does not depend on how a prompt was split into calls.

With key and value of no tokens [B, 0, G d] the past holds the keys and values of all tokens, those of the queries
included, because the attention of another layer has appended them; there are no presents then.

A block is a run of this call's tokens that see one another in both directions, such as those of a picture. The window
also applies to them: a key is seen if it is in the window, and causal or in the same block, as in the sliding layers of
transformers' Gemma3. Tokens of earlier calls and padding are in no block: if a block is split into several calls, its
first part does not see the second.

Inputs, outputs and attributes: ops/nodes/flow_qkv_attention.h, also for B, S, T, H, G, d and P.
With sliding_window_cache the cache's capacity P is at least W = local_window_size, and for a row of t tokens it holds
the L newest in order: L = t if t <= P, else t - (P - W + 1) ceil((t - P) / (P - W + 1)). Rows behind the last token of
a batch row are unspecified.

Positions: if S = T (a first prompt) the past is empty in every row, else row b has seqlens_k[b] + 1 - S past tokens.
The rows of a ragged batch are padded on the right; the output for padding is unspecified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir

from flownpu.ops.contracts import arguments
from flownpu.ops.definitions.flow_qkv_attention_body import body
from flownpu.ops.definitions.int8_cache import SCALE_BYTES, dequantise_rows, quantise_rows
from flownpu.ops.definitions.onnx_function import build, read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"

NAME = "FlowQKVAttention"
# These inputs are all present or all absent.
PAIRS = (
    ("key", "value"),
    ("past_key", "past_value"),
    ("seqlens_k", "total_sequence_length"),
    ("cos_cache", "sin_cache"),
    ("q_norm_weight", "k_norm_weight"),
)


def features(node: ir.Node) -> list[str]:
    """The variant of a node: which of its inputs and modes change the definition's body.

    Raises:
        ValueError: Attributes or inputs that do not fit together.
    """
    inputs, modes = read(node)
    heads, kv_heads = modes["num_heads"], modes["kv_num_heads"]
    if heads % kv_heads:
        raise ValueError(
            f"[{node.op_type}] expected num_heads to be a multiple of kv_num_heads, got {heads} and {kv_heads} at node "
            f"{node.name!r}"
        )
    has = {name: value is not None for name, value in inputs.items()}
    for pair in PAIRS:
        if has[pair[0]] != has[pair[1]]:
            raise ValueError(f"[{node.op_type}] expected both of {' and '.join(pair)} or neither at node {node.name!r}")
    for need, by, why in (
        (has["seqlens_k"], has["past_key"], "past_key needs seqlens_k and total_sequence_length"),
        (has["cos_cache"], modes["do_rotary"], "do_rotary = 1 needs cos_cache and sin_cache"),
        (
            has["past_key"] and modes["local_window_size"] > 0,
            modes["sliding_window_cache"],
            "sliding_window_cache = 1 needs past_key, past_value and a local_window_size above 0",
        ),
        (modes["local_window_size"] == -1, not modes["causal"], "causal = 0 needs local_window_size = -1"),
        (modes["local_window_size"], True, "local_window_size = 0 lets no token see any: -1 is none"),
    ):
        if by and not need:
            raise ValueError(f"[{node.op_type}] {why}, at node {node.name!r}")
    if _has_no_tokens(inputs["key"]):
        _check_shared(node, has, modes)
    found = {
        "packed": not has["key"],
        "shared": _has_no_tokens(inputs["key"]),
        "norm": has["q_norm_weight"],
        "lengths": has["seqlens_k"],
        "rotary": modes["do_rotary"],
        "partial": modes["do_rotary"] and _turns_a_part(inputs["cos_cache"], modes["head_size"]),
        "positions": modes["do_rotary"] and has["position_ids"],
        "counted": modes["do_rotary"] and has["position_ids"] and modes["counted_prompt"],
        "past": has["past_key"],
        "int8": inputs["past_key"] is not None and inputs["past_key"].dtype == ir.DataType.INT8,
        "bias": has["attention_bias"],
        "windowed": modes["sliding_window_cache"],
        "noncausal": not modes["causal"],
        "sink": has["head_sink"],
        # Without a causal mask all tokens see one another anyway.
        "blocks": modes["causal"] and has["bidirectional_blocks"],
    }
    return [name for name, is_there in found.items() if is_there]


def _check_shared(node: ir.Node, has: Mapping[str, bool], modes: Mapping[str, Any]) -> None:
    """Raises ValueError if a node without keys of its own has what the definition has not beside that."""
    wrong = [name for name in ("attention_bias", "bidirectional_blocks") if has[name]]
    wrong += ["no past_key"] if not has["past_key"] else []
    wrong += ["causal = 0"] if not modes["causal"] else []
    wrong += ["present_key"] if len(node.outputs) > 1 else []
    if wrong:
        raise ValueError(
            f"[{node.op_type}] expected past_key, past_value and causal = 1 beside keys and values of no tokens, and "
            f"no attention_bias, bidirectional_blocks and presents; got {', '.join(wrong)} at node {node.name!r}"
        )


def _has_no_tokens(key: ir.Value | None) -> bool:
    """Whether keys [B, 0, G d] are known to be those of no tokens."""
    return key is not None and key.shape is not None and key.shape.rank() == 3 and key.shape[1] == 0


def _turns_a_part(table: ir.Value | None, head_size: int) -> bool:
    """Whether a table [positions, r/2] is known to be of the first r elements of a head, not of all."""
    half = None if table is None or table.shape is None or table.shape.rank() != 2 else table.shape[1]
    return isinstance(half, int) and 2 * half < head_size


def function(overload: str) -> ir.Function:
    """The definition of one variant; `overload` is its features, joined by "_"."""
    outputs = ("output",) if "shared" in overload.split("_") else None
    return build(NAME, overload, body(overload), outputs)


def helpers(overload: str) -> list[ir.Function]:  # noqa: ARG001  (operators' parameter)
    """Functions that the body calls: none."""
    return []


def reference(*inputs: Array | None, chunk: int = 64, **named: Any) -> tuple[NDArray[np.float64], Array, Array]:
    """Computes the operator in float64, by equations 6 to 12: online softmax over chunks of `chunk` keys.

    Inputs are given in their order or by name, attributes by name. What the operator leaves unspecified is 0 here.

    Returns:
        output [B, S, H d], and present_key and present_value in past's type.
    """
    given = arguments(NAME, inputs, named)
    batch, new, _ = given.query.shape
    by_head = given.query.astype(np.float64).reshape(batch, new, -1, given.head_size)
    if given.key is None or given.value is None:
        q, k, v = np.split(by_head, [given.num_heads, given.num_heads + given.kv_num_heads], axis=2)
    else:
        q, k, v = (
            by_head,
            *(
                a.astype(np.float64).reshape(*a.shape[:2], given.kv_num_heads, given.head_size)
                for a in (given.key, given.value)
            ),
        )
    has_no_keys = k.shape[1] < new
    if given.q_norm_weight is not None and given.k_norm_weight is not None:
        q, k = (_rms_norm(a, w, given.qk_norm_epsilon) for a, w in ((q, given.q_norm_weight), (k, given.k_norm_weight)))
    totals = np.full(batch, new) if given.seqlens_k is None else given.seqlens_k.reshape(batch).astype(int) + 1
    longest = new if given.total_sequence_length is None else int(given.total_sequence_length.reshape(-1)[0])
    pasts = np.zeros(batch, int) if longest == new else totals - new
    if given.do_rotary:
        positions = pasts[:, None] + np.arange(new) if given.position_ids is None else given.position_ids
        if given.position_ids is not None and given.counted_prompt and longest == new:
            positions = np.tile(given.position_ids[:1, :1] + np.arange(new), (batch, 1))
        cos, sin = (table.astype(np.float64)[positions][:, :, None] for table in (given.cos_cache, given.sin_cache))
        q, k = (_rotate(a, cos, sin, bool(given.rotary_interleaved)) if a.size else a for a in (q, k))

    empty = np.zeros((batch, given.kv_num_heads, 0, given.head_size), np.float32)
    past_key, past_value = (empty if past is None else past for past in (given.past_key, given.past_value))
    past_capacity = past_key.shape[2]
    capacity = past_capacity if given.sliding_window_cache else max(past_capacity, longest)
    output = np.zeros((batch, new, given.num_heads, given.head_size))
    columns = given.head_size + (SCALE_BYTES if past_key.dtype == np.int8 else 0)
    present = [np.zeros((batch, given.kv_num_heads, capacity, columns), past_key.dtype) for _ in range(2)]
    for b, (total, past) in enumerate(zip(totals, pasts, strict=True)):
        # All keys of this row that the cache still holds, which begin with position `first`, and the new ones.
        held = total if has_no_keys else past
        resident = resident_tokens(held, past_capacity, given.local_window_size) if given.sliding_window_cache else held
        first = held - resident
        keys, values = (
            np.concatenate([cache[b, :, :resident], _stored(fresh[b].swapaxes(0, 1), cache.dtype)], axis=1)[
                :, : total - first
            ]
            for cache, fresh in ((past_key, k), (past_value, v))
        )
        query_positions = past + np.arange(new)[:, None]
        key_positions = first + np.arange(total - first)
        visible = key_positions <= (query_positions if given.causal else total + 0 * query_positions)
        if given.bidirectional_blocks is not None:
            blocks = np.concatenate([np.zeros(past - first, int), given.bidirectional_blocks[b, : total - past]])
            visible |= (blocks == given.bidirectional_blocks[b][:, None]) & (blocks > 0)
        if given.local_window_size > 0:
            visible &= key_positions > query_positions - given.local_window_size
        addend = np.zeros((given.num_heads, new, total - first))
        if given.attention_bias is not None:
            addend += given.attention_bias[b % given.attention_bias.shape[0], :, :, first:total]
        output[b] = _online_softmax(
            q[b].swapaxes(0, 1),
            keys,
            values,
            np.where(visible, addend, -np.inf),
            given.scale or given.head_size**-0.5,
            given.softcap,
            given.head_sink,
            chunk,
        ).swapaxes(0, 1)
        kept = resident_tokens(total, capacity, given.local_window_size) if given.sliding_window_cache else total
        for cache, rows in zip(present, (keys, values), strict=True):
            cache[b, :, :kept] = rows[:, rows.shape[1] - kept :]
    return output.reshape(batch, new, -1), present[0], present[1]


def _stored(x: Array, dtype: Any) -> Array:
    """Rows [.., d] converted to a cache's type; with int8 to rows of codes and scale [.., d + 4]."""
    return quantise_rows(x) if dtype == np.int8 else x.astype(dtype)


def resident_tokens(tokens: int, capacity: int, window: int) -> int:
    """L(T): how many of `tokens` positions a window-sized cache of that capacity holds, always the newest.

    When the cache is full, the `capacity - window + 1` oldest positions are dropped at once.
    """
    dropped_at_once = capacity - window + 1
    return tokens if tokens <= capacity else tokens - dropped_at_once * -(-(tokens - capacity) // dropped_at_once)


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight.astype(np.float64))


def _rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotates the pairs (x1, x2) of every head [..., d] by the angles of cos and sin [..., d/2]."""
    half = x.shape[-1] // 2
    x1, x2 = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    rotated = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return np.stack(rotated, axis=-1).reshape(x.shape) if interleaved else np.concatenate(rotated, axis=-1)


def _online_softmax(
    q: Array, keys: Array, values: Array, addend: Array, scale: float, softcap: float, sink: Array | None, chunk: int
) -> Array:
    """Attention in one batch row: q [H, S, d], keys, values [G, J, d], addend [H, S, J] (-inf: masked) -> [H, S, d]."""
    heads, new, head_size = q.shape
    keys, values = (
        (dequantise_rows(a) if a.dtype == np.int8 else a).astype(np.float64)[:, None] for a in (keys, values)
    )  # [G, 1, J, d]
    groups = (len(keys), heads // len(keys), new, -1)  # the heads that share keys are an axis of their own
    q, addend = q.reshape(groups), addend.reshape(groups)
    # A sink is a key with value 0, which is processed before all others.
    unseen = np.full(heads, -np.inf) if sink is None else sink.astype(np.float64)
    m_left = np.broadcast_to(unseen[:, None, None], (heads, new, 1)).reshape(groups)
    l_left = np.full(m_left.shape, float(sink is not None))
    y_left = np.zeros(q.shape)
    for first in range(0, keys.shape[2], chunk):
        part = slice(first, first + chunk)
        s = scale * q @ keys[:, :, part].swapaxes(2, 3)  # (6)
        s = (softcap * np.tanh(s / softcap) if softcap > 0 else s) + addend[..., part]
        m = np.maximum(s.max(axis=-1, keepdims=True), m_left)  # (7)
        shift = np.where(np.isfinite(m), m, 0.0)  # -inf: no key was visible so far
        f = np.exp(s - shift)  # (8)
        c = np.exp(m_left - shift)  # (9)
        l_left = c * l_left + f.sum(axis=-1, keepdims=True)  # (10)
        y_left = c * y_left + f @ values[:, :, part]  # (11)
        m_left = m
    output: Array = np.divide(y_left, l_left, out=np.zeros_like(y_left), where=l_left > 0)  # (12)
    return output.reshape(heads, new, head_size)

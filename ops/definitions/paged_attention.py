# SPDX-License-Identifier: Apache-2.0
"""PagedAttention: attention of the new tokens of several sequences in one call, over a KV cache in blocks.

Each token attends as in FlowQKVAttention (causal, with or without a window): QK-norm and RoPE of every head at the
token's position, keys and values rounded to the cache's type before anything reads them, and

    o_p = sum_j exp(s(p, j) - m_p) v_j / sum_j exp(s(p, j) - m_p),   s(p, j) = softcap(scale q_p . k_j),
    m_p = max_j s(p, j)                                              (Gemma3 on NPU, equations 6 to 12)

over the keys j <= p of the token's own sequence, with j > p - local_window_size if there is a window. The new tokens of
all sequences are concatenated; those of a sequence may be a whole prompt, a part of one, or the token that was
generated last. A token's output does not depend on the other sequences of the call, nor on how its own sequence was
split into calls.

The key and value of position j of sequence b are in row j % S of block block_table[b, j // S]; new ones are written
there. Sequences may share blocks that they only read, those of a common prefix. This follows ORT GenAI's contract for
paged models.

Inputs, outputs and attributes: ops/nodes/paged_attention.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from flownpu.ops.definitions import flow_qkv_attention
from flownpu.ops.definitions.flow_qkv_attention_body import NO_NORM, NO_ROTARY, NORM, ROTARY, SCORES, WEIGHTS
from flownpu.ops.definitions.onnx_function import build, read

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"

NAME = "PagedAttention"

# The sequence of each token, and the token's position in its sequence, [N].
_POSITIONS = """
    minus_one = Constant <value_ints = [-1]> ()
    zero = Constant <value_ints = [0]> ()
    axis_0 = Constant <value_ints = [0]> ()
    axis_1 = Constant <value_ints = [1]> ()
    axis_2 = Constant <value_ints = [2]> ()
    first = Constant <value = int64 {0}> ()
    step = Constant <value = int64 {1}> ()
    no_axes = Constant <value = int64[0] {}> ()
    new_tokens_1 = Shape <start = 0, end = 1> (query)
    new_tokens = Reshape (new_tokens_1, no_axes)
    token = Range (first, new_tokens, step)
    boundaries = Cast <to = 7> (cumulative_sequence_lengths)
    last_boundary = Constant <value_ints = [9223372036854775807]> ()
    ends = Slice (boundaries, axis_1, last_boundary)
    token_column = Unsqueeze (token, axis_1)
    is_behind = GreaterOrEqual (token_column, ends)
    ends_behind = Cast <to = 7> (is_behind)
    sequence = ReduceSum <keepdims = 0> (ends_behind, axis_1)
    start = Gather (boundaries, sequence)
    place = Sub (token, start)
    pasts = Cast <to = 7> (past_sequence_lengths)
    past = Gather (pasts, sequence)
    position = Add (past, place)
    positions = Unsqueeze (position, axis_0)
"""
# Queries, keys and values, [1, N, heads, d], under the names that the parts of FlowQKVAttention's body use.
_HEADS = """
    num_heads_scalar = Constant <value_int: int = @num_heads> ()
    kv_num_heads_scalar = Constant <value_int: int = @kv_num_heads> ()
    head_size_scalar = Constant <value_int: int = @head_size> ()
    query_heads = Reshape (num_heads_scalar, minus_one)
    kv_heads = Reshape (kv_num_heads_scalar, minus_one)
    channels = Reshape (head_size_scalar, minus_one)
    by_head = Concat <axis = 0> (axis_1, new_tokens_1, minus_one, channels)
    by_token = Concat <axis = 0> (axis_1, new_tokens_1, minus_one)
    all_heads = Reshape (query, by_head)
    split = Concat <axis = 0> (query_heads, kv_heads, kv_heads)
    q0, k0, v0 = Split <axis = 2> (all_heads, split)
"""
_FLAT = """
    q2 = Reshape (q1, by_token)
    k2 = Reshape (k1, by_token)
"""
# Writes the new rows to the caches as rows [P S, G, d], in float32, because not every build of ONNX Runtime has
# ScatterND for bfloat16. Casting the old rows to float32 and back does not change them.
_STORE = """
    rows_1 = Shape <start = 1, end = 2> (key_cache)
    rows = Reshape (rows_1, no_axes)
    block_column = Div (position, rows)
    row_in_block = Mod (position, rows)
    table = Cast <to = 7> (block_table)
    sequence_column = Unsqueeze (sequence, axis_1)
    block_column_1 = Unsqueeze (block_column, axis_1)
    at = Concat <axis = 1> (sequence_column, block_column_1)
    block = GatherND (table, at)
    block_start = Mul (block, rows)
    row = Add (block_start, row_in_block)
    row_column = Unsqueeze (row, axis_1)
    by_row = Concat <axis = 0> (minus_one, kv_heads, channels)
    k_rows = Reshape (k3, by_row)
    v_rows = Reshape (v0, by_row)
    k_stored = CastLike (k_rows, key_cache)
    v_stored = CastLike (v_rows, value_cache)
    k_new = Cast <to = 1> (k_stored)
    v_new = Cast <to = 1> (v_stored)
    k_before_4 = Cast <to = 1> (key_cache)
    v_before_4 = Cast <to = 1> (value_cache)
    k_before = Reshape (k_before_4, by_row)
    v_before = Reshape (v_before_4, by_row)
    k_cache = ScatterND (k_before, row_column, k_new)
    v_cache = ScatterND (v_before, row_column, v_new)
    cache_shape = Shape (key_cache)
    k_out = Reshape (k_cache, cache_shape)
    v_out = Reshape (v_cache, cache_shape)
    key_cache_out = CastLike (k_out, key_cache)
    value_cache_out = CastLike (v_out, value_cache)
"""
# For each token, reads all rows of the blocks in its sequence's row of the table, [N, M S]: a key's index there is its
# position. Rows that the token does not see may hold anything, so their values are replaced by 0.
_READ = """
    zero_float = Constant <value = float {0}> ()
    token_table = Gather (table, sequence)
    named = Max (token_table, first)
    named_start = Mul (named, rows)
    named_start_column = Unsqueeze (named_start, axis_2)
    block_rows = Range (first, rows, step)
    named_rows_3 = Add (named_start_column, block_rows)
    flat = Concat <axis = 0> (zero, minus_one)
    named_rows = Reshape (named_rows_3, flat)
    places_1 = Shape <start = 1, end = 2> (named_rows)
    places = Reshape (places_1, no_axes)
    key_position = Range (first, places, step)
    position_column = Unsqueeze (position, axis_1)
    is_before = LessOrEqual (key_position, position_column)
    window = Constant <value_int: int = @local_window_size> ()
    out_of_window = Sub (position_column, window)
    is_near = Greater (key_position, out_of_window)
    has_no_window = Less (window, step)
    is_in_window = Or (is_near, has_no_window)
    is_visible = And (is_before, is_in_window)
    axes_1_2_3 = Constant <value_ints = [1, 2, 3]> ()
    visible = Unsqueeze (is_visible, axes_1_2_3)
    q_shape = Concat <axis = 0> (new_tokens_1, kv_heads, minus_one, axis_1, channels)
    q_group = Reshape (q3, q_shape)
    k_read = Gather (k_cache, named_rows)
    v_read = Gather (v_cache, named_rows)
    k_by_group = Transpose <perm = [0, 2, 1, 3]> (k_read)
    v_by_group = Transpose <perm = [0, 2, 1, 3]> (v_read)
    keys = Unsqueeze (k_by_group, axis_2)
    v_group = Unsqueeze (v_by_group, axis_2)
    axes_1_2_4 = Constant <value_ints = [1, 2, 4]> ()
    visible_values = Unsqueeze (is_visible, axes_1_2_4)
    values = Where (visible_values, v_group, zero_float)
"""
_NO_BIAS = """
    s1 = Identity (s0)
"""
_OUTPUT = """
    output = Reshape (o_alone, flat)
"""


def features(node: ir.Node) -> list[str]:
    """The variant of a node: which of its inputs and modes change the definition's body.

    Raises:
        ValueError: Attributes or inputs that do not fit together.
    """
    inputs, attributes = read(node)
    has = {name: value is not None for name, value in inputs.items()}
    heads, kv_heads, rotary = (attributes[name] for name in ("num_heads", "kv_num_heads", "do_rotary"))
    for is_wrong, expected in (
        (heads % kv_heads, f"num_heads to be a multiple of kv_num_heads, got {heads} and {kv_heads}"),
        (has["q_norm_weight"] != has["k_norm_weight"], "both of q_norm_weight and k_norm_weight or neither"),
        (rotary and not (has["cos_cache"] and has["sin_cache"]), "cos_cache and sin_cache with do_rotary = 1"),
        (attributes["local_window_size"] == 0, "local_window_size above 0, or -1 for none, got 0"),
    ):
        if is_wrong:
            raise ValueError(f"[{NAME}] expected {expected}, at node {node.name!r}")
    return [name for name, is_there in (("norm", has["q_norm_weight"]), ("rotary", rotary)) if is_there]


def function(overload: str) -> ir.Function:
    """The definition of one variant; `overload` is its features, joined by "_"."""
    found = set(overload.split("_"))
    parts = [
        _POSITIONS,
        _HEADS,
        NORM if "norm" in found else NO_NORM,
        _FLAT,
        ROTARY if "rotary" in found else NO_ROTARY,
    ]
    parts += [_STORE, _READ, SCORES, _NO_BIAS, WEIGHTS, _OUTPUT]
    return build(NAME, overload, "".join(parts))


def helpers(overload: str) -> list[ir.Function]:  # noqa: ARG001  (operators' parameter)
    """Functions that the body calls: none."""
    return []


def reference(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    cumulative_sequence_lengths: Array,
    past_sequence_lengths: Array,
    block_table: Array,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    q_norm_weight: Array | None = None,
    k_norm_weight: Array | None = None,
    *,
    kv_num_heads: int,
    head_size: int,
    **attributes: Any,
) -> tuple[NDArray[np.float64], Array, Array]:
    """Computes the operator in float64: for each sequence in turn, FlowQKVAttention over its blocks.

    Returns:
        output [N, H d], and the caches in their type.
    """
    rows = key_cache.shape[1]
    caches = [key_cache.copy(), value_cache.copy()]
    outputs = []
    for b, (past, first, end) in enumerate(
        zip(past_sequence_lengths, cumulative_sequence_lengths, cumulative_sequence_lengths[1:], strict=False)
    ):
        total = int(past) + int(end - first)
        used = block_table[b, : -(-total // rows)]
        held = [c[used].reshape(1, -1, kv_num_heads, head_size).swapaxes(1, 2)[:, :, :past] for c in caches]
        output, *present = flow_qkv_attention.reference(
            query[None, first:end],
            None,
            None,
            held[0],
            held[1],
            np.array([total - 1], np.int32),
            np.array([total], np.int32),
            cos_cache,
            sin_cache,
            None,
            None,
            q_norm_weight,
            k_norm_weight,
            kv_num_heads=kv_num_heads,
            head_size=head_size,
            **attributes,
        )
        outputs.append(output[0])
        for cache, kept in zip(caches, present, strict=True):
            for position in range(past, total):
                cache[used[position // rows], position % rows] = kept[0, :, position]
    return np.concatenate(outputs), caches[0], caches[1]

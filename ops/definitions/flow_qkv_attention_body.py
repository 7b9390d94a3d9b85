# SPDX-License-Identifier: Apache-2.0
"""The body of FlowQKVAttention's definition in ONNX's textual syntax, which stock ONNX Runtime runs.

PagedAttention's definition uses the parts whose names do not begin with an underscore.
"""

import re

from flownpu.ops.definitions.int8_cache import dequantised, quantised

# The steps of the body. q0..q3, k0..k4 and v0..v4 are the queries, keys and values after successive steps.
_SHAPES = """
    minus_one = Constant <value_ints = [-1]> ()
    zero = Constant <value_ints = [0]> ()
    num_heads_scalar = Constant <value_int: int = @num_heads> ()
    kv_num_heads_scalar = Constant <value_int: int = @kv_num_heads> ()
    head_size_scalar = Constant <value_int: int = @head_size> ()
    query_heads = Reshape (num_heads_scalar, minus_one)
    kv_heads = Reshape (kv_num_heads_scalar, minus_one)
    channels = Reshape (head_size_scalar, minus_one)
    tokens = Constant <value_ints = [{tokens}]> ()
    by_head = Concat <axis = 0> (zero, tokens, minus_one, channels)
    by_token = Concat <axis = 0> (zero, tokens, minus_one)
"""
_PACKED = """
    all_heads = Reshape (query, by_head)
    split = Concat <axis = 0> (query_heads, kv_heads, kv_heads)
    q0, k0, v0 = Split <axis = 2> (all_heads, split)
"""
_SEPARATE = """
    q0 = Reshape (query, by_head)
    k0 = Reshape (key, by_head)
    v0 = Reshape (value, by_head)
"""
# ONNX Runtime 1.31.1 crashes on a SimplifiedLayerNormalization in a function if stash_type is left to its default.
NORM = """
    q1 = SimplifiedLayerNormalization <axis = -1, stash_type = 1, epsilon: float = @qk_norm_epsilon> (q0, q_norm_weight)
    k1 = SimplifiedLayerNormalization <axis = -1, stash_type = 1, epsilon: float = @qk_norm_epsilon> (k0, k_norm_weight)
"""
NO_NORM = """
    q1 = Identity (q0)
    k1 = Identity (k0)
"""
_FLAT = """
    q2 = Reshape (q1, by_token)
    k2 = Reshape (k1, by_token)
    v2 = Reshape (v0, by_token)
    new64 = Shape <start = 1, end = 2> (q2)
    new = Cast <to = 6> (new64)
"""
_LENGTHS = """
    lengths = Reshape (seqlens_k, minus_one)
    total = Reshape (total_sequence_length, minus_one)
"""
# Max of one value instead of Identity: if S is known, ONNX's shape inference propagates its value from Shape as int64
# even through a Cast, and the inference of GroupQueryAttention fails on that type. It does not propagate values through
# Max.
_NO_LENGTHS = """
    batch = Shape <start = 0, end = 1> (q2)
    one = Constant <value = int32 {1}> ()
    last = Sub (new, one)
    lengths = Expand (last, batch)
    total = Max (new)
"""
# The number of past tokens of each row, [batch, 1], and the offsets of the new tokens from there, [tokens].
_PAST_TOKENS = """
    one32 = Constant <value = int32[1] {1}> ()
    is_first_prompt = Equal (new, total)
    so_far = Add (lengths, one32)
    before = Sub (so_far, new)
    nothing = Sub (new, new)
    past_tokens = Where (is_first_prompt, nothing, before)
    past_tokens64 = Cast <to = 7> (past_tokens)
    column_shape = Constant <value_ints = [-1, 1]> ()
    past_column = Reshape (past_tokens64, column_shape)
    start = Constant <value = int64 {0}> ()
    step = Constant <value = int64 {1}> ()
    empty_shape = Constant <value = int64[0] {}> ()
    new_scalar = Reshape (new64, empty_shape)
    offsets = Range (start, new_scalar, step)
"""
_POSITIONS = """
    positions = Add (past_column, offsets)
"""
# The given positions. For a first prompt with counted_prompt, the first given position and its successors.
_GIVEN_POSITIONS = """
    positions = Identity (position_ids)
"""
_COUNTED_POSITIONS = """
    origin = Constant <value_ints = [0, 0]> ()
    first_end = Constant <value_ints = [1, 1]> ()
    first_position = Slice (position_ids, origin, first_end)
    counted_positions = Add (first_position, offsets)
    positions = Where (is_first_prompt, counted_positions, position_ids)
"""
ROTARY = """
    q3 = com.microsoft.RotaryEmbedding <interleaved: int = @rotary_interleaved> (q2, positions, cos_cache, sin_cache)
    k3 = com.microsoft.RotaryEmbedding <interleaved: int = @rotary_interleaved> (k2, positions, cos_cache, sin_cache)
"""
# The same for the first r elements of each head, where tables are [positions, r/2].
PARTIAL_ROTARY = """
    half_turned = Shape <start = 1, end = 2> (cos_cache)
    turned = Add (half_turned, half_turned)
    first_element = Constant <value_ints = [0]> ()
    elements = Constant <value_ints = [3]> ()
    turned_by_head = Concat <axis = 0> (zero, zero, minus_one, turned)
""" + "".join(
    f"""
    {x}_heads = Reshape ({x}2, by_head)
    {x}_first = Slice ({x}_heads, first_element, turned, elements)
    {x}_rest = Slice ({x}_heads, turned, channels, elements)
    {x}_flat = Reshape ({x}_first, by_token)
    {x}_turned = com.microsoft.RotaryEmbedding <interleaved: int = @rotary_interleaved>
        ({x}_flat, positions, cos_cache, sin_cache)
    {x}_turned_heads = Reshape ({x}_turned, turned_by_head)
    {x}_whole = Concat <axis = 3> ({x}_turned_heads, {x}_rest)
    {x}3 = Reshape ({x}_whole, by_token)
"""
    for x in "qk"
)
NO_ROTARY = """
    q3 = Identity (q2)
    k3 = Identity (k2)
"""
# Rounds keys and values by a Cast to the cache's type, and casts them and the past back to float32, because
# GroupQueryAttention's CPU kernels have no bfloat16.
_CAST = """
    k_stored = CastLike (k3, past_key)
    v_stored = CastLike (v2, past_value)
    k4 = Cast <to = 1> (k_stored)
    v4 = Cast <to = 1> (v_stored)
    past_k32 = Cast <to = 1> (past_key)
    past_v32 = Cast <to = 1> (past_value)
"""
# The same for an int8 cache: quantises and dequantises each head's row.
_INT8 = "".join(
    [
        """
    k_heads = Reshape (k3, by_head)
    v_heads = Reshape (v2, by_head)
""",
        *(quantised(f"{part}_heads", f"{part}_stored") for part in "kv"),
        *(dequantised(f"{part}_stored", f"{part}_rounded") for part in "kv"),
        """
    k4 = Reshape (k_rounded, by_token)
    v4 = Reshape (v_rounded, by_token)
""",
        dequantised("past_key", "past_k32"),
        dequantised("past_value", "past_v32"),
    ]
)
# ONNX Runtime takes the capacities of past and present for equal if their symbolic names are, and would put a present
# that grows into the memory of the cast past. A dimension that Reshape infers from -1 has no name, which prevents that.
_PAST = """
    cache_shape = Concat <axis = 0> (zero, zero, minus_one, channels)
    past_k = Reshape (past_k32, cache_shape)
    past_v = Reshape (past_v32, cache_shape)
"""
# GroupQueryAttention's CPU kernel can continue a prompt (S > 1 after a past) only for a batch of 1. The operator can
# for any batch.
_ATTENTION = """
    {output}, present_k, present_v = com.microsoft.GroupQueryAttention <
        num_heads: int = @num_heads, kv_num_heads: int = @kv_num_heads, scale: float = @scale,
        softcap: float = @softcap, local_window_size: int = @local_window_size{more}
    > ({inputs})
"""
_PRESENT = """
    present_key = CastLike (present_k, past_key)
    present_value = CastLike (present_v, past_value)
"""
# Quantising rows that came out of an int8 cache gives the same rows again.
_INT8_PRESENT = quantised("present_k", "present_key") + quantised("present_v", "present_value")
_NO_PRESENT = """
    present_key = Identity (present_k)
    present_value = Identity (present_v)
"""

# With bidirectional blocks GroupQueryAttention only appends to the cache, because it has no such mask. The output is
# computed here, over the P rows of the past, of which the first L hold tokens, and over the new keys after them. A
# key's place is its position relative to the first new token: -L .. -1 in the past.
_BLOCK_HEADS = """
    by_group = Concat <axis = 0> (zero, zero, kv_heads, minus_one, channels)
    q_split = Reshape (q3, by_group)
    k_split = Reshape (new_k, by_group)
    v_split = Reshape (new_v, by_group)
    q_group = Transpose <perm = [0, 2, 3, 1, 4]> (q_split)
    k_group = Transpose <perm = [0, 2, 3, 1, 4]> (k_split)
    v_group = Transpose <perm = [0, 2, 3, 1, 4]> (v_split)
    axis_1 = Constant <value_ints = [1]> ()
    axis_2 = Constant <value_ints = [2]> ()
    axes_1_2 = Constant <value_ints = [1, 2]> ()
    zero64 = Constant <value = int64 {0}> ()
    zero32 = Constant <value = int32 {0}> ()
    zero_float = Constant <value = float {0}> ()
    window = Constant <value_int: int = @local_window_size> ()
    no_places = Sub (past_column, past_column)
    new_places = Add (no_places, offsets)
    past_row_tokens = Sub (so_far, past_tokens)
    row_tokens64 = Cast <to = 7> (past_row_tokens)
    row_tokens = Reshape (row_tokens64, column_shape)
    is_in_row = Less (new_places, row_tokens)
    new_blocks = Where (is_in_row, bidirectional_blocks, zero32)
"""
# `held` is L: all past tokens, or those that a window-sized cache holds.
_ALL_HELD = """
    held = Identity (past_column)
"""
_WINDOW_HELD = """
    slack = Sub (capacity, window)
    dropped_at_once = Add (slack, step)
    beyond = Sub (past_column, capacity)
    beyond_and_more = Add (beyond, slack)
    at_least_0 = Max (beyond_and_more, zero64)
    times = Div (at_least_0, dropped_at_once)
    dropped = Mul (times, dropped_at_once)
    held = Sub (past_column, dropped)
"""
_BLOCK_CAPACITY = """
    capacity_1 = Shape <start = 2, end = 3> (past_key)
    capacity = Reshape (capacity_1, empty_shape)
"""
# The contents behind the L rows are unspecified: no query sees them, and their values are replaced by 0.
_BLOCK_PAST = """
    past_rows = Range (start, capacity, step)
    past_places = Sub (past_rows, held)
    is_held = Less (past_places, zero64)
    never = Constant <value = int64 {4611686018427387904}> ()
    held_places = Where (is_held, past_places, never)
    places = Concat <axis = 1> (held_places, new_places)
    no_places32 = Cast <to = 6> (past_places)
    no_blocks = Mul (no_places32, zero32)
    key_blocks = Concat <axis = 1> (no_blocks, new_blocks)
    past_k_group = Unsqueeze (past_k, axis_2)
    keys = Concat <axis = 3> (past_k_group, k_group)
    past_v_group = Unsqueeze (past_v, axis_2)
    held_column_shape = Constant <value_ints = [0, 1, 1, -1, 1]> ()
    held_0 = Unsqueeze (is_held, axes_1_2)
    held_column = Reshape (held_0, held_column_shape)
    past_v_held = Where (held_column, past_v_group, zero_float)
    values = Concat <axis = 3> (past_v_held, v_group)
"""
_BLOCK_NO_PAST = """
    places = Identity (new_places)
    key_blocks = Identity (new_blocks)
    keys = Identity (k_group)
    values = Identity (v_group)
"""
_BLOCK_MASK = """
    query_places = Unsqueeze (offsets, axis_1)
    key_places = Unsqueeze (places, axis_1)
    is_before = LessOrEqual (key_places, query_places)
    query_block = Unsqueeze (bidirectional_blocks, axis_2)
    key_block = Unsqueeze (key_blocks, axis_1)
    is_same = Equal (query_block, key_block)
    is_block = Greater (query_block, zero32)
    is_in_block = And (is_same, is_block)
    is_ahead_or_before = Or (is_before, is_in_block)
    out_of_window = Sub (query_places, window)
    is_near = Greater (key_places, out_of_window)
    has_no_window = Less (window, step)
    is_in_window = Or (is_near, has_no_window)
    is_visible = And (is_ahead_or_before, is_in_window)
    visible = Unsqueeze (is_visible, axes_1_2)
"""
SCORES = """
    given_scale = Constant <value_float: float = @scale> ()
    head_size_float = Cast <to = 1> (head_size_scalar)
    root = Sqrt (head_size_float)
    default_scale = Reciprocal (root)
    is_default = Equal (given_scale, zero_float)
    used_scale = Where (is_default, default_scale, given_scale)
    keys_across = Transpose <perm = [0, 1, 2, 4, 3]> (keys)
    products = MatMul (q_group, keys_across)
    scaled = Mul (products, used_scale)
    cap = Constant <value_float: float = @softcap> ()
    is_capped = Greater (cap, zero_float)
    one_float = Constant <value = float {1}> ()
    divisor = Where (is_capped, cap, one_float)
    quotient = Div (scaled, divisor)
    bent = Tanh (quotient)
    capped = Mul (bent, divisor)
    s0 = Where (is_capped, capped, scaled)
"""
# Gathers attention_bias, whose columns are positions, for each key.
_BLOCK_BIAS = """
    at = Add (places, past_column)
    last_total = Sub (total, one32)
    last_total64 = Cast <to = 7> (last_total)
    at_most = Min (at, last_total64)
    columns_1 = Unsqueeze (at_most, axes_1_2)
    rows_shape = Shape <start = 0, end = 1> (q2)
    key_count = Shape <start = 1, end = 2> (places)
    bias_shape = Concat <axis = 0> (rows_shape, query_heads, new64, axis_1)
    wide_bias = Expand (attention_bias, bias_shape)
    columns_shape = Concat <axis = 0> (rows_shape, query_heads, new64, key_count)
    columns = Expand (columns_1, columns_shape)
    bias_by_key = GatherElements <axis = 3> (wide_bias, columns)
    bias_group_shape = Concat <axis = 0> (rows_shape, kv_heads, minus_one, new64, key_count)
    bias_by_group = Reshape (bias_by_key, bias_group_shape)
    s1 = Add (s0, bias_by_group)
"""
_BLOCK_NO_BIAS = """
    s1 = Identity (s0)
"""
WEIGHTS = """
    lowest = Constant <value = float {-3.4028235e38}> ()
    s2 = Where (visible, s1, lowest)
    weights = Softmax <axis = -1> (s2)
    o_alone = MatMul (weights, values)
"""
# Scales the output by the share that the sink leaves to the keys: l / (l + e^sink) = sigmoid(log l - sink).
_BLOCK_SINK = """
    last_axis = Constant <value_ints = [-1]> ()
    log_sum = ReduceLogSumExp <keepdims = 1> (s2, last_axis)
    one_each = Constant <value_ints = [1, 1]> ()
    sink_shape = Concat <axis = 0> (kv_heads, minus_one, one_each)
    sink_by_group = Reshape (head_sink, sink_shape)
    beyond_sink = Sub (log_sum, sink_by_group)
    share = Sigmoid (beyond_sink)
    o_group = Mul (o_alone, share)
"""
_BLOCK_NO_SINK = """
    o_group = Identity (o_alone)
"""
_BLOCK_OUTPUT = """
    o_split = Transpose <perm = [0, 3, 1, 2, 4]> (o_group)
    output = Reshape (o_split, by_token)
"""


def body(overload: str, tokens: int = 0) -> str:
    """The statements of one variant's definition, in ONNX's textual syntax.

    Args:
        overload: The variant's features, joined by "_".
        tokens: The only number of new tokens S that the variant takes; 0 for any.
    """
    found = set(overload.split("_"))
    past = "past" in found
    positions = _COUNTED_POSITIONS if "counted" in found else _GIVEN_POSITIONS if "positions" in found else _POSITIONS
    needs_past = positions != _GIVEN_POSITIONS and "rotary" in found
    # For a single token blocks change nothing.
    has_blocks = "blocks" in found and tokens != 1
    k, v = ("k4", "v4") if past else ("k3", "v2")
    inputs = ["q3", k, v, *(("past_k", "past_v") if past else ("", ""))]
    inputs += ["lengths", "total"]
    inputs += ["", "", "", "attention_bias" if "bias" in found else "", "head_sink" if "sink" in found else ""]
    while not inputs[-1]:
        inputs.pop()
    # Attributes that older releases of ONNX Runtime do not know are only written where they are needed.
    more = (", sliding_window_cache = 1" if "windowed" in found else "") + (
        ", causal = 0" if "noncausal" in found else ""
    )
    if "shared" in found:
        return _of_queries(found)
    return "\n".join(
        [
            _SHAPES.format(tokens=tokens),
            _PACKED if "packed" in found else _SEPARATE,
            NORM if "norm" in found else NO_NORM,
            _FLAT,
            _LENGTHS if "lengths" in found else _NO_LENGTHS,
            _PAST_TOKENS if has_blocks or needs_past else "",
            positions + (PARTIAL_ROTARY if "partial" in found else ROTARY) if "rotary" in found else NO_ROTARY,
            (_INT8 if "int8" in found else _CAST) + _PAST if past else "",
            _ATTENTION.format(output="causal_output" if has_blocks else "output", inputs=", ".join(inputs), more=more),
            _block_attention(found, k, v) if has_blocks else "",
            (_INT8_PRESENT if "int8" in found else _PRESENT) if past else _NO_PRESENT,
        ]
    )


def _of_queries(found: set[str]) -> str:
    """The body where the past holds all keys: the statements that are not about those of this call."""
    positions = _GIVEN_POSITIONS if "positions" in found else _PAST_TOKENS + _POSITIONS
    inputs = ["q3", "key", "value", "past_k", "past_v", "lengths", "total"]
    inputs += ["", "", "", "", "head_sink"] if "sink" in found else []
    more = ", sliding_window_cache = 1" if "windowed" in found else ""
    text = "\n".join(
        [
            _SHAPES.format(tokens=0),
            _SEPARATE,
            NORM if "norm" in found else NO_NORM,
            _FLAT,
            _LENGTHS,
            positions + ROTARY if "rotary" in found else NO_ROTARY,
            (_INT8 if "int8" in found else _CAST) + _PAST,
            _ATTENTION.format(output="output", inputs=", ".join(inputs), more=more),
        ]
    )
    return "\n".join(line for line in text.splitlines() if not re.match(r"\s*[kv][0-9_]", line))


def _block_attention(found: set[str], keys: str, values: str) -> str:
    past = "past" in found
    return "".join(
        [
            f"new_k = Identity ({keys})  new_v = Identity ({values})",
            _BLOCK_HEADS,
            _BLOCK_CAPACITY if past else "",
            _WINDOW_HELD if "windowed" in found else _ALL_HELD if past else "",
            _BLOCK_PAST if past else _BLOCK_NO_PAST,
            _BLOCK_MASK,
            SCORES,
            _BLOCK_BIAS if "bias" in found else _BLOCK_NO_BIAS,
            WEIGHTS,
            _BLOCK_SINK if "sink" in found else _BLOCK_NO_SINK,
            _BLOCK_OUTPUT,
        ]
    )

# SPDX-License-Identifier: Apache-2.0
"""Q4NX weights in ONNX: functions that the operators' definitions call, which only run without FlowNPU.

Q4NXProject: the product of activations X and rows first .. first + M - 1 of an unpacked weight

    Y = sum_k (d code_k + m) X_k = sum_k d (code_k - 8) X_k + sum_groups (m + 8 d) sum_{k in group} X_k

    The first sum is com.microsoft.MatMulNBits, which has kernels for 4-bit codes with a zero point of 8; the second is
    a product with one column for each group of 32. In stock ONNX Runtime weights thus keep 4 bits; if they were
    dequantised to float32, constant folding would make them eight times as large.

Q4NXUnpack: W uint8 [R, C, bytes of a block] -> codes uint8 [32 R, C G, 16] in MatMulNBits' order (byte i has column 2i
    of a group in its low nibble, column 2i + 1 in its high nibble), scale and minimum float32 [32 R, C G]. `q4nx`
    describes W, whose last dimension tells G, the groups of a block, and whether it has minima.

Q4NXFields: R rows of W's blocks, uint8 [R, C, bytes of a block], and W -> parameters uint8 [R, 32, C G, 2 or 1, 2], the
    bytes of scale and minimum, or of the scale alone; codes uint8 [R, C, 2, 32 G, 8]; groups int64 [1], C G

Q4NXParameters: bytes uint8 [..., 2 or 1, 2] -> scale, minimum float32 [..., 1]; if there is no minimum, it is -8 times
    the scale

Each has a second form for weights of 8 bits, whose name ends with Bytes: codes are then uint8 [32 R, C, 32], 128 above
those of `q4nx`, as MatMulNBits has them, Q4NXFieldsBytes has them as they are stored, [R, C, 8, 2, 16, 4], and a
minimum that is not there is 0. A third form, Table, differs in Q4NXFieldsTable, which looks up 8-bit codes in the
blocks' tables.

ONNX Runtime folds all of this when it loads a model, and keeps every intermediate result until it is done. The steps
are therefore chosen to have few results (about 8 bytes a weight in all), and to permute bytes before they are widened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flownpu.ops import q4nx
from flownpu.ops.definitions.onnx_function import build_helper

if TYPE_CHECKING:
    import onnx_ir as ir

_SUFFIXES = {q4nx.EIGHT_BITS: "Bytes", q4nx.EIGHT_BITS_WITH_MINIMA: "Bytes", q4nx.TABLE: "Table"}
SUFFIXES = ("Bytes", "Table")
"""Endings of the functions' names that weights of some layouts need."""

# A block has 640 bytes for each of its groups (512 of codes, 64 of scales and 64 of minima), or 576 if it has one group
# and no minima; of 8 bits 1152 or 1088. The sizes are computed from the shape of W, a constant, so that they can be
# folded, and so that Reshape need not infer a dimension: it cannot if no blocks are gathered and R is 0. (It copies a
# dimension that is given as 0.)
_FIELDS = """
    missing_minima = Constant <value_ints = [64]> ()
    group_code_bytes = Constant <value_ints = [{group_code_bytes}]> ()
    group_parameter_bytes = Constant <value_ints = [64]> ()
    group_bytes = Constant <value_ints = [{group_bytes}]> ()
    group_columns = Constant <value_ints = [32]> ()
    {block_bytes}
    bytes_with_minima = Add (block_bytes, missing_minima)
    groups_a_block = Div (bytes_with_minima, group_bytes)
    code_bytes = Mul (groups_a_block, group_code_bytes)
    parameter_bytes = Sub (block_bytes, code_bytes)
    one_parameter_bytes = Mul (groups_a_block, group_parameter_bytes)
    kinds = Div (parameter_bytes, one_parameter_bytes)
    sizes = Concat <axis = 0> (parameter_bytes, code_bytes)
    parameter_part, code_part = Split <axis = -1> ({blocks}, sizes)

    rows_and_blocks = Constant <value_ints = [0, 0]> ()
    row_and_bytes = Constant <value_ints = [32, 2]> ()
    parameter_shape = Concat <axis = 0> (rows_and_blocks, kinds, groups_a_block, row_and_bytes)
    parameters_by_group = Reshape (parameter_part, parameter_shape)
    parameters_by_row = Transpose <perm = [0, 4, 1, 3, 2, 5]> (parameters_by_group)
    block_columns = Shape <start = 1, end = 2> (W)
    groups = Mul (block_columns, groups_a_block)
    bytes_of_one = Constant <value_ints = [2]> ()
    row_shape = Concat <axis = 0> (rows_and_blocks, groups, kinds, bytes_of_one)
    parameters = Reshape (parameters_by_row, row_shape)
"""
_FIELDS_STRIPS = """
    strips = Constant <value_ints = [2]> ()
    columns = Mul (groups_a_block, group_columns)
    column_bytes = Constant <value_ints = [8]> ()
    strip_shape = Concat <axis = 0> (rows_and_blocks, strips, columns, column_bytes)
    codes = Reshape (code_part, strip_shape)
"""
_FIELDS_BYTES = """
    code_shape = Constant <value_ints = [8, 2, 16, 4]> ()
    all_code_shape = Concat <axis = 0> (rows_and_blocks, code_shape)
    codes = Reshape (code_part, all_code_shape)
"""

_BLOCK_BYTES = "block_bytes = Shape <start = 2> (W)"
_BLOCK_BYTES_TABLE = """
    table_bytes = Constant <value_ints = [16]> ()
    all_block_bytes = Shape <start = 2> (W)
    block_bytes = Sub (all_block_bytes, table_bytes)
    block_sizes = Concat <axis = 0> (block_bytes, table_bytes)
    without_table, tables = Split <axis = -1> (blocks, block_sizes)
"""
# Nibbles in the order of codes of 8 bits: first [R, C, strip, column / 4, column % 4, byte, nibble].
_FIELDS_TABLE = """
    quad_shape = Constant <value_ints = [0, 0, 2, 8, 4, 8, 1]> ()
    quads = Reshape (code_part, quad_shape)
    four = Constant <value = uint8 {4}> ()
    low_nibble = Constant <value = uint8 {15}> ()
    even_rows = BitwiseAnd (quads, low_nibble)
    odd_rows = BitShift <direction = "RIGHT"> (quads, four)
    row_pairs = Concat <axis = -1> (even_rows, odd_rows)
    ordered = Transpose <perm = [0, 1, 3, 6, 2, 5, 4]> (row_pairs)
    flat_shape = Constant <value_ints = [0, 0, 1024]> ()
    flat = Reshape (ordered, flat_shape)
    places = Cast <to = 6> (flat)
    looked_up = GatherElements <axis = -1> (tables, places)
    code_shape = Constant <value_ints = [0, 0, 8, 2, 16, 4]> ()
    codes = Reshape (looked_up, code_shape)
"""

# Converts bf16 with a table of all 65536 values. ONNX's BitCast is too new (opset 26) for the models that contain this
# function, so sign, exponent and fraction are separated by integer division, and combined as
#     (-1)^sign * (128 [exponent > 0] + fraction) * 2^(max(exponent, 1) - 134),    134 = bias 127 + 7 fraction bits,
# every factor of which is exact in float32, and so is the product. (Infinity comes out as 2^128 = infinity.)
_PARAMETERS = """
    zero = Constant <value = int32 {0}> ()
    one = Constant <value = int32 {1}> ()
    two = Constant <value = int32 {2}> ()
    fraction_end = Constant <value = int32 {128}> ()
    exponent_end = Constant <value = int32 {256}> ()
    sign_bit = Constant <value = int32 {32768}> ()
    bits_end = Constant <value = int32 {65536}> ()
    bias = Constant <value = int32 {134}> ()
    base = Constant <value = float {2}> ()
    all_bits = Range (zero, bits_end, one)
    sign = Div (all_bits, sign_bit)
    sign_and_exponent = Div (all_bits, fraction_end)
    exponent = Mod (sign_and_exponent, exponent_end)
    fraction = Mod (all_bits, fraction_end)
    is_normal = Min (exponent, one)
    implicit_bit = Mul (is_normal, fraction_end)
    magnitude = Add (implicit_bit, fraction)
    twice_sign = Mul (sign, two)
    sign_factor = Sub (one, twice_sign)
    significand = Mul (sign_factor, magnitude)
    least_exponent = Max (exponent, one)
    power = Sub (least_exponent, bias)
    power_float = Cast <to = 1> (power)
    factor = Pow (base, power_float)
    significand_float = Cast <to = 1> (significand)
    table = Mul (significand_float, factor)

    low_and_high = Cast <to = 6> (bytes)
    place_values = Constant <value = int32[2, 1] {1, 256}> ()
    bits = MatMul (low_and_high, place_values)
    values = Gather (table, bits)

    first = Constant <value_int = 0> ()
    last = Constant <value_int = -1> ()
    scale = Gather <axis = -2> (values, first)
    last_value = Gather <axis = -2> (values, last)
    kinds = Shape <start = -2, end = -1> (values)
    only_scale = Constant <value_ints = [1]> ()
    is_symmetric = Equal (kinds, only_scale)
    times_scale = Constant <value_float = {minimum_of_symmetric}> ()
    one_float = Constant <value_float = 1.0> ()
    times = Where (is_symmetric, times_scale, one_float)
    minimum = Mul (last_value, times)
"""

_UNPACK = """
    parameter_bytes, code_bytes, groups = ai.flownpu.Q4NXFields (W, W)
    scales, minima = ai.flownpu.Q4NXParameters (parameter_bytes)
    minus_one = Constant <value_ints = [-1]> ()
    rows_and_groups = Concat <axis = 0> (minus_one, groups)
    scale = Reshape (scales, rows_and_groups)
    minimum = Reshape (minima, rows_and_groups)

    column_pair_shape = Constant <value_ints = [0, 0, 2, -1, 2, 8, 1]> ()
    column_pairs = Reshape (code_bytes, column_pair_shape)
    left, right = Split <axis = 4, num_outputs = 2> (column_pairs)
    four = Constant <value = uint8 {4}> ()
    low_nibble = Constant <value = uint8 {15}> ()
    high_nibble = Constant <value = uint8 {240}> ()
    left_even = BitwiseAnd (left, low_nibble)
    right_even = BitShift <direction = "LEFT"> (right, four)
    even_rows = BitwiseOr (left_even, right_even)
    left_odd = BitShift <direction = "RIGHT"> (left, four)
    right_odd = BitwiseAnd (right, high_nibble)
    odd_rows = BitwiseOr (left_odd, right_odd)
    row_pairs = Concat <axis = -1> (even_rows, odd_rows)
    by_row = Transpose <perm = [0, 2, 5, 6, 1, 3, 4]> (row_pairs)
    group_bytes = Constant <value_ints = [16]> ()
    code_shape = Concat <axis = 0> (minus_one, groups, group_bytes)
    codes = Reshape (by_row, code_shape)
"""

_UNPACK_BYTES = """
    parameter_bytes, code_bytes, groups = ai.flownpu.Q4NXFields{suffix} (W, W)
    scales, minima = ai.flownpu.Q4NXParameters{suffix} (parameter_bytes)
    minus_one = Constant <value_ints = [-1]> ()
    rows_and_groups = Concat <axis = 0> (minus_one, groups)
    scale = Reshape (scales, rows_and_groups)
    minimum = Reshape (minima, rows_and_groups)
    by_row = Transpose <perm = [0, 4, 3, 1, 2, 5]> (code_bytes)
    group_columns = Constant <value_ints = [32]> ()
    code_shape = Concat <axis = 0> (minus_one, groups, group_columns)
    signed = Reshape (by_row, code_shape)
    middle = Constant <value = uint8 {128}> ()
    codes = BitwiseXor (signed, middle)
"""

_PROJECT = """
    minus_one = Constant <value_ints = [-1]> ()
    zero = Constant <value_ints = [0]> ()
    group_size = Constant <value_ints = [32]> ()
    rounding_up = Constant <value_ints = [31]> ()
    row_and_group_axes = Constant <value_ints = [0, 1]> ()
    rows_scalar = Constant <value_int: int = @M> ()
    rows = Reshape (rows_scalar, minus_one)
    columns_scalar = Constant <value_int: int = @K> ()
    columns = Reshape (columns_scalar, minus_one)
    rounded_up = Add (columns, rounding_up)
    groups = Div (rounded_up, group_size)
    end = Add (first, rows)
    starts = Concat <axis = 0> (first, zero)
    ends = Concat <axis = 0> (end, groups)
    used_codes = Slice (codes, starts, ends, row_and_group_axes)
    used_scale = Slice (scale, starts, ends, row_and_group_axes)
    used_minimum = Slice (minimum, starts, ends, row_and_group_axes)

    from_codes = com.microsoft.MatMulNBits <
        K: int = @K, N: int = @M, bits = {bits}, block_size = 32, accuracy_level = 1
    > (X, used_codes, used_scale)

    grouped_columns = Mul (groups, group_size)
    missing_columns = Sub (grouped_columns, columns)
    padding = Concat <axis = 0> (zero, missing_columns)
    whole_groups = Pad (X, padding, , minus_one)
    leading = Shape <start = 0, end = -1> (X)
    grouped_shape = Concat <axis = 0> (leading, groups, group_size)
    grouped = Reshape (whole_groups, grouped_shape)
    group_sums = ReduceSum <keepdims = 0> (grouped, minus_one)
    middle_code = Constant <value_float = {middle_code}> ()
    middle = Mul (used_scale, middle_code)
    offset = Add (used_minimum, middle)
    offset_by_group = Transpose <perm = [1, 0]> (offset)
    from_offsets = MatMul (group_sums, offset_by_group)
    Y = Add (from_codes, from_offsets)
"""


def fields(suffix: str = "") -> ir.Function:
    """The function Q4NXFields with one of the suffixes."""
    code_bytes = 1024 if suffix == "Bytes" else 512
    body = _FIELDS.format(
        group_code_bytes=code_bytes,
        group_bytes=code_bytes + 128,
        block_bytes=_BLOCK_BYTES_TABLE if suffix == "Table" else _BLOCK_BYTES,
        blocks="without_table" if suffix == "Table" else "blocks",
    )
    body += {"": _FIELDS_STRIPS, "Bytes": _FIELDS_BYTES, "Table": _FIELDS_TABLE}[suffix]
    return build_helper(f"Q4NXFields{suffix}", [], ["blocks", "W"], ["parameters", "codes", "groups"], body)


def parameters(suffix: str = "") -> ir.Function:
    """The function Q4NXParameters with one of the suffixes."""
    body = _PARAMETERS.replace("{minimum_of_symmetric}", "0.0" if suffix else "-8.0")
    return build_helper(f"Q4NXParameters{suffix}", [], ["bytes"], ["scale", "minimum"], body)


def unpack(suffix: str = "") -> ir.Function:
    """The function Q4NXUnpack with one of the suffixes."""
    body = _UNPACK_BYTES.replace("{suffix}", suffix) if suffix else _UNPACK
    return build_helper(f"Q4NXUnpack{suffix}", [], ["W"], ["codes", "scale", "minimum"], body)


def project(suffix: str = "") -> ir.Function:
    """The function Q4NXProject with one of the suffixes."""
    body = _PROJECT.replace("{bits}", "8" if suffix else "4").replace("{middle_code}", "0.0" if suffix else "8.0")
    inputs = ["X", "codes", "scale", "minimum", "first"]
    return build_helper(f"Q4NXProject{suffix}", ["M", "K"], inputs, ["Y"], body)


def suffix_of(weight: ir.Value | None) -> str:
    """The suffix of the functions that read a weight, told by the shape of its blocks; "" if it is not known."""
    known = None if weight is None else weight.const_value if weight.const_value is not None else weight
    shape = [] if known is None or known.shape is None else list(known.shape)
    suffixes = {layout.block_bytes: suffix for layout, suffix in _SUFFIXES.items()}
    return suffixes.get(int(shape[-1]), "") if len(shape) == 3 and isinstance(shape[-1], int) else ""


def suffix_in(features: list[str]) -> str:
    """The suffix that an operator's features name in small letters, or ""."""
    return next((suffix for suffix in SUFFIXES if suffix.lower() in features), "")


def all_functions(*suffixes: str) -> list[ir.Function]:
    """The functions that products with weights of these suffixes call."""
    makers = (project, unpack, fields, parameters)
    return [maker(suffix) for suffix in dict.fromkeys(suffixes) for maker in makers]

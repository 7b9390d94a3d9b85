# SPDX-License-Identifier: Apache-2.0
"""Q4NXGather: looks up rows of a Q4NX table, as an embedding does. Tied embeddings share the LM head's initializer.

    Y[..., :] = dequant(W)[indices[...], :]

An index outside 0..M-1 is an error. Inputs, output and attributes: ops/nodes/q4nx_matmul.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flownpu.ops import q4nx
from flownpu.ops.definitions import q4nx_unpack
from flownpu.ops.definitions.onnx_function import build, read

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

NAME = "Q4NXGather"

# Only the requested rows are dequantised. For each row, its row of blocks is gathered, and from that the scales, minima
# and nibbles of the one row in 32. Indices are looked up in the list 0..M-1, so that an index outside fails instead of
# reading padding. Gather would count a negative index from the end, so M replaces it first.
_BODY = """
    minus_one = Constant <value_ints = [-1]> ()
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    two = Constant <value = int64 {2}> ()
    four = Constant <value = int64 {4}> ()
    row_end = Constant <value_int: int = @M> ()
    flat_indices = Reshape (indices, minus_one)
    indices64 = Cast <to = 7> (flat_indices)
    is_negative = Less (indices64, zero)
    checked = Where (is_negative, row_end, indices64)
    all_rows = Range (zero, row_end, one)
    row = Gather <axis = 0> (all_rows, checked)
    rows_a_block = Constant <value = int64 {32}> ()
    block_row = Div (row, rows_a_block)
    row_in_block = Mod (row, rows_a_block)
    taken = Gather <axis = 0> (W, block_row)
    parameter_bytes, code_bytes, groups = ai.flownpu.Q4NXFields{suffix} (taken, W)

    index_shape = Constant <value_ints = [-1, 1]> ()
    row_index = Reshape (row_in_block, index_shape)
    bytes = GatherND <batch_dims = 1> (parameter_bytes, row_index)
    scale, minimum = ai.flownpu.Q4NXParameters{suffix} (bytes)

    group_columns = Constant <value_ints = [32]> ()
    padded_columns = Mul (groups, group_columns)
    same = Constant <value_ints = [0]> ()
    code_shape = Concat <axis = 0> (same, groups, group_columns)
    {codes}

    product = Mul (scale, code)
    weights = Add (product, minimum)
    columns_scalar = Constant <value_int: int = @K> ()
    columns = Reshape (columns_scalar, minus_one)
    padded_shape = Concat <axis = 0> (same, padded_columns)
    padded = Reshape (weights, padded_shape)
    from_start = Constant <value_ints = [0]> ()
    column_axis = Constant <value_ints = [1]> ()
    values = Slice (padded, from_start, columns, column_axis)
    index_dimensions = Shape (indices)
    output_shape = Concat <axis = 0> (index_dimensions, columns)
    Y = Reshape <allowzero = 1> (values, output_shape)
"""


_CODES = """
    pairs_by_row = Transpose <perm = [0, 2, 4, 1, 3]> (code_bytes)
    same_and_pairs = Constant <value_ints = [0, 16]> ()
    all_pairs_shape = Concat <axis = 0> (same_and_pairs, padded_columns)
    all_pairs = Reshape (pairs_by_row, all_pairs_shape)
    pair_index = Div (row_index, two)
    pair = GatherND <batch_dims = 1> (all_pairs, pair_index)
    is_odd = Mod (row_index, two)
    bits = Mul (is_odd, four)
    shift = Cast <to = 2> (bits)
    shifted = BitShift <direction = "RIGHT"> (pair, shift)
    fifteen = Constant <value = uint8 {15}> ()
    nibbles = BitwiseAnd (shifted, fifteen)
    codes = Reshape (nibbles, code_shape)
    code = Cast <to = 1> (codes)
"""
_CODES_OF_BYTES = """
    bytes_by_row = Transpose <perm = [0, 4, 3, 1, 2, 5]> (code_bytes)
    same_and_rows = Constant <value_ints = [0, 32]> ()
    all_rows_shape = Concat <axis = 0> (same_and_rows, padded_columns)
    all_codes = Reshape (bytes_by_row, all_rows_shape)
    signed = GatherND <batch_dims = 1> (all_codes, row_index)
    sign_bit = Constant <value = uint8 {128}> ()
    shifted = BitwiseXor (signed, sign_bit)
    unsigned_codes = Reshape (shifted, code_shape)
    unsigned_code = Cast <to = 1> (unsigned_codes)
    middle = Constant <value_float = 128.0> ()
    code = Sub (unsigned_code, middle)
"""


def features(node: ir.Node) -> list[str]:
    """The variant of a node: "bytes" with a weight of 8 bits, "table" with one that has tables, or none.

    Raises:
        ValueError: The node does not fit the schema.
    """
    inputs, _ = read(node)
    return [suffix.lower() for suffix in [q4nx_unpack.suffix_of(inputs["W"])] if suffix]


def function(overload: str) -> ir.Function:
    """The definition of one variant; `overload` is "bytes", "table" or empty."""
    codes = _CODES_OF_BYTES if overload else _CODES
    return build(NAME, overload, _BODY.replace("{suffix}", q4nx_unpack.suffix_in([overload])).replace("{codes}", codes))


def helpers(overload: str) -> list[ir.Function]:
    """Functions that the variant's body calls."""
    suffix = q4nx_unpack.suffix_in([overload])
    return [q4nx_unpack.fields(suffix), q4nx_unpack.parameters(suffix)]


def reference(blocks: NDArray[np.uint8], indices: NDArray[Any], *, rows: int, columns: int) -> NDArray[np.float64]:
    """Computes the operator: float64 [*indices.shape, columns], exactly the float32 weights that the blocks stand for.

    Raises:
        IndexError: An index is outside 0..rows-1.
    """
    return q4nx.gather(blocks, indices, rows, columns).astype(np.float64)

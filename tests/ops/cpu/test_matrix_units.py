# SPDX-License-Identifier: Apache-2.0
"""int8 products of matrices (AMX, i8mm) have the bits of dot products, which test_q4nx_matmul.py and
test_dense_matmul.py hold to float64."""

import ml_dtypes
import numpy as np
import pytest

from flownpu.ops import q4nx
from tests.ops.device import Node, testing

# Instruction sets with matrix units, and the ones whose bits they give.
PAIRS = {"amx": "avx512", "i8mm": "dotprod"}
PAIR = next(((isa, PAIRS[isa]) for isa in testing.available_isas() if isa in PAIRS), ())
pytestmark = pytest.mark.skipif(not PAIR, reason="no AMX nor i8mm, or the system does not let this process use it")

LAYOUTS = [q4nx.WIDE, q4nx.NARROW, q4nx.SYMMETRIC, q4nx.EIGHT_BITS, q4nx.EIGHT_BITS_WITH_MINIMA, q4nx.TABLE]


def weight(rows: int, columns: int, layout: q4nx.Layout, rng: np.random.Generator) -> np.ndarray:
    """Random codes; scales over 16 powers of two, of both signs, so that small ones are rounded."""
    shape = (rows, -(-columns // 32))
    powers = 2.0 ** rng.integers(-8, 8, shape) * rng.choice([-1, 1], shape)
    scale = (rng.uniform(0.5, 1, shape) * powers).astype(ml_dtypes.bfloat16)
    minimum = (-8 if layout.unpacked_bits == 4 else 0) * scale.astype(np.float32)
    if layout.minima:
        minimum += rng.standard_normal(shape, dtype=np.float32)
    codes = rng.integers(0, 16, (rows, columns), np.uint8)
    if layout.unpacked_bits == 8:
        codes = rng.choice(np.arange(-128, 128, 16 if layout.table else 1, np.int8), (rows, columns))
    return q4nx.pack(codes, scale, minimum.astype(ml_dtypes.bfloat16), layout)


def both(rows: int, columns: int, blocks: np.ndarray, gating: str = "none") -> list[Node]:
    x = np.zeros((1, columns), np.float32)
    return [
        Node("Q4NXMatMul", [x, blocks], constants=(1,), options={"cpu_isa": isa}, M=rows, K=columns, gating=gating)
        for isa in PAIR
    ]


def assert_same(nodes: list[Node], x: np.ndarray, blocks: np.ndarray) -> None:
    matrices, dots = (node(x, blocks)[0] for node in nodes)
    assert dots is not None
    assert np.nanmax(np.abs(dots)) > 0
    np.testing.assert_array_equal(matrices, dots, err_msg=f"{len(x)} rows")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
# The last part of 256 half full, as in the 1B model; an odd number of groups, the last of one column; part of a group.
@pytest.mark.parametrize("columns", [1152, 609, 27])
def test_matrix_units_have_bits_of_vectors_for_rows_1_to_300(layout: q4nx.Layout, columns: int) -> None:
    """Fewer than 16 rows are computed by vectors. Tiles have 16 rows, two go together, and a task has 256 at most."""
    rng = np.random.default_rng(columns)
    blocks = weight(71, columns, layout, rng)
    x = rng.standard_normal((300, columns), dtype=np.float32)
    nodes = both(71, columns, blocks)
    for rows in (*range(1, 70), 95, 96, 97, 256, 257, 300):
        assert_same(nodes, x[:rows], blocks)


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
@pytest.mark.parametrize("columns", [640, 200, 27])
def test_dense_product_equals_vector_units_bit_for_bit(columns: int, dtype: type) -> None:
    """Parts of 128 columns: more than fill an L1 cache, one and a half, and one that is not full."""
    rng = np.random.default_rng(columns)
    dense = rng.integers(-128, 128, (columns, 71)).astype(dtype)
    scale = rng.uniform(0.5, 2, 71).astype(np.float32) if dtype == np.int8 else None
    x = rng.standard_normal((300, columns), dtype=np.float32)
    nodes = [
        Node("DenseMatMul", [x, dense, scale], constants=(1, 2), options={"cpu_isa": isa, "activations": "int8"})
        for isa in PAIR
    ]
    for rows in (5, 16, 17, 32, 33, 96, 97, 300):
        matrices, dots = (node(x[:rows], dense, scale)[0] for node in nodes)
        np.testing.assert_array_equal(matrices, dots, err_msg=f"{rows} rows")


@pytest.mark.parametrize("tokens", [16, 17, 32, 50])
def test_gated_pair_equals_vector_units_bit_for_bit(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    blocks = np.concatenate([weight(70, 320, q4nx.NARROW, rng) for _ in range(2)])
    x = rng.standard_normal((tokens, 320), dtype=np.float32) / 1000
    assert_same(both(70, 320, blocks, "swiglu"), x, blocks)


def test_activations_beyond_256_kb_have_bits_of_vectors() -> None:
    """More than 256 KB of int8 are multiplied a part at a time, for all rows of blocks."""
    rng = np.random.default_rng(3)
    blocks = weight(65, 9000, q4nx.NARROW, rng)
    assert_same(both(65, 9000, blocks), rng.standard_normal((32, 9000), dtype=np.float32), blocks)


@pytest.mark.parametrize("tokens", [16, 40])
def test_largest_sums_have_bits_of_vectors(tokens: int) -> None:
    """Activations of 127 times codes 0 and 15: the largest dot products that occur."""
    codes = np.repeat(np.array([[0], [15]], np.uint8), 16, 0) * np.ones((1, 512), np.uint8)
    scale = np.full((32, 16), 1.9921875, ml_dtypes.bfloat16)
    blocks = q4nx.pack(codes, scale, (-8 * scale.astype(np.float32)).astype(ml_dtypes.bfloat16))
    x = np.full((tokens, 512), 127, np.float32) * np.where(np.arange(tokens) % 2, 1, -1)[:, None].astype(np.float32)
    assert_same(both(32, 512, blocks), x, blocks)


@pytest.mark.parametrize("tokens", [16, 40])
def test_row_with_nan_leaves_other_rows_finite(tokens: int) -> None:
    rng = np.random.default_rng(4)
    blocks = weight(40, 320, q4nx.NARROW, rng)
    x = rng.standard_normal((tokens, 320), dtype=np.float32)
    x[3, 5], x[7, 300] = np.nan, np.inf
    nodes = both(40, 320, blocks)
    assert_same(nodes, x, blocks)
    (y,) = nodes[0](x, blocks)
    assert y is not None
    assert set(np.flatnonzero(~np.isfinite(y).all(1))) == {3, 7}

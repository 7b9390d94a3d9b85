# SPDX-License-Identifier: Apache-2.0
import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.upgrades.four_bit_table import bytes_of_tables

ROWS, COLUMNS, BLOCK_SIZE = 50, 96, 32
IDS = np.array([[0, 49, 7], [31, 32, 7]])
GRAPH = """
lookup (int64[B, S] ids) => (float[B, S, {columns}] rows) {{
    rows = com.microsoft.GatherBlockQuantized <block_size = 32, {axes}> (codes, ids, scales{points})
}}
"""
DTYPES = {"int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4}


def _constants(dtype: str, *, with_points: bool) -> dict[str, testing.Array]:
    rng = np.random.default_rng(0)
    lowest = -8 if dtype == "int4" else 0
    found = {
        "codes": rng.integers(lowest, lowest + 16, (ROWS, COLUMNS)).astype(DTYPES[dtype]),
        "scales": testing.bfloat16_values(rng, ROWS, COLUMNS // BLOCK_SIZE),
    }
    if with_points:
        points = rng.integers(lowest, lowest + 16, (ROWS, COLUMNS // BLOCK_SIZE))
        found["zero_points"] = points.astype(DTYPES[dtype])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_points", [False, True])
def test_tables_of_four_bit_types_become_q4nx(dtype: str, with_points: bool) -> None:
    """Against ONNX Runtime's own kernel on the types; three blocks a row do not fill whole bytes."""
    constants = _constants(dtype, with_points=with_points)
    points = ", zero_points" if with_points else ""
    graph = GRAPH.format(columns=COLUMNS, axes="gather_axis = 0, quantize_axis = 1", points=points)
    (expected,) = testing.run(testing.parse(graph, **constants), {"ids": IDS})
    model = testing.parse(graph, **constants)
    assert bytes_of_tables(model) == []
    np.testing.assert_array_equal(testing.run(model, {"ids": IDS})[0], expected)
    model, misses = testing.rewritten(model, "q4nx_gather")
    assert (testing.operator_names(model), misses) == (["Q4NXGather"], [])
    # The scale is a value of bf16; the minimum, -zero point times scale, has up to four bits more and is rounded.
    scale = float(constants["scales"].max())
    (found,) = testing.run(model, {"ids": IDS})
    np.testing.assert_allclose(found, expected, rtol=0, atol=15 * scale * testing.BFLOAT16_ROUNDING)


def test_table_quantised_along_its_columns_stays_with_reason() -> None:
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 16, (64, 96)).astype(ml_dtypes.uint4), testing.bfloat16_values(rng, 2, 96)
    graph = GRAPH.format(columns=96, axes="gather_axis = 0, quantize_axis = 0", points="")
    model = testing.parse(graph, codes=codes, scales=scales)
    (miss,) = bytes_of_tables(model)
    assert "gathered along axis 0 and quantised along 0, expected 0 and 1" in miss.reason
    assert model.graph.initializers["codes"].dtype == ir.DataType.UINT4

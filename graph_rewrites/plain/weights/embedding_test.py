# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.plain.weights.embedding import quantise_embeddings
from flownpu.graph_rewrites.plain.weights.projection import quantise_projections
from flownpu.ops import q4nx

TABLE: testing.Array = np.random.default_rng(2).standard_normal((70, 48)).astype(np.float32)
CONSTANTS = {"table": TABLE, "few": TABLE[:2], "head": np.ascontiguousarray(TABLE.T), "other": TABLE.T + 1}


def _model(body: str) -> Any:
    return testing.parse(f"embedding (int64[B, S] ids) => (float y) {{ {body} }}", **CONSTANTS)


@pytest.mark.parametrize(
    "body",
    ["y = Gather (table, ids)", "s = Constant <value_ints = [-1, 3]> () i = Reshape (ids, s) y = Gather (table, i)"],
)
def test_rows_are_dequantised(body: str) -> None:
    model, misses = testing.folded(_model(body), quantise_embeddings)
    assert "Q4NXGather" in testing.operator_names(model)
    assert "Gather" not in testing.operator_names(model)
    assert misses == []
    ids = np.array([[0, 69, 5], [5, 31, 32]])
    (found,) = testing.run(model, {"ids": ids})
    rounded = q4nx.dequantize_codes(q4nx.quantize(TABLE))[ids]
    # minimum + scale * code: two roundings, whichever way they are evaluated.
    np.testing.assert_allclose(found, rounded, atol=2 * testing.FLOAT32_ROUNDING * np.abs(TABLE).max() * 2)
    testing.check(model)


@pytest.mark.parametrize(("head", "tables"), [("head", 1), ("other", 2)])
def test_tied_table_is_packed_once(head: str, tables: int) -> None:
    model, _ = testing.folded(_model(f"x = Gather (table, ids) y = MatMul (x, {head})"), quantise_projections)
    quantise_embeddings(model)
    readers = [node for node in model.graph if node.op_type in {"Q4NXGather", "Q4NXMatMul"}]
    weights = [node.inputs[0 if node.op_type == "Q4NXGather" else 1] for node in readers]
    assert len(weights) == 2
    assert len(set(weights)) == tables


def test_unmatched_graph_reports_miss() -> None:
    _, misses = testing.folded(_model("y = Gather (few, ids)"), quantise_embeddings)
    assert [(miss.rule, miss.reason) for miss in misses] == [
        ("embedding", "few has 2 rows, less than 32, which a block of Q4NX has at least")
    ]


@pytest.mark.parametrize(
    "body",
    [
        # Positions, which are computed; and a table that is read by columns.
        "s = Shape (ids) n = Gather <axis = 0> (s, s) y = Gather (table, n)",
        "y = Gather <axis = 1> (table, ids)",
    ],
)
def test_unsupported_tables_stay(body: str) -> None:
    model, misses = testing.folded(_model(body), quantise_embeddings)
    assert "Q4NXGather" not in testing.operator_names(model)
    assert misses == []

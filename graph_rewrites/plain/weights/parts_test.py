# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.plain.weights.parts import part_products

# 120 rows of K = 48 columns: queries of 56, keys and values of 32 rows each.
WEIGHT: testing.Array = np.random.default_rng(2).standard_normal((120, 48)).astype(np.float32)
MODEL = """
parts (float[B, S, 48] x) => (float q, float k, float v{also}) {{
    zero = Constant <value_ints = [0]> ()
    first = Constant <value_ints = [{first}]> ()
    second = Constant <value_ints = [88]> ()
    end = Constant <value_ints = [{end}]> ()
    axis = Constant <value_ints = [{axis}]> ()
    step = Constant <value_ints = [{step}]> ()
    {before}
    all = MatMul (x, {weight})
    q = Slice (all, zero, first, axis)
    k = Slice (all, first, second, axis, step)
    v = Slice (all, second, end, axis)
}}
"""
DEFAULTS = {"before": "", "weight": "stored", "first": "56", "end": "120", "axis": "2", "step": "1", "also": ""}


def _model(**changed: str) -> Any:
    constants = {"stored": np.ascontiguousarray(WEIGHT.T), "rows": WEIGHT}
    return testing.parse(MODEL.format(**(DEFAULTS | changed)), **constants)


@pytest.mark.parametrize(
    "forms",
    [{}, {"axis": "-1", "end": str(2**63 - 1)}, {"before": "w = Transpose <perm = [1, 0]> (rows)", "weight": "w"}],
)
def test_parts_of_product_become_products(forms: dict[str, str]) -> None:
    original = _model(**forms)
    model, misses = testing.folded(original, part_products)
    assert (testing.operator_names(model), misses) == (["MatMul"] * 3, [])
    x = np.random.default_rng(3).standard_normal((2, 3, 48), np.float32)
    for found, expected, rows in zip(
        *(testing.run(m, {"x": x}) for m in (model, original)), np.split(WEIGHT, [56, 88]), strict=True
    ):
        assert np.all(np.abs(found - expected) <= testing.product_bound(x, rows))
    testing.check(model)


@pytest.mark.parametrize(
    "changed",
    # The last: a part of less than the 32 rows of a block of Q4NX.
    [{"end": "119"}, {"axis": "1"}, {"step": "2"}, {"also": ", float all"}, {"first": "60"}],
)
def test_result_that_is_used_otherwise_stays_whole(changed: dict[str, str]) -> None:
    model, misses = testing.folded(_model(**changed), part_products)
    assert testing.operator_names(model).count("MatMul") == 1
    assert misses == []

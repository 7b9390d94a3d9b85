# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest

from flownpu.graph_rewrites import testing
from flownpu.graph_rewrites.plain.rms_norm import fold_rms_norm

MODEL = """
norm (float[B, S, 24] x, float fed) => (float[B, S, 24] y{also}) {{
    axes = Constant <value_ints = {axes}> ()
    two = Constant <value = float {{2.0}}> ()
    one = Constant <value = float {{1.0}}> ()
    epsilon = Constant <value = float {{0.01}}> ()
    square = {square}
    mean = ReduceMean <keepdims = {keepdims}> (square, axes)
    total = Add ({total})
    root = {root}
    {normalised}
    y = Mul ({y})
}}
"""
RECIPROCAL = "inverse = Div (one, root) normalised = Mul (x, inverse)"
DEFAULTS = {
    "axes": "[-1]",
    "square": "Pow (x, two)",
    "keepdims": "1",
    "total": "mean, epsilon",
    "root": "Sqrt (total)",
    "normalised": RECIPROCAL,
    "y": "normalised, weight",
    "also": "",
}
WEIGHTS = {"weight": np.linspace(0.5, 1.5, 24, dtype=np.float32), "short": np.ones(1, np.float32)}


def _model(**changed: str) -> Any:
    return testing.parse(MODEL.format(**(DEFAULTS | changed)), **WEIGHTS)


@pytest.mark.parametrize(
    "forms",
    [
        {},
        {"square": "Mul (x, x)", "total": "epsilon, mean", "y": "weight, normalised"},
        {"normalised": "normalised = Div (x, root)", "axes": "[2]"},
        {"normalised": "inverse = Reciprocal (root) normalised = Mul (inverse, x)"},
    ],
)
def test_rms_norm_of_several_operators_becomes_one(forms: dict[str, str]) -> None:
    original = _model(**forms)
    model, misses = testing.folded(original, fold_rms_norm)
    assert testing.operator_names(model) == ["SimplifiedLayerNormalization"]
    assert misses == []
    x = np.random.default_rng(1).standard_normal((2, 3, 24), np.float32)
    feeds = {"x": x, "fed": np.zeros((), np.float32)}
    found, expected = (testing.run(m, feeds)[0] for m in (model, original))
    # A sum of 24 squares, all positive, and five operations: 29 roundings of the result on each side.
    np.testing.assert_allclose(found, expected, rtol=2 * 29 * testing.FLOAT32_ROUNDING)
    testing.check(model)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"axes": "[1]"}, "the mean is over the axes [1], expected the last one"),
        ({"keepdims": "0"}, "the mean drops its axis (keepdims = 0)"),
        ({"total": "mean, fed"}, "the mean of squares is not in Sqrt(mean + epsilon)"),
        ({"root": "Log (total)"}, "the mean of squares is not in Sqrt(mean + epsilon)"),
        ({"normalised": "normalised = Mul (x, root)"}, "the root is not used as 1 / Sqrt(..) or X / Sqrt(..)"),
        (
            {"normalised": "inverse = Div (one, root) normalised = Mul (fed, inverse)"},
            "1 / Sqrt(..) does not multiply the X whose mean of squares it is",
        ),
        ({"y": "normalised, fed"}, "the weight is not a constant vector"),
        ({"y": "normalised, short"}, "the weight has 1 numbers, and X 24 in its last axis"),
        ({"also": ", float[B, S, 24] normalised"}, "what is normalised is not multiplied by a weight"),
    ],
)
def test_unmatched_graph_reports_miss(changed: dict[str, str], reason: str) -> None:
    model, misses = testing.folded(_model(**changed), fold_rms_norm)
    assert "ReduceMean" in testing.operator_names(model)
    assert [(miss.rule, miss.reason[: len(reason)]) for miss in misses] == [("rms_norm", reason)]
